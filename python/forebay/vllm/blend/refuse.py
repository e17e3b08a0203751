"""What cannot blend is refused by name when blending is opened, before a wrong answer is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.vllm.geometry import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: vLLM's worker_extension_cls.
EXTENSION = "forebay.vllm.blend.worker.BlendWorker"


def configuration(config: VllmConfig) -> None:
    """Refuses what the configuration alone shows."""
    parallel, model = config.parallel_config, config.model_config
    sizes = {
        "pipeline parallelism": parallel.pipeline_parallel_size,
        "data parallelism": parallel.data_parallel_size,
        "decode context parallelism": getattr(parallel, "decode_context_parallel_size", 1),
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1),
    }
    for name, size in sizes.items():
        if size > 1:
            raise _no(f"{name} of {size}", "start one worker")
    if config.speculative_config is not None:
        raise _no("speculative decoding", "start without a speculative configuration")
    if config.lora_config is not None:
        raise _no("LoRA", "start without --enable-lora")
    if model.uses_mrope:
        raise _no("positions of several dimensions (mRoPE)", "use a model with plain rotary positions")
    if model.is_multimodal_model:
        raise _no("a multimodal model", "use a text model")
    if config.cache_config.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise _no(f"a KV cache of {config.cache_config.cache_dtype}", "start with --kv-cache-dtype auto")
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != "ForebayConnector":
        raise _no("a server without ForebayConnector as its connector", "name it in kv_transfer_config")
    if transfer.kv_role != "kv_both":
        raise _no(f"the role {transfer.kv_role}", "start with kv_role kv_both: a blend is stored, then loaded")


def live(config: VllmConfig, layerwise: bool, is_child: bool = False) -> None:
    """Refuses what requests that blend in a running server cannot do with. `is_child`: ForebayConnector is one of MultiConnector's."""
    if is_child:
        raise _no("MultiConnector", "start with ForebayConnector alone")
    configuration(config)
    if layerwise:
        raise _no("use_layerwise", "leave it off")
    if config.parallel_config.worker_extension_cls != EXTENSION:
        raise _no("workers that do not know the model to the connector", f"start with --worker-extension-cls {EXTENSION}")


def groups(count: int) -> None:
    """Refuses several KV cache groups."""
    if count != 1:
        raise _no(f"{count} KV cache groups", "use a model whose layers all have full attention")


def runner(of: Any) -> None:
    """Refuses what vLLM's model runner shows: device, KV cache groups, attention backends, layers."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    if of.device.type not in ("cpu", "cuda"):
        raise _no(f"KV on {of.device.type}", "use a CPU or an NVIDIA GPU")
    groups(len(of.attn_groups))
    layers = of.vllm_config.compilation_config.static_forward_context
    for group in of.attn_groups[0]:
        spec = group.kv_cache_spec
        if not isinstance(spec, FullAttentionSpec) or isinstance(spec, MLAAttentionSpec):
            raise _no(f"KV of kind {type(spec).__name__}", "use a model with full attention")
        if spec.sliding_window is not None or getattr(spec, "attention_chunk_size", None) is not None:
            raise _no("sliding or chunked attention", "use a model whose layers all have full attention")
        if group.backend.forward_includes_kv_cache_update:
            raise _no(f"attention backend {group.backend.get_name()}, which writes KV while it attends", "choose another backend")
        for name in group.layer_names:
            layer = layers[name]
            if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
                raise _no(f"{name}, which shares another layer's KV", "use a model whose layers have KV of their own")
            window = getattr(layer.impl, "sliding_window", None)
            if window not in (None, -1, (-1, -1)):
                raise _no(f"{name} with a sliding window", "use a model whose layers all have full attention")


def _no(what: str, remedy: str) -> Unsupported:
    return Unsupported(f"blending does not work with {what}; {remedy}")
