"""Which SGLang this package was written against and tested with. Another one is refused by name.

SGLang changes what it asks of a backend between minor versions, without a number that tells: a method that is missing shows as a miss
on every lookup, and one that means something else as wrong KV.
"""

from __future__ import annotations

import forebay

#: The versions that each door was read and run against.
HICACHE = ("0.5.23",)
LINKER = ("0.5.23",)


def require(door: str, known: tuple[str, ...]) -> str:
    """SGLang's version; refuses one that `door` was not made for."""
    import sglang

    version = str(sglang.__version__)
    if version not in known:
        raise forebay.Unsupported(
            f"SGLang {version}: Forebay's {door} works with SGLang {', '.join(known)}; install that version, or start SGLang without {door}"
        )
    return version
