"""What a LoRA adapter computes, as a digest of its files: an adapter trained again under its old name and path is another one.

Files of a server that runs may change. vLLM goes on with the weights it has read, or reads the new ones when the adapter
was dropped from its memory in between, and says neither. Until the server starts again, or the adapter is loaded under
another path, its requests are left to vLLM alone. With `load_inplace` vLLM reads the files anew whenever it uses them.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.vllm.identity import weights_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("vllm.forebay")

#: Name, size and time of change of each file of an adapter.
Listing = tuple[tuple[str, int, int], ...]


class Adapters:
    """Digests of the adapters that this server has met."""

    def __init__(self) -> None:
        self._met: dict[tuple[int, str], tuple[Listing, str]] = {}
        self._reported: set[str] = set()

    def digest(self, lora: LoRARequest) -> str | None:
        """Digest of the adapter's files; None where nobody can say which weights vLLM computes with."""
        folder = _folder(lora.lora_path)
        if folder is None:
            return self._unknown(lora, "its files are not on this machine yet")
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
        if lora.lora_name not in self._reported:
            self._reported.add(lora.lora_name)
            logger.warning("requests with the LoRA adapter %s are not cached: %s", lora.lora_name, why)


def _folder(path: str) -> Path | None:
    """Where the adapter's files lie, as vLLM finds them; nothing is fetched."""
    folder = Path(path).expanduser()
    if folder.is_absolute() or folder.exists():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except Exception:  # noqa: BLE001 - the hub's own errors, and what it makes of names that are none
        return None


def _listing(folder: Path) -> Listing:
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256((weights_digest(str(folder)) or "").encode())
    config = folder / "adapter_config.json"
    digest.update(config.read_bytes() if config.exists() else b"")
    return digest.hexdigest()
