"""Forebay for SGLang: `HiCache` keeps on local NVMe what falls out of SGLang's host memory, and `Linker` moves KV between NVMe and GPU
memory without it (docs/sglang.md).

Importing this package imports neither SGLang nor torch; the classes are resolved on first use. `python -m forebay.sglang` prints the
flags that SGLang is started with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.sglang.linker import Linker as Linker
    from forebay.sglang.storage import HiCache as HiCache

__all__ = ["HiCache", "Linker"]


def __getattr__(name: str) -> Any:
    """The class that SGLang looks for in the module that its flags name."""
    if name == "HiCache":
        from forebay.sglang.storage import HiCache

        return HiCache
    if name == "Linker":
        from forebay.sglang.linker import Linker

        return Linker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
