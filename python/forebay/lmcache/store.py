"""The object store that `Adapter` and `Connector` use."""

from __future__ import annotations

from typing import Any

import forebay


def open_store(namespace: str = "default", **settings: Any) -> forebay.ObjectStore:
    """LMCache's values as objects in the cache directories of `settings`, under LMCache's own keys.

    `namespace` separates servers that must not see each other's values, such as two versions of a model under one name, or two
    KV types: LMCache's keys have the model's name, the ranks and the tokens. All other arguments are Forebay's settings
    (docs/configuration.md).
    """
    if "max_capacity_gb" in settings or "eviction" in settings:
        raise forebay.ConfigError(
            "max_capacity_gb and eviction are not Forebay's: say `capacity` in adapter_params; Forebay evicts by itself"
        )
    return forebay.ObjectStore(settings or None, namespace=f"lmcache/{namespace}")
