"""What a LoRA adapter computes, as a digest of its files: an adapter trained again under its old name and path is another one.

The digest is taken when vLLM loads the adapter, or at its first request. Files of a server that runs may change. vLLM goes on
with the weights it has read, or reads the new ones when the adapter was dropped from its memory in between, and says neither. Until the server starts again, or the adapter is loaded under
another path, its requests are left to vLLM alone. With `load_inplace` vLLM reads the files anew whenever it uses them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.vllm.identity import snapshot_folder, weights_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("vllm.forebay")

#: Name, size and time of change of each file of an adapter.
Listing = tuple[tuple[str, int, int], ...]


class Adapters:
    """Digests of the adapters that this server has met."""

    def __init__(self) -> None:
        self._met: dict[tuple[int, str], tuple[Listing, str]] = {}
        self._reported: set[tuple[str, str]] = set()
        _listening.add(self)
        _listen()

    def digest(self, lora: LoRARequest) -> str | None:
        """Digest of the adapter's files; None where nobody can say which weights vLLM computes with."""
        folder = _local(lora.lora_path) or _fetched(lora.lora_path)
        if folder is None:
            return self._unknown(lora, "its files are not on this machine")
        try:
            listing = _listing(folder)
            met = self._met.get(place := (lora.lora_int_id, lora.lora_path))
            if met is not None and met[0] == listing:
                return met[1]
            digest = _digest(folder)
        except OSError as e:
            return self._unknown(lora, str(e))
        if met is not None and met[1] != digest and not lora.load_inplace:
            return self._unknown(lora, "its files have changed since it was loaded; load it from another path, or start again")
        self._met[place] = (listing, digest)
        return digest

    def _unknown(self, lora: LoRARequest, why: str) -> None:
        if (reported := (lora.lora_name, why)) not in self._reported:
            self._reported.add(reported)
            logger.warning("requests with the LoRA adapter %s are not cached: %s", lora.lora_name, why)


_listening: weakref.WeakSet[Adapters] = weakref.WeakSet()


@functools.cache
def _listen() -> None:
    """Has the engine of this process say which adapter it is about to load. A connector hears of it with the adapter's first
    request only, and its files may be others by then."""
    from vllm.v1.engine.core import EngineCore

    load = EngineCore.add_lora

    @functools.wraps(load)
    def add_lora(core: Any, lora_request: LoRARequest) -> Any:
        # An adapter of a hub may be fetched anew as it is loaded, and is not changed afterwards.
        is_local = _local(lora_request.lora_path) is not None
        loaded = None if is_local else load(core, lora_request)
        for adapters in list(_listening):
            adapters.digest(lora_request)
        return load(core, lora_request) if is_local else loaded

    EngineCore.add_lora = add_lora  # type: ignore[method-assign]


def _local(path: str) -> Path | None:
    """An adapter's folder; None where the path names one of a hub."""
    folder = Path(path).expanduser()
    return folder if folder.is_absolute() or folder.exists() else None


def _fetched(path: str) -> Path | None:
    """Where vLLM has fetched an adapter of a hub to; nothing is fetched here."""
    from vllm import envs

    return snapshot_folder(path, None, None, bool(envs.VLLM_USE_MODELSCOPE))


def _listing(folder: Path) -> Listing:
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256((weights_digest(str(folder)) or "").encode())
    config = folder / "adapter_config.json"
    digest.update(config.read_bytes() if config.exists() else b"")
    return digest.hexdigest()
