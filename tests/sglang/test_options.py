"""Every option of SGLang is either part of the identity or cannot change KV: a new version's new options fail here until somebody has decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forebay
import msgspec
import pytest
from forebay.sglang import identity
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.server_args import ServerArgs

pytestmark = pytest.mark.ci

#: Options that `identity.of` reads by their names, beside those in its tables.
IDENTITY = (
    "model_path download_dir random_seed weight_cache_mode lora_paths lora_target_modules experts_shared_outer_loras uno_lora_path kt_weight_path"
)
#: The others, by why none of them changes KV, or its meaning, by more than rounding.
NO_CHANGE = {
    "tokens in, tokens out: the keys name tokens": "tokenizer_backend tokenizer_worker_num detokenizer_worker_num skip_tokenizer_init chat_template "
    "trust_request_chat_template hf_chat_template_name completion_template default_chat_template_kwargs allow_auto_truncate sampling_defaults "
    "preferred_sampling_params reasoning_parser enable_strict_thinking tool_call_parser tool_server strip_thinking_cache "
    "enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode "
    "disable_tokenizer_batch_decode constrained_json_whitespace_pattern constrained_json_disable_any_whitespace "
    "constrained_json_max_whitespace_cnt disable_outlines_disk_cache grammar_backend sampling_backend mlx_enable_sampling "
    "enable_custom_logit_processor enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window "
    "watermark_mixing_probability watermark_max_probability watermark_default_enabled watermark_enforce_all sampling_mask_max_tokens",
    "after the last layer, or what is returned beside tokens": "is_embedding enable_fp32_lm_head enable_dp_lm_head enable_tp_lm_head_all_to_all "
    "enable_return_hidden_states return_hidden_states_mode enable_return_aux_hidden_states aux_hidden_state_capture "
    "return_aux_hidden_state_layer_ids enable_return_routed_experts enable_return_indexer_topk return_input_ids return_output_ids",
    "how clients reach it": "host port fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode grpc_port grpc_response_timeout_secs "
    "grpc_worker_threads sidecar sidecar_args skip_server_warmup warmups enable_http2 http2_max_concurrent_streams "
    "http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key "
    "served_model_name weight_version file_storage_path enable_cache_report enable_response_store asr_max_buffer_seconds "
    "asr_max_concurrent_sessions stream_interval batch_notify_size stream_response_default_include_usage incremental_streaming_output "
    "enable_streaming_session",
    "reports and checks": "log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target "
    "uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port enable_mfu_metrics "
    "enable_metrics_for_all_schedulers load_snapshot_publish_interval tokenizer_metrics_custom_labels_header "
    "tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency "
    "bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets gc_warning_threshold_secs decode_log_interval "
    "enable_request_time_stats_logging kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id "
    "forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file "
    "export_metrics_to_file_dir stat_loggers kv_canary kv_canary_real_data kv_canary_sweep_interval debug_tensor_dump_output_folder "
    "debug_tensor_dump_layers debug_tensor_dump_input_file msprobe_dump_config enable_layerwise_nvtx_marker enable_profile_cuda_graph "
    "expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode spec_trace_dir "
    "model_checksum",
    # Weights of another server need a fingerprint; an exchange while it runs ends the cache.
    "how the same weights are read, kept and exchanged": "startup_weight_load_mode custom_weight_loader weight_loader_disable_mmap "
    "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load "
    "remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port "
    "remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend "
    "remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port modelexpress_config delete_ckpt_after_loading "
    "checkpoint_engine_wait_weights_before_ready weight_cache_socket weight_cache_timeout modelopt_checkpoint_save_path modelopt_export_path "
    "enable_weights_cpu_backup enable_draft_weights_cpu_backup enable_memory_saver",
    "where weights lie": "cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode ple_offload_embedding "
    "ple_offload_backend ple_offload_dir enable_paged_experts paged_experts_num_resident kt_cpuinfer kt_threadpool_count",
    # Adapters that are loaded later have names of their own in every process.
    "how adapters run; one that does not fit is refused": "enable_lora enable_lora_overlap_loading max_lora_rank max_loaded_loras "
    "max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size lora_use_virtual_experts lora_strict_loading "
    "lora_drain_wait_threshold",
    "how much memory, and which requests run together": "mem_fraction_static max_running_requests max_queued_requests max_total_tokens "
    "chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens prefill_max_requests "
    "schedule_policy enable_priority_scheduling disable_priority_preemption default_priority_value abort_on_priority_when_disabled "
    "schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness swa_prefix_tails "
    "disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk max_mamba_cache_size mamba_full_memory_ratio "
    "enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets "
    "prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay dllm_fdfo "
    "enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold enable_pdmux pdmux_config_path sm_group_num",
    "what SGLang's own cache keeps, and when it moves": "radix_eviction_policy radix_eviction_policy_config enable_session_radix_cache "
    "radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction "
    "hicache_write_policy hicache_io_backend hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config "
    "hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker "
    "unified_cache_external_linker_backend unified_cache_external_linker_config enable_linker_mla_dedup enable_lmcache lmcache_config_file "
    "enable_flexkv flexkv_config_file mamba_max_states_per_path mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval "
    "int8_mamba_ckpt_size linear_replayssm_cache_len",
    "nothing is stored with it": "disable_radix_cache prefill_only_disable_kv_cache enable_mis encoder_only",
    # pages.PROPERTIES and sources._described.
    "the pools say it": "page_size hicache_mem_layout disable_hybrid_swa_memory",
    # The ranks that hold different KV are part of its keys.
    "which machines and ranks, and how they talk": "nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank tp_size pp_size "
    "pp_max_micro_batch_size pp_async_batch_depth dp_size attn_dp_size load_balance_method attn_cp_size moe_dp_size dwdp_size dcp_comm_backend "
    "dcp_replicate_q_proj enable_cp_tp_group_sharing enable_cp_decode_attn_tp enable_dp_attention enable_dp_attention_local_control_broadcast "
    "enable_attn_tp_input_scattered enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp "
    "disable_attn_tp_gather enable_p2p_check ep_size moe_dense_tp_size base_gpu_id gpu_id_step use_ray numa_node enable_nccl_nvls "
    "enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem pre_warm_nccl boundary_reduction "
    "speculative_boundary_reduction enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion "
    "flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill "
    "disable_aiter_allreduce_fusion_in_decode enable_fused_moe_sum_all_reduce deepep_config mooncake_ib_device",
    "where experts lie, and who computes them": "deepep_mode deepep_v2_mode fuseep_mode ep_num_redundant_experts init_expert_location enable_eplb "
    "eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold elastic_ep_backend "
    "enable_elastic_expert_backup ep_join_mode ep_join_rank_offset elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout enable_waterfill "
    "disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion",
    "kernels of the same computation, and how they are launched": "enable_lean_attention bf16_gemm_backend dsa_triton_union "
    "dsa_paged_mqa_logits_backend dsa_topk_backend speculative_dsa_topk_backend speculative_attention_mode disable_flashinfer_autotune "
    "flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32 triton_attention_num_kv_splits triton_attention_split_tile_size "
    "flashinfer_mla_disable_ragged enable_fused_qk_norm_rope disable_chunked_prefix_cache enable_mamba_cache_stochastic_rounding "
    "mamba_cache_philox_rounds cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode "
    "cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context "
    "disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding enable_cudagraph_gc debug_cuda_graph "
    "enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs",
    "how inputs are fetched, moved and kept": "enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder "
    "mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb "
    "trust_mm_content_hashes limit_mm_data_per_request enable_mm_global_cache mm_global_cache_backend mm_feature_transport "
    "encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder",
    "which tokens are proposed and accepted": "speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
    "speculative_dflash_block_size speculative_domino_candidate_pool_size speculative_dspark_block_size speculative_dspark_sps_table_path "
    "speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single "
    "speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_use_block_verification speculative_token_map "
    "speculative_adaptive speculative_adaptive_config speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth "
    "speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity speculative_ngram_external_corpus_path "
    "speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens decoupled_spec_bind_endpoint "
    "decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role",
    "which server does which part": "disaggregation_mode disaggregation_decode_allocation_policy disaggregation_transfer_backend "
    "disaggregation_enable_kv_checksum disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_enable_radix_cache "
    "disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup num_reserved_decode_tokens "
    "disaggregation_decode_extra_slots disaggregation_decode_polling_interval disaggregation_decode_host_receive_threshold "
    "enable_pd_role_switch optimistic_prefill_attempts",
    "operation": "watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler gc_threshold",
    "what the user said of another option": "_swa_full_tokens_ratio_explicitly_set _radix_eviction_policy_explicitly_set "
    "_speculative_draft_quantization_explicitly_set",
}


def _defaults() -> dict[str, Any]:
    """The options of SGLang, with their defaults."""
    return {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}


def _args(**given: Any) -> ServerArgs:
    return ServerArgs(**({"model_path": "dummy", "load_format": "dummy"} | given))


def _of(args: Any) -> str:
    return identity.of(args, "0.5.23", "")


def test_every_option_is_in_the_identity_or_cannot_change_kv() -> None:
    options = set(_defaults())
    assert len(options) > 500, "they are found"
    tables = (identity.ARGUMENTS, identity.LOADING, identity.OTHERS, identity.DECIDED, identity.FILES, identity.CHECKPOINTS, identity.EXPERTS)
    counted = set(IDENTITY.split()).union(*tables)
    others = [name for names in NO_CHANGE.values() for name in names.split()]
    unknown = options - counted - set(others)
    assert not unknown, "SGLang has options of which nobody has said whether KV depends on them: see identity.py"
    assert not counted & set(others) and len(others) == len(set(others)), "each is decided once"
    assert not (counted | set(others)) - options, "this version has them"


def test_options_that_are_not_given_are_no_part_of_it() -> None:
    args, defaults = _args(), _defaults()
    assert {name: defaults[name] for name in identity.OTHERS} == identity.OTHERS, "SGLang's defaults"
    assert all(defaults[name] in plain for name, plain in identity.DECIDED.items())
    parts = {"sglang": "0.5.23", "commit": None, "model": "dummy", "weights": None, "config": None, "fingerprint": ""}
    arguments = {name: str(getattr(args, name)) for name in identity.ARGUMENTS}
    assert _of(args) == identity.digest({**parts, "arguments": arguments, "seed": "None"}), "a plain server's namespace stays"


def test_each_option_that_is_given_changes_it() -> None:
    found = {_of(_args())}
    for name, default in identity.OTHERS.items():
        for value in (not default,) if isinstance(default, bool) else ("other", {"a": 1}, False):
            found.add(_of(_args(**{name: value})))
    switches = sum(isinstance(default, bool) for default in identity.OTHERS.values())
    assert len(found) == 1 + switches + 3 * (len(identity.OTHERS) - switches)


def test_what_sglang_decides_by_itself_counts_as_it_decides() -> None:
    def of(**decided: Any) -> str:
        args = _args()
        declare_resolution(args, "here", **decided)
        return _of(args)

    plain = _of(_args())
    usual = [("enable_decoder_swa_bounded_replay", False), ("enforce_shared_experts_fusion", False), ("dsv4_attn_backend", "flashmla")]
    assert {of(**{name: value}) for name, value in usual} == {plain}
    changed = [of(enable_decoder_swa_bounded_replay=True), of(enforce_shared_experts_fusion=True)]
    changed += [of(dsv4_attn_backend="flashmla_mega"), of(dsv4_attn_backend="trtllm")]
    assert len({plain, *changed}) == 5
    # SGLang may decide against what is given.
    args = _args(enable_decoder_swa_bounded_replay=True)
    assert _of(args) == changed[0]
    declare_resolution(args, "here", enable_decoder_swa_bounded_replay=False)
    assert _of(args) == plain


def test_what_is_made_of_adapters_counts_where_there_are_some() -> None:
    adapter = {"lora_paths": ["a=/adapter"]}
    one = _of(_args(**adapter))
    two = [_of(_args(**adapter, lora_target_modules=given)) for given in (["q_proj", "v_proj"], ["v_proj", "q_proj"], {"q_proj", "v_proj"})]
    assert len(set(two)) == 1, "in any order"
    others = [_of(_args(**adapter, lora_target_modules=["q_proj"]))]
    others += [_of(_args(**adapter, experts_shared_outer_loras=given)) for given in (True, False)]
    assert len({_of(_args()), one, two[0], *others}) == 6
    assert _of(_args(lora_target_modules=["q_proj"])) == _of(_args())


def test_experts_on_the_cpu_count_with_their_weights(tmp_path: Path) -> None:
    place = tmp_path / "experts"

    def of(weights: bytes, **given: Any) -> str:
        place.mkdir(exist_ok=True)
        (place / "model.safetensors").write_bytes(weights)
        return _of(_args(kt_weight_path=str(place), **given))

    one = of(b"one")
    others = [of(b"two"), of(b"one", kt_method="AMXINT8"), of(b"one", kt_num_gpu_experts=4), of(b"one", kt_max_deferred_experts_per_token=2)]
    assert one == of(b"one", kt_cpuinfer=8) and len({_of(_args()), one, *others}) == 6
    assert _of(_args(kt_method="AMXINT8", kt_num_gpu_experts=4)) == _of(_args()), "without weights they do nothing"
    (place / "model.safetensors").unlink()
    with pytest.raises(forebay.Unsupported, match="kt-weight-path"):
        _of(_args(kt_weight_path=str(place)))
    assert identity.of(_args(kt_weight_path=str(place)), "0.5.23", "step 7") != one


def test_files_that_decide_what_is_computed_count_by_what_is_in_them(tmp_path: Path) -> None:
    def of(name: str, contents: bytes) -> str:
        (tmp_path / "file").write_bytes(contents)
        return _of(_args(**{name: str(tmp_path / "file")}))

    names = (*identity.FILES, *identity.CHECKPOINTS)
    for name in names:
        assert of(name, b"one") == of(name, b"one") != of(name, b"two"), name
    assert len({_of(_args()), *(of(name, b"one") for name in names)}) == len(names) + 1
    adapter = tmp_path / "adapter"
    adapter.mkdir()

    def of_drafter(weights: bytes) -> str:
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        return _of(_args(uno_lora_path=str(adapter)))

    assert len({_of(_args()), of_drafter(b"one"), of_drafter(b"two")}) == 3


def test_variables_that_change_kv_count_where_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.environ import envs

    found = [_of(_args())]
    for name in identity.VARIABLES:
        assert hasattr(envs, name)
        monkeypatch.setenv(name, "other")
        found.append(_of(_args()))
    assert len(set(found)) == len(found)
