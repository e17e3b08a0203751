"""What, besides the layout of pages, decides the meaning of stored KV bytes: model, weights, types, SGLang's version.

The same on every rank that holds the same KV. The name under which a model is served is no part of it: two models may be served under
one name. A change of any part starts a new namespace, never a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import forebay
from forebay.vllm.identity import snapshot_folder, weights_digest

#: What SGLang is started with that changes what it computes, or how it lays it out.
ARGUMENTS = (
    "revision",
    "load_format",
    "quantization",
    "dtype",
    "kv_cache_dtype",
    "quantization_param_path",
    "json_model_override_args",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "swa_full_tokens_ratio",
    "mamba_ssm_dtype",
)
#: Others that quantize or replace weights as they are loaded, or change what layers give. They count
#: where they are given only.
LOADING = ("modelopt_quant", "modelopt_checkpoint_restore_path", "model_loader_extra_config", "rl_quant_profile", "forward_hooks")


def of(server_args: Any, version: str, fingerprint: str) -> str:
    """A short digest of every part. `fingerprint` is what the user adds, such as a digest of the weights."""
    # Where SGLang loads from: its record keeps what the user said, as of a model of ModelScope.
    path = str(resolved(server_args, "model_path"))
    given = {name: str(getattr(server_args, name, None)) for name in ARGUMENTS}
    seed = str(getattr(server_args, "random_seed", None)) if given["load_format"] == "dummy" else None
    revision, fetched_to = getattr(server_args, "revision", None), getattr(server_args, "download_dir", None)
    folder = Path(path).parent if Path(path).is_file() else local_folder(path, revision)
    weights = weights_digest(path) if folder is None or Path(path).is_file() else weights_digest(str(folder))
    if weights is None and (snapshot := snapshot_folder(path, revision, fetched_to)) is not None:
        weights = weights_digest(str(snapshot))
    fetched = folder if folder is not None and folder.parent.name == "snapshots" else None
    is_lent = given["load_format"] == "remote_instance" or getattr(server_args, "weight_cache_mode", None) == "client"
    is_known = weights is not None or fetched is not None or given["load_format"] == "dummy"
    if (is_lent or not is_known) and not fingerprint:
        raise forebay.Unsupported(
            "SGLang does not tell which weights it has (from another server, an object store, or a hub's folder that is not here): after "
            "a change of them, KV of the old ones would be loaded; give `fingerprint` in the extra config, a name for these weights, or "
            "start SGLang with weights from a local directory"
        )
    parts = {
        "sglang": version,
        "commit": None if fetched is None else fetched.name,
        # A local model is what lies in its folder, wherever that is. A folder without weights, as the
        # hub's cache has beside a --download-dir, tells nothing but the configuration.
        "model": path if weights is None else None,
        "weights": weights,
        "config": None if folder is None else config_digest(folder),
        "arguments": given,
        "seed": seed,
        "fingerprint": fingerprint,
    }
    if loading := {name: str(value) for name in LOADING if (value := getattr(server_args, name, None)) not in (None, "", "{}")}:
        parts["loading"] = loading
    if found := adapters(getattr(server_args, "lora_paths", None)):
        parts["adapters"] = found
    # What may be made anew in its place.
    if scales := getattr(server_args, "quantization_param_path", None):
        parts["scales"] = file_digest(Path(scales))
    if draft := resolved(server_args, "speculative_draft_model_path"):
        place = local_folder(str(draft), getattr(server_args, "speculative_draft_model_revision", None)) or Path(draft)
        parts["draft"] = [weights_digest(str(place)), config_digest(place)]
    return digest(parts)


def resolved(server_args: Any, name: str) -> Any:
    """An argument as SGLang has resolved it."""
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(server_args, name)


def adapters(given: Any) -> list[list[str | None]]:
    """The LoRA adapters that SGLang starts with, as `--lora-paths` or SGLang's records of it name them.

    SGLang's keys have an adapter's name and path alone, and one that was trained anew lies in the same place.
    """
    paths = set()
    for one in given.values() if isinstance(given, dict) else given or ():
        if isinstance(one, str):
            paths.add(one.split("=", 1)[-1])
        else:
            paths.add(str(one.get("lora_path") if isinstance(one, dict) else getattr(one, "lora_path", None)))
    folders = {path: local_folder(path, None, "adapter_config.json") or Path(path) for path in sorted(paths)}
    return [[path, weights_digest(str(folder)), config_digest(folder, "adapter_config.json")] for path, folder in folders.items()]


def digest(parts: Any) -> str:
    """24 hexadecimal digits over plain data."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def local_folder(path: str, revision: str | None, name: str = "config.json") -> Path | None:
    """Where the files of a model or an adapter lie: its folder, or the snapshot in the hub's cache; None where that is not known yet."""
    if Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, name, revision=revision)
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def config_digest(folder: Path, name: str = "config.json") -> str | None:
    """Digest of the model's configuration, rotary parameters among it."""
    return file_digest(folder / name)


def file_digest(path: Path) -> str | None:
    """Digest of a small file; None where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
