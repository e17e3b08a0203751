"""Where the connector's settings come from: `kv_connector_extra_config`, and the YAML or JSON file it may name.

What the adapter itself reads is taken out here; every other key goes to the engine as it is, which knows all of its keys
and refuses a misspelt one with advice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Keys that only the adapter reads.
CONFIG_FILE = "config_file"
FINGERPRINT = "fingerprint"
#: Keys for the state machines, which are no settings of the engine.
CONNECTOR_KEYS = ("load_timeout_ms", "gather_patience_ms", "min_load_tokens", "recompute_tokens_per_s", "max_held_blocks", "max_sync_stall_ms")
#: Largest settings file, as the engine's own limit.
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """The connector's settings, read once in each process."""

    engine: dict[str, Any]
    """What the engine gets, and the state machines with it."""
    connector: dict[str, Any]
    """What only the state machines get."""
    layerwise: bool
    """Loads layer by layer inside the forward pass instead of whole requests between steps."""
    fingerprint: str
    """The user's own addition to the identity of the stored bytes, such as a digest of the weights."""


def from_file(path: str) -> dict[str, Any]:
    """The settings of one file: JSON where the name ends in `.json`, YAML otherwise.

    Raises `ValueError` where the file is too large or not one map.
    """
    file = Path(path)
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: more than {MAX_FILE_BYTES} bytes; this is not a settings file")
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        read = json.loads(text)
    else:
        import yaml

        read = yaml.safe_load(text)
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise ValueError(f"{path}: settings are a map of keys to values")
    return read


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`; sections (maps) are merged key by key."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return result


def is_on(value: Any) -> bool:
    """Whether a setting is switched on, however it was written."""
    if isinstance(value, str):
        return value.strip().lower() in ("1", "true", "yes", "on")
    return bool(value)


def read(extra: Mapping[str, Any]) -> Settings:
    """The settings that `kv_connector_extra_config` gives; its keys outrank those of the file that it names."""
    engine = dict(extra)
    path = engine.pop(CONFIG_FILE, None)
    if path is not None:
        engine = merged(from_file(str(path)), engine)
    fingerprint = str(engine.pop(FINGERPRINT, ""))
    layerwise = is_on(engine.get("use_layerwise", False))
    connector = {key: engine.pop(key) for key in CONNECTOR_KEYS if key in engine}
    return Settings(engine=engine, connector=connector, layerwise=layerwise, fingerprint=fingerprint)
