"""What, besides the layout of pages, decides the meaning of stored KV bytes: model, weights, types, SGLang's version.

The same on every rank that holds the same KV. The name under which a model is served is no part of it: two models may be served under
one name. A change of any part starts a new namespace, never a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import os
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
#: Further options that decide what KV is or means, with SGLang's defaults. Each is part of the
#: identity where it is not its default. tests/sglang/test_options.py has those that cannot change
#: KV, and why.
OTHERS: dict[str, Any] = {
    # Which code computes, at which positions, on what. Engram layers read the tokenizer.
    "device": None,
    "context_length": None,
    "model_impl": "auto",
    "model_config_parser": "auto",
    "trust_remote_code": False,
    "tokenizer_path": None,
    "tokenizer_mode": "auto",
    # Types, of weights, activations and what is stored.
    "quantize_and_serve": False,
    "qsa_indexer_dtype": "auto",
    "enable_deepseek_v4_fp4_indexer": False,
    "enable_int8_mamba_checkpoint": False,
    "prefill_kv_cache_dequant_dtype": "auto",
    "enable_tf32_matmul": None,
    "enable_quant_communications": False,
    # Some of these compute with weights or activations of another type, or lay out what they store.
    "moe_runner_backend": "auto",
    "moe_a2a_backend": "none",
    "deepep_dispatcher_output_dtype": "auto",
    "flashinfer_a2a_dispatch_type": None,
    "flashinfer_mxfp4_moe_precision": "default",
    "enable_w4a4_mxfp4_megamoe": False,
    "enable_megamoe_for_layernorm_sp": False,
    "fp8_gemm_runner_backend": "auto",
    "fp4_gemm_runner_backend": "auto",
    "dsa_prefill_backend": None,
    "dsa_decode_backend": None,
    "dsv4_prefill_backend": "auto",
    "enable_dsa_fused_indexer": None,
    "mamba_backend": "triton",
    "linear_attn_backend": "triton",
    "linear_attn_prefill_backend": None,
    "linear_attn_decode_backend": None,
    "linear_attn_verify_backend": None,
    "enable_linear_replayssm": False,
    "enable_linear_replayssm_spec": False,
    "enable_nvidia_megakernel": False,
    "enable_amd_monokernel": False,
    # Who asks for these compares bits.
    "enable_deterministic_inference": False,
    "rl_on_policy_target": None,
    # What is computed at all. With `fake`, experts are chosen at random.
    "ep_dispatch_algorithm": None,
    "enable_hisparse": False,
    "hisparse_config": None,
    "dllm_algorithm": None,
    "enable_encoder_swa_bounded_replay": False,
    # What a rank holds of it, and in which order.
    "enable_page_major_kv_layout": False,
    "enable_unified_memory": False,
    "dcp_size": 1,
    "enable_prefill_cp": False,
    "cp_strategy": None,
    "enable_dsa_cache_layer_split": False,
    "enable_kv_cache_sharding": False,
    "enable_scattered_sconv": False,
    "c128_page_size": 16,
    # What an image or a sound becomes: keys name what it is.
    "enable_multimodal": None,
    "language_only": False,
    "language_model_only": False,
    "mm_process_config": None,
    "image_processor_backend": "auto",
    "disable_fast_image_processor": False,
    "mm_attention_backend": None,
    "enable_precise_embedding_interpolation": False,
    # The model that drafts tokens: its KV is stored beside the served model's.
    "speculative_draft_load_format": None,
    "speculative_draft_model_quantization": None,
    "speculative_draft_kv_cache_dtype": None,
    "speculative_draft_attention_backend": None,
    "speculative_draft_window_size": None,
    "speculative_draft_sink_size": None,
    "speculative_moe_runner_backend": None,
    "speculative_moe_a2a_backend": None,
    "speculative_enable_w4a4_mxfp4_megamoe": None,
    "enable_multi_layer_eagle": False,
}
#: Options that SGLang decides by model, hardware and other options, with what most servers have. What
#: it has decided counts, not what the user said.
DECIDED: dict[str, tuple[Any, ...]] = {
    # The windows of late layers have holes.
    "enable_decoder_swa_bounded_replay": (None, False),
    # Others lay the KV out differently.
    "dsv4_attn_backend": ("auto", "flashmla"),
    # Quantizes shared experts that the checkpoint does not.
    "enforce_shared_experts_fusion": (False,),
}
#: Files that decide what is computed, and may be made anew in their place.
FILES = ("decrypted_config_file", "decrypted_draft_config_file", "dllm_algorithm_config")
#: The same, of any size.
CHECKPOINTS = ("modelopt_checkpoint_restore_path", "rl_quant_profile")
#: How the experts of `kt_weight_path` are computed. Those that are deferred count a layer later.
EXPERTS = ("kt_method", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token")


#: Variables of SGLang's that change how KV is laid out, or which weights are quantized and how. They
#: count where they are set.
VARIABLES = (
    "SGLANG_AITER_KV_CACHE_LAYOUT",
    "SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
    "SGLANG_DSV4_FP4_DEQUANT",
    "SGLANG_DSV4_FP4_EXPERTS",
    "SGLANG_DSV4_KV_LAYOUT",
    "SGLANG_FP4_IGNORED_LAYERS",
    "SGLANG_FP8_IGNORED_LAYERS",
    "SGLANG_USE_HND_KVCACHE",
)


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
    # KTransformers computes experts on the CPU, with weights of their own.
    experts = getattr(server_args, "kt_weight_path", None)
    of_experts = weights_digest(str(experts)) if experts else None
    is_known = is_known and (not experts or of_experts is not None)
    if (is_lent or not is_known) and not fingerprint:
        raise forebay.Unsupported(
            "SGLang does not tell which weights it has (from another server, an object store, a hub's folder that is not here, or a "
            "--kt-weight-path without files of weights in it): after a change of them, KV of the old ones would be loaded; give "
            "`fingerprint` in the extra config, a name for these weights, or start SGLang with weights from a local directory"
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
    if changed := others(server_args):
        parts["others"] = changed
    if experts:
        parts["experts"] = [of_experts or str(experts), *(str(getattr(server_args, name, None)) for name in EXPERTS)]
    if found := adapters(getattr(server_args, "lora_paths", None)):
        parts["adapters"] = found
        # SGLang leaves out what an adapter has for other modules.
        if any(adapted := adapting(server_args)):
            parts["adapting"] = adapted
    if drafter := getattr(server_args, "uno_lora_path", None):
        parts["drafter"] = adapters([str(drafter)])
    # What may be made anew in its place.
    files = {name: file_digest(Path(file)) or str(file) for name in FILES if (file := getattr(server_args, name, None))}
    files |= {name: weights_digest(str(file)) for name in CHECKPOINTS if (file := getattr(server_args, name, None))}
    if files:
        parts["files"] = files
    if variables := {name: value for name in VARIABLES if (value := os.environ.get(name))}:
        parts["variables"] = variables
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


def others(server_args: Any) -> dict[str, str]:
    """The options among `OTHERS` and `DECIDED` that are not those of a plain server."""
    found = {name: getattr(server_args, name, default) for name, default in OTHERS.items()}
    found = {name: value for name, value in found.items() if value not in (OTHERS[name], None, "", [], {})}
    for name, plain in DECIDED.items():
        if (value := resolved(server_args, name)) not in (*plain, None):
            found[name] = value
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in found.items()}


def adapting(server_args: Any) -> list[Any]:
    """What SGLang makes of an adapter's files: the modules that it applies adapters to, and whether experts share their outer part."""
    is_shared = getattr(server_args, "experts_shared_outer_loras", None)
    modules = sorted(map(str, getattr(server_args, "lora_target_modules", None) or ()))
    return [modules, "" if is_shared is None else str(is_shared)]


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
