"""Which SGLang this package was written against and tested with. Another one is refused by name.

SGLang changes what it asks of a backend between minor versions, without a number that tells: a method that is missing shows as a miss
on every lookup, and one that means something else as wrong KV.
"""

from __future__ import annotations

import forebay

#: The versions that the HiCache backend was read and run against.
HICACHE = ("0.5.23",)


def require() -> str:
    """SGLang's version; refuses one that the backend was not made for."""
    import sglang

    version = str(sglang.__version__)
    if version not in HICACHE:
        raise forebay.Unsupported(
            f"SGLang {version}: Forebay's HiCache backend works with SGLang {', '.join(HICACHE)}; install that version, or start SGLang "
            "without --hicache-storage-backend"
        )
    return version
