"""The connector's settings: `kv_connector_extra_config` is what the engine's own loader reads as settings from code.

The loader knows every key, refuses a misspelt one with advice, reads the file that `config_file` names, and the environment; nothing is
parsed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

#: What a user may add to the identity of the stored bytes, such as a digest of the weights.
FINGERPRINT = "fingerprint"
LAYERWISE = "use_layerwise"


@dataclass(frozen=True)
class Settings:
    """The settings in effect, read once in each process."""

    engine: dict[str, Any]
    """What the engine and the state machines get: keys that are not what this process's environment says alone."""
    resolved: dict[str, Any]
    """All of them."""

    @property
    def layerwise(self) -> bool:
        """Loads layer by layer inside the forward pass instead of whole requests between steps."""
        return bool(self.resolved[LAYERWISE])

    @property
    def is_auto(self) -> bool:
        """Layer-wise only where nothing speaks against it."""
        return self.resolved[LAYERWISE] == "auto"

    def whole(self) -> Settings:
        """The same without layer-wise loads."""
        off = {LAYERWISE: False}
        return replace(self, engine=self.engine | off, resolved=self.resolved | off)

    @property
    def fingerprint(self) -> str:
        """The user's own addition to the identity of the stored bytes."""
        return str(self.resolved[FINGERPRINT] or "")


def is_on(value: Any) -> bool:
    """Whether a setting is switched on, however it was written."""
    if isinstance(value, str):
        return value.strip().lower() in ("1", "true", "yes", "on")
    return bool(value)


def read(extra: Mapping[str, Any]) -> Settings:
    """The settings that `kv_connector_extra_config` gives; its keys outrank the environment and the file that it names."""
    from forebay.connector import settings

    resolved, without = settings(dict(extra), name="kv_connector_extra_config"), settings({})
    # Only what differs: a key that is given counts as asked for, and may bring a warning.
    return Settings({key: value for key, value in resolved.items() if value != without[key]}, resolved)
