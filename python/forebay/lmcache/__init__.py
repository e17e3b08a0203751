"""Forebay for LMCache: the classes that LMCache's server makes from the JSON line of `--l2-adapter` (docs/lmcache.md).

`Adapter` is for `"type": "plugin"`, `Connector` for `"type": "native_plugin"`. A value that is not mere bytes has its layout in its name
with `Adapter` alone, so neither finds the KV of the other.

`Connector` knows nothing of LMCache's packages; `Adapter` derives from LMCache's interface, and LMCache is imported only when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.lmcache.native import Connector

if TYPE_CHECKING:
    from forebay.lmcache.plugin import Adapter

__all__ = ["Adapter", "Connector"]


def __getattr__(name: str) -> Any:
    if name == "Adapter":
        from forebay.lmcache.plugin import Adapter

        return Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
