"""Which SGLang this package was written against and tested with. Another one is refused by name.

SGLang changes what it asks of a backend between minor versions, without a number that tells: a method that is missing shows as a miss
on every lookup, and one that means something else as wrong KV.
"""

from __future__ import annotations

import forebay

#: The versions that the package was read and run against.
WORKS_WITH = ("0.5.23",)
#: Keys of `--hicache-storage-backend-extra-config` that are SGLang's own. It takes some of them out
#: before, but not where decode servers offload their KV.
SGLANGS_KEYS = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "file_storage_path",
    "allocator",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)


def require(flag: str) -> str:
    """SGLang's version; refuses one that the backend was not made for. `flag` is what switches the backend on."""
    import sglang

    version = str(sglang.__version__)
    if version not in WORKS_WITH:
        raise forebay.Unsupported(
            f"SGLang {version}: Forebay works with SGLang {', '.join(WORKS_WITH)}; install that version, or start SGLang without {flag}"
        )
    return version
