"""What, besides sizes, decides the meaning of stored KV bytes: model, weights, types, attention backend, vLLM's version.

The same string on every rank and in the scheduler; a change of any part starts a new namespace, never a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.forebay")

#: Bytes read at each place of the weights, and the number of places, over all files. So many, so that
#: every large tensor has one: an adapter merged in place changes no more than some projections.
SAMPLE_BYTES, SAMPLES = 1 << 12, 1 << 14
#: Configuration that says where a model came from, not what it computes.
ORIGIN_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "_commit_hash", "architectures")
#: What a multimodal input becomes besides what it is. vLLM's names of inputs have a request's own
#: settings in them, and none of the server's.
MULTIMODAL_KEYS = (
    "language_model_only",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
#: Further options that decide what KV is or means, by the part of vLLM's configuration. Each is
#: part of the identity where it is not vLLM's default. tests/vllm/harness/test_options.py has the
#: others.
OTHERS = {
    "model_config": {"code_revision": None, "model_impl": "auto", "model_class_overrides": {}},
    "attention_config": {"use_non_causal": False, "indexer_kv_dtype": "auto"},
    "cache_config": {"swa_bounded_replay": True},
    "load_config": {"ignore_patterns": ["original/**/*"]},
    "kernel_config": {"moe_backend": "auto", "linear_backend": "auto", "linear_backend_per_quant": None},
    "speculative_config": {"kv_cache_dtype": None, "attention_backend": None, "moe_backend": None, "code_revision": None},
    "diffusion_config": {"canvas_length": None, "max_denoising_steps": None},
    None: {"additional_config": {}},
}
#: Formats of loading whose weights another process has.
LENT = ("ipc_cache", "modelexpress")
#: How weights are read, not which they are; credentials begin with `s3_`.
HOW_LOADED = ("concurrency", "memory_limit", "num_threads", "num_readers", "distributed", "enable_multithread_load", "encryption_keyfile")
#: Kinds of models whose KV of short prompts vLLM computes otherwise where it serves long ones.
LENGTH_DEPENDENT = ("longrope", "llama4")


def kv_dtype(vllm_config: VllmConfig) -> str:
    """Name of the KV cache's element type."""
    name = str(vllm_config.cache_config.cache_dtype)
    return str(vllm_config.model_config.dtype).removeprefix("torch.") if name == "auto" else name


def fingerprint(vllm_config: VllmConfig, addition: str, blocks: Any = None) -> str:
    """Every part of the identity, as one canonical string; `blocks`: how a worker's tensors order the bytes of a block."""
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    parts: dict[str, Any] = {
        "revision": model.revision,
        "commit": commit(model),
        "weights": weights(model, vllm_config.load_config),
        "load_format": str(vllm_config.load_config.load_format),
        "seed": model.seed if str(vllm_config.load_config.load_format) == "dummy" else None,
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_dtype": kv_dtype(vllm_config),
        "model_config": config_digest(model.hf_config),
        "backend": backend(vllm_config),
        "layout": str(getattr(cache, "kv_cache_layout", None)),
        "device": vllm_config.device_config.device_type,
        "vllm": vllm.__version__,
        "addition": addition,
    }
    if loader := loader_digest(getattr(vllm_config.load_config, "model_loader_extra_config", None)):
        parts["loader"] = loader
    if blocks is not None:
        parts["blocks"] = blocks
    if kinds := getattr(getattr(vllm_config, "attention_config", None), "backend_per_kind", None):
        parts["backend_per_kind"] = {str(kind): str(chosen) for kind, chosen in kinds.items()}
    if skipped := getattr(cache, "kv_cache_dtype_skip_layers", None):
        parts["kv_dtype_skip_layers"] = sorted(map(str, skipped))
    if changed := others(vllm_config):
        parts["others"] = changed
    if any(adapted := adapting(vllm_config)):
        parts["adapters"] = adapted
    parallel = vllm_config.parallel_config
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        parts["interleave"] = parallel.cp_kv_cache_interleave_size
    if parallel.pipeline_parallel_size > 1:
        parts["stages"] = stages(vllm_config)
    if (drafting := draft(vllm_config)) is not None:
        parts["draft"] = drafting
    if vllm_config.device_config.device_type == "cpu":
        parts["processor"] = processor()
    if model.quantization_config is not None:
        parts["quantization_config"] = repr(model.quantization_config)
    if (media := model.multimodal_config) is not None:
        parts["multimodal"] = {key: str(getattr(media, key, None)) for key in MULTIMODAL_KEYS}
    if (length := longest(vllm_config)) is not None:
        parts["max_model_len"] = length
    text = json.dumps(parts, sort_keys=True)
    logger.debug("identity: %s", text)
    return text


def others(vllm_config: VllmConfig) -> dict[str, str]:
    """The options among `OTHERS` that are not vLLM's defaults."""
    found = {}
    for part, options in OTHERS.items():
        holder = vllm_config if part is None else getattr(vllm_config, part, None)
        for name, default in options.items():
            value = getattr(holder, name, default)
            if value not in (default, None, {}):
                # A platform's own configuration need not be a dict.
                said = value.compute_hash() if hasattr(value, "compute_hash") else json.dumps(value, sort_keys=True, default=str)
                found[name if part is None else f"{part}.{name}"] = said
    return found


def adapting(vllm_config: VllmConfig) -> list[Any]:
    """What the server makes of an adapter's files: the modules that it applies adapters to, and how it reads those of experts."""
    config = getattr(vllm_config, "lora_config", None)
    named = ("enable_mixed_moe_lora_format", "enable_moe_shared_loras", "enable_tower_connector_lora")
    return [sorted(getattr(config, "target_modules", None) or ()), *(bool(getattr(config, name, False)) for name in named)]


def processor() -> list[Any]:
    """The processor's kind, as far as vLLM's attention on a CPU chooses the order of a block's bytes by it."""
    import torch

    return [platform.machine(), bool(torch.cpu._is_amx_tile_supported())]


def longest(vllm_config: VllmConfig) -> int | None:
    """Tokens of the longest request, where the model's KV depends on it: Phi's long rotary positions, Llama 4's temperature."""
    model = vllm_config.model_config
    if not any(kind in _text(model.hf_config) for kind in LENGTH_DEPENDENT):
        return None
    # `auto` follows from the memory that is free at a start, and the model is made before that.
    return -1 if model.original_max_model_len == -1 else model.max_model_len


def stages(vllm_config: VllmConfig) -> list[tuple[int, int]]:
    """First layer and end of each pipeline stage: stages of as many layers may be of other ones."""
    from vllm.distributed.utils import get_pp_indices

    layers, count = vllm_config.model_config.get_total_num_hidden_layers(), vllm_config.parallel_config.pipeline_parallel_size
    return [get_pp_indices(layers, stage, count) for stage in range(count)]


def draft_model(vllm_config: VllmConfig) -> Any:
    """The model of its own that drafts tokens: vLLM keeps the KV of its layers beside the served model's, and it is stored with it."""
    model = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    # The served model's own files are part of the identity already.
    return None if model is None or model.model == vllm_config.model_config.model else model


def draft_load(vllm_config: VllmConfig) -> Any:
    """How the model that drafts tokens is loaded."""
    return getattr(vllm_config.speculative_config, "draft_load_config", None) or vllm_config.load_config


def draft(vllm_config: VllmConfig) -> list[Any] | None:
    """What decides the KV of the model that drafts tokens."""
    if (model := draft_model(vllm_config)) is None:
        # Of the served model's own files too: hidden states are kept of the layers that the draft's
        # configuration names.
        own = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
        drafts = None if own is None else config_digest(own.hf_config)
        return None if drafts in (None, config_digest(vllm_config.model_config.hf_config)) else [drafts]
    files = weights(model, draft_load(vllm_config))
    return [model.model, model.revision, commit(model), files, str(model.quantization), str(model.dtype), config_digest(model.hf_config)]


def commit(model: Any) -> str | None:
    """The commit of a model of the hub; None where it is local, or vLLM could not ask the hub."""
    # A revision with a commit is equal to the text that was asked for, such as `main`.
    if resolved := getattr(model.revision, "resolved", None):
        return str(resolved)
    # A configuration of another repository says nothing of the weights.
    of_config = getattr(model, "hf_config_path", None) in (None, model.model)
    return getattr(model.hf_config, "_commit_hash", None) if of_config else None


def weights(model: Any, load: Any) -> str | None:
    """Digest of the files that the model's weights are loaded from, where no commit names them; None where they are not here."""
    if (tensors := tensors_place(load)) is not None:
        return weights_digest(str(Path(tensors).parent)) if "://" not in tensors else None
    found = weights_digest(model.model)
    if found is None and commit(model) is None:
        snapshot = snapshot_folder(model.model, model.revision, getattr(load, "download_dir", None), _is_modelscope())
        found = None if snapshot is None else weights_digest(str(snapshot))
    return found


def tensors_place(load: Any) -> str | None:
    """Where Tensorizer reads the weights from, which need not be the model's place; None for other formats."""
    if str(getattr(load, "load_format", None)) != "tensorizer":
        return None
    given = dict(getattr(load, "model_loader_extra_config", None) or {})
    both = dict(given.get("tensorizer_config") or {}) | given
    return str(both.get("tensorizer_uri") or f"{both.get('tensorizer_dir')}/model.tensors")


def loader_digest(config: Any) -> str | None:
    """Digest of what a loader's configuration says of the weights; None where it says nothing."""

    def told(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {key: told(value) for key, value in given.items() if key not in HOW_LOADED and not key.startswith("s3_") and not key.endswith("kwargs")}
        return {key: value for key, value in kept.items() if value not in (None, {}, "")}

    said = told(config)
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest() if said else None


def are_weights_known(vllm_config: VllmConfig) -> bool:
    """Whether other weights would be another identity, as far as can be said here."""
    drafts = draft_model(vllm_config)
    loads = [(vllm_config.model_config, vllm_config.load_config)]
    return all(_are_known(model, load) for model, load in loads + ([] if drafts is None else [(drafts, draft_load(vllm_config))]))


def _are_known(model: Any, load: Any) -> bool:
    form = str(load.load_format)
    if form == "dummy":
        return True
    # An object store's URL keeps its name when its content changes.
    if form in LENT or getattr(model, "model_weights", None):
        return False
    return weights(model, load) is not None or (form != "tensorizer" and commit(model) is not None)


def _is_modelscope() -> bool:
    from vllm import envs

    return bool(envs.VLLM_USE_MODELSCOPE)


def backend(vllm_config: VllmConfig) -> str:
    """The attention backend that was asked for; vLLM's own choice follows from its version, the model and the device."""
    return str(getattr(getattr(vllm_config, "attention_config", None), "backend", None))


def config_digest(hf_config: Any) -> str:
    """Digest of the model's configuration, rotary parameters among it."""
    return hashlib.sha256(_text(hf_config).encode()).hexdigest()


def _text(hf_config: Any) -> str:
    values = {k: v for k, v in hf_config.to_dict().items() if k not in ORIGIN_KEYS}
    return json.dumps(values, sort_keys=True, default=str)


def weights_digest(path: str) -> str | None:
    """Digest over names, sizes and samples of the weights in a local directory, or of a file of weights; None where `path` is
    neither.

    Samples rather than whole files, so that a start does not read the weights twice. They notice retrained weights and merged
    adapters, not a change of a few values in place.
    """
    place = Path(path)
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = [f for f in sorted(place.iterdir()) if f.suffix in (".safetensors", ".bin", ".pt", ".gguf", ".tensors")]
    else:
        return None
    if not files:
        return None
    digest = hashlib.sha256()
    sizes = [file.stat().st_size for file in files]
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"{file.name}:{size};".encode())
        # Evenly over all bytes. A small file is read whole.
        count = min(-(-size * SAMPLES // max(sum(sizes), 1)), -(-size // SAMPLE_BYTES))
        _add_samples(digest, file, [size * n // count for n in range(count)])
    return digest.hexdigest()


def _add_samples(digest: Any, file: Path, places: list[int]) -> None:
    """Adds what stands at some places of a file."""
    with file.open("rb", buffering=0) as opened:
        descriptor = opened.fileno()
        # The drive gets all reads at once, and none of what lies between the places.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for place in places:
            os.posix_fadvise(descriptor, place, SAMPLE_BYTES, os.POSIX_FADV_WILLNEED)
        for place in places:
            digest.update(os.pread(descriptor, SAMPLE_BYTES, place))


def snapshot_folder(model: str, revision: str | None, cache_dir: str | None, is_modelscope: bool = False) -> Path | None:
    """Where a server has fetched a model of a hub to, with --download-dir or without; None where it is not there. Nothing is fetched."""
    try:
        if is_modelscope:
            from modelscope.hub.snapshot_download import snapshot_download as of_modelscope

            return Path(of_modelscope(model_id=model, revision=revision, cache_dir=cache_dir, local_files_only=True))
        from huggingface_hub import snapshot_download

        # Servers fetch a part of the files only, and the hub's library refuses a folder that lacks
        # files which it would fetch.
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True, ignore_patterns="*"))
    except Exception:  # noqa: BLE001 - the hubs' own errors, and what they make of names that are none
        return None
