"""The connector's settings: `kv_connector_extra_config` is what the engine's own loader reads as settings from code.

The loader knows every key, refuses a misspelt one with advice, reads the file that `config_file` names, and the environment; nothing is
parsed here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

    LoadLimit = Callable[[Request, int, int], int]

#: What a user may add to the identity of the stored bytes, such as a digest of the weights.
FINGERPRINT = "fingerprint"
LAYERWISE = "use_layerwise"
BLENDING = "enable_blending"
MEMORY, PREFETCH = "local_cpu", "prefetch"
#: A function of the user's own, `module:function`, that may lower what is loaded for a request. Of
#: this package alone.
LOAD_LIMIT = "load_limit"


@dataclass(frozen=True)
class Settings:
    """The settings in effect, read once in each process."""

    engine: dict[str, Any]
    """What the engine and the state machines get: the settings file that is named, and the keys whose values differ from those that
    file and environment give."""
    resolved: dict[str, Any]
    """All of them."""
    load_limit: LoadLimit | None = None
    """Called with vLLM's request, the tokens that vLLM has of it, and those beyond them that can be loaded; says how many of the
    latter may be."""

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
    def prefetch(self) -> bool:
        """What is stored of waiting requests is read into the memory tier ahead."""
        return bool(self.resolved[MEMORY]) and bool(self.resolved[PREFETCH])

    @property
    def blends(self) -> bool:
        """Requests may have segments of them blended."""
        return bool(self.resolved[BLENDING])

    @property
    def fingerprint(self) -> str:
        """The user's own addition to the identity of the stored bytes."""
        return str(self.resolved[FINGERPRINT] or "")


def is_on(name: str, value: Any) -> bool:
    """Whether a setting is switched on, written as the engine's own may be (docs/configuration.md)."""
    # A key without a value is not given.
    said = "no" if value is None else str(value).strip().lower()
    if said in ("1", "true", "yes", "on"):
        return True
    if said in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{name} is {value!r}: give true or false")


def read(extra: Mapping[str, Any]) -> Settings:
    """The settings that `kv_connector_extra_config` gives; its keys outrank the environment and the file that it names."""
    import forebay
    from forebay.connector import settings

    extra = dict(extra)
    load_limit = extra.pop(LOAD_LIMIT, None)
    # The engine reads the same file, where one is named.
    named = {key: extra[key] for key in ("config_file",) if extra.get(key) is not None}
    resolved = settings(extra, name="kv_connector_extra_config")
    try:
        without = settings(named)
    except forebay.ForebayError:
        # It contradicts itself without the keys that outrank it here.
        without = {key: None for key in resolved}
    # Only what differs: the engine may warn of a key that is given, whatever its value. None would
    # not outrank the file.
    differing = {key: value for key, value in resolved.items() if value != without[key]}
    engine = named | {key: "none" if value is None else value for key, value in differing.items()}
    return Settings(engine, resolved, None if load_limit is None else _function(load_limit))


def _function(named: Any) -> LoadLimit:
    """What `module:function` names, or the function itself."""
    if isinstance(named, str):
        module, _, name = named.partition(":")
        try:
            named = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{LOAD_LIMIT} is {named!r}: {error}; write module:function, of a module that vLLM can import") from error
    if not callable(named):
        raise ValueError(f"{LOAD_LIMIT} is {named!r}, which cannot be called; write module:function")
    return named
