"""Every option of vLLM is either part of the identity or cannot change KV: a new version's new options fail here until somebody has decided."""

from __future__ import annotations

import dataclasses
import typing
from types import SimpleNamespace
from typing import Any

from forebay.vllm import identity

#: Parts of vLLM's configuration of which no option changes KV, or its meaning, by more than
#: rounding.
NO_KV = {
    "AuxOutputConfig": "what is returned beside tokens",
    "CompilationConfig": "compiles the same computation",
    "DynamicShapesConfig": "compiles the same computation",
    "ECTransferConfig": "moves encoder outputs, which requests name by content",
    "EncoderCacheManagerConfig": "keeps encoder outputs, which requests name by content",
    "EngramConfig": "where tables lie",
    "EPLBConfig": "where experts lie",
    "FaultToleranceConfig": "operation",
    "HiSparseConfig": "where KV lies while a request decodes; its connector cannot stand beside another",
    "IrOpPriorityConfig": "chooses among equal kernels",
    "KVEventsConfig": "reports",
    "KVTransferConfig": "this connector's own settings",
    "LoggingConfig": "operation",
    "MambaConfig": "recurrent state is not stored",
    "ObservabilityConfig": "reports",
    "OffloadConfig": "where weights lie",
    "PassConfig": "compiles the same computation",
    "PoolerConfig": "after the last layer",
    "PrefetchOffloadConfig": "where weights lie",
    "ProfilerConfig": "reports",
    "ReasoningConfig": "what is made of the output",
    "SchedulerConfig": "which requests run together",
    "StructuredOutputsConfig": "what is made of the output",
    "UVAOffloadConfig": "where weights lie",
    "WatchdogConfig": "operation",
    "WatermarkConfig": "how tokens are drawn",
    "WeightTransferConfig": "new weights reset the cache",
}
#: Of the other parts, the options in the identity or in the engine's geometry, and the others.
IDENTITY = {
    "AttentionConfig": "backend backend_per_kind use_non_causal indexer_kv_dtype",
    "CacheConfig": "block_size kv_cache_layout cache_dtype sliding_window kv_cache_dtype_skip_layers swa_bounded_replay",
    "DeviceConfig": "device_type",
    "DiffusionConfig": "canvas_length max_denoising_steps",
    # Some backends compute with requantized weights.
    "KernelConfig": "moe_backend linear_backend linear_backend_per_quant",
    "LoadConfig": "load_format download_dir model_loader_extra_config ignore_patterns",
    "LoRAConfig": "target_modules enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
    "ModelConfig": "model model_weights dtype seed hf_config hf_text_config hf_config_path hf_overrides revision code_revision max_model_len "
    "quantization quantization_config model_class_overrides model_impl disable_sliding_window multimodal_config language_model_only media_io_kwargs "
    "mm_processor_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method "
    "mm_device_do_normalize",
    "MultiModalConfig": "language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_encoder_attn_backend "
    "mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method",
    "ParallelConfig": "pipeline_parallel_size tensor_parallel_size decode_context_parallel_size dcp_kv_cache_interleave_size "
    "cp_kv_cache_interleave_size",
    "QuantizationConfigArgs": "linear moe ignore targets",
    "QuantSpec": "weight activation",
    "SpeculativeConfig": "model revision code_revision moe_backend quantization kv_cache_dtype attention_backend draft_model_config draft_load_config "
    "draft_tensor_parallel_size",
    "VllmConfig": "model_config cache_config parallel_config device_config load_config attention_config lora_config speculative_config "
    "diffusion_config quant_config kernel_config additional_config",
}
NO_CHANGE = {
    # Kernels and their sizes.
    "AttentionConfig": "minimax_m3_msa_decode_backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
    "tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization "
    "trtllm_ragged_backend indexer_sparse_logits indexer_tp_shard_min_rows minimax_m3_indexer_cp hisparse_config sparse_mla_force_mqa "
    "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size",
    # How much memory, what vLLM's own prefix cache does, recurrent state.
    "CacheConfig": "user_specified_block_size prefix_match_unit gpu_memory_utilization is_attention_free num_gpu_blocks_override "
    "enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval mamba_page_size_padded skip_page_size_padded "
    "mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len "
    "use_replayssm use_kda_recoverssm num_gpu_blocks num_cpu_blocks simple_cpu_offload_num_blocks effective_attention_block_size "
    "kv_cache_size_tokens kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens kv_sharing_fast_prefill kv_cache_memory_bytes "
    "kv_offloading_size kv_offloading_backend _block_size_resolved",
    "DeviceConfig": "device",
    "KernelConfig": "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup enable_jit_warmup "
    "monokernel sparse_indexer_topk_backend",
    "LoadConfig": "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device use_tqdm_on_load "
    "pt_load_map_location",
    # Sizes; the adapter of a request is part of its keys.
    "LoRAConfig": "max_lora_rank max_loras fully_sharded_loras max_cpu_loras lora_dtype default_mm_loras specialize_active_lora max_lora_cls_labels",
    # Tokens in, tokens out, operation.
    "ModelConfig": "runner convert tokenizer tokenizer_mode trust_remote_code is_submodel_config word_embeddings_untied_by_checkpoint "
    "allowed_local_media_path allowed_media_domains tokenizer_revision spec_target_max_model_len allow_deprecated_quantization enforce_eager "
    "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay disable_cascade_attn skip_tokenizer_init "
    "enable_prompt_embeds served_model_name config_format hf_token generation_config override_generation_config enable_sleep_mode "
    "sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator "
    "logits_processors io_processor_plugin renderer_num_workers pooler_config limit_mm_per_prompt enable_mm_embeds mm_processor_cache_gb "
    "mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
    "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling mm_tensor_ipc "
    "mm_ipc_gpu_memory_gb mm_processor_device",
    "MultiModalConfig": "limit_per_prompt enable_mm_embeds mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
    "mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin "
    "interleave_mm_strings skip_mm_profiling mm_tensor_ipc allow_missing_mm_embeddings mm_ipc_gpu_memory_gb",
    # Which machines, how they talk, where experts lie. Prefill context parallelism is refused.
    "ParallelConfig": "prefill_context_parallel_size data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
    "data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port data_parallel_backend data_parallel_external_lb "
    "data_parallel_hybrid_lb is_moe_model enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb "
    "eplb_config expert_placement_strategy all2all_backend max_parallel_loading_workers disable_custom_all_reduce enable_shm_tensor_arena "
    "enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
    "disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend worker_cls "
    "worker_extension_cls master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
    "distributed_timeout_seconds cpu_distributed_timeout_seconds world_size rank _data_parallel_master_port_list _coord_store_port "
    "dcp_comm_backend dcp_q_replicate _allow_auto_resolve_cp_interleave_size data_parallel_index _api_process_count _api_process_rank "
    "enable_fault_tolerance fault_tolerance_config",
    # Which tokens are proposed and accepted.
    "SpeculativeConfig": "enforce_eager num_speculative_tokens method tensor_parallel_size max_model_len "
    "index_share_for_mtp_iteration disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes draft_lm_head_quantization "
    "use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting target_model_config "
    "target_parallel_config num_speculative_tokens_per_batch_size draft_parallel_config suffix_decoding_max_tree_depth "
    "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method "
    "synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk xpress_topc "
    "fly_window_size fly_entropy_threshold fly_entropy_top_k",
    "VllmConfig": "scheduler_config offload_config aux_output_config engram_config mamba_config watermark_config "
    "structured_outputs_config observability_config logging_config compilation_config profiler_config kv_transfer_config kv_events_config "
    "ec_transfer_config ec_manager_config reasoning_config instance_id optimization_level performance_mode weight_transfer_config "
    "watchdog_config shutdown_timeout",
}


def _parts(of: Any, found: dict[str, set[str]]) -> dict[str, set[str]]:
    """vLLM's configuration and all parts of it, with the names of their options."""
    if of.__name__ in found or not of.__module__.startswith("vllm.config."):
        return found
    found[of.__name__] = {field.name for field in dataclasses.fields(of)}
    todo = list(typing.get_type_hints(of).values())
    while todo:
        hint = todo.pop()
        todo += typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            _parts(hint, found)
    return found


def test_every_option_is_in_the_identity_or_cannot_change_kv() -> None:
    from vllm.config import VllmConfig

    parts = _parts(VllmConfig, {})
    assert len(parts) > 15, "they are found"
    decided = {name: set(f"{IDENTITY.get(name, '')} {NO_CHANGE.get(name, '')}".split()) for name in parts}
    unknown = {name: options - decided[name] for name, options in parts.items() if name not in NO_KV and options - decided[name]}
    assert not unknown, "vLLM has options of which nobody has said whether KV depends on them: see identity.py"
    both = {name: set(IDENTITY[name].split()) & set(NO_CHANGE.get(name, "").split()) for name in IDENTITY}
    assert not any(both.values())


def test_the_other_options_are_vllms_and_change_the_identity() -> None:
    from vllm.config import VllmConfig

    hints, parts = typing.get_type_hints(VllmConfig), _parts(VllmConfig, {})
    for part, options in identity.OTHERS.items():
        if part is not None and part not in hints:
            continue  # Not in this version.
        kinds = [VllmConfig] if part is None else [kind for kind in (hints[part], *typing.get_args(hints[part])) if dataclasses.is_dataclass(kind)]
        names = {name for kind in kinds for name in parts[kind.__name__]}
        for name, default in options.items():
            holder = SimpleNamespace(**{name: default})
            server: Any = holder if part is None else SimpleNamespace(**{part: holder})
            assert identity.others(server) == {}
            setattr(holder, name, ["other"])
            assert len(identity.others(server)) == 1
            assert name in IDENTITY[kinds[0].__name__].split()
            if name not in names:
                print(f"not in this version: {part}.{name}")
