"""What shapes no byte of a page: settings and variables of SGLang that do not count for the namespace.

SGLang sorts its settings by what they are for. But for the sections of `COUNTING`, a setting or variable that is not
named here counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiered_kv.engines.facts import names

SETTINGS: Mapping[str, frozenset[str]] = {
    section: names(text)
    for section, text in {
        # The model's origin and length, which `_weights` and `_model` have; how its files are read.
        "model": """
            model_path revision load_format model_loader_extra_config context_length json_model_override_args dtype
            modelopt_checkpoint_save_path modelopt_export_path startup_weight_load_mode weight_loader_disable_mmap
            weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
            remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
            remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
            remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port modelexpress_config
            download_dir model_checksum delete_ckpt_after_loading decrypted_config_file decrypted_draft_config_file
            checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket weight_cache_timeout""",
        # Sums between processes, places of experts, logits and tokens, graphs and compilation, tuning, memory.
        "exec": """
            enable_layerwise_nvtx_marker enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp
            enable_torch_symm_mem pre_warm_nccl
            ep_num_redundant_experts init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
            eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
            expert_distribution_recorder_buffer_size expert_balancedness_report_mode elastic_ep_backend
            enable_elastic_expert_backup mooncake_ib_device ep_join_mode elastic_ep_scale_timeout
            enable_fp32_lm_head enable_custom_logit_processor enable_return_hidden_states return_hidden_states_mode
            enable_return_routed_experts enable_return_indexer_topk sampling_mask_max_tokens disable_outlines_disk_cache
            enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window
            watermark_mixing_probability watermark_max_probability watermark_default_enabled watermark_enforce_all
            enable_return_aux_hidden_states aux_hidden_state_capture return_aux_hidden_state_layer_ids
            sampling_backend grammar_backend
            cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
            cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context
            cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph
            disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
            enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs disable_flashinfer_autotune
            flashinfer_autotune_skip_ops
            enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup kt_cpuinfer
            kt_threadpool_count paged_experts_num_resident cpu_offload_gb offload_group_size offload_num_in_group
            offload_prefetch_step offload_mode ple_offload_embedding ple_offload_backend ple_offload_dir""",
        # Images: how many at a time, from where, by whom.
        "mm": """
            mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb
            mm_preprocess_cache_size_mb limit_mm_data_per_request enable_mm_global_cache mm_global_cache_backend
            mm_feature_transport enable_broadcast_mm_inputs_process enable_prefix_mm_cache""",
        # Which drafts are accepted. Without a draft model nothing of this section counts.
        "spec": """
            speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling
            speculative_use_block_verification speculative_num_steps speculative_num_draft_tokens speculative_eagle_topk
            speculative_draft_model_path speculative_draft_model_revision speculative_draft_load_format spec_trace_dir
            speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth speculative_ngram_match_type
            speculative_ngram_max_trie_depth speculative_ngram_capacity speculative_ngram_external_corpus_path
            speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens speculative_adaptive
            speculative_adaptive_config""",
        # HiCache reports the sizes and ranks. The rest are addresses, and places of the same work.
        "parallel": """
            nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank tp_size pp_size
            pp_max_micro_batch_size pp_async_batch_depth dp_size attn_dp_size attn_cp_size moe_dp_size dwdp_size ep_size
            max_ep_size elastic_ep_initial_size ep_join_rank_offset moe_dense_tp_size load_balance_method
            enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head
            enable_tp_lm_head_all_to_all enable_p2p_check""",
        # The size and life of caches, and other storage.
        "memory": """
            radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set disable_radix_cache
            enable_session_radix_cache radix_cache_backend enable_unified_memory enable_hierarchical_cache
            hicache_host_memory_mode hicache_host_memory_fraction hicache_ratio hicache_size hicache_write_policy
            hicache_io_backend hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
            hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
            hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker
            unified_cache_external_linker_backend unified_cache_external_linker_config enable_linker_mla_dedup
            enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file""",
    }.items()
}
"""Settings that do not count, by section."""

COUNTING: Mapping[str, frozenset[str]] = {
    "device": names("device"),
    "lora": names("enable_lora experts_shared_outer_loras lora_backend lora_target_modules lora_use_virtual_experts"),
    "schedule": names("c128_page_size disable_hybrid_swa_memory page_size swa_prefix_tails"),
    "disagg": names("decoupled_spec_role encoder_only language_model_only language_only"),
    "serving": names("weight_version"),
    "observability": names(
        "debug_tensor_dump_input_file debug_tensor_dump_layers forward_hooks kv_canary kv_canary_real_data"
    ),
}
"""Sections of which only these settings count: of scheduling, serving, logs, adapters in memory, other transfers."""

VARIABLES = names(
    # Addresses and processes; transfers between engines, to host memory and to other storage.
    """
    SGLANG_ROLE_NAMESPACES SGLANG_ROLE_NAMESPACES_OUT SGLANG_RUN_ID SGLANG_DP_RANK SGLANG_DP_SIZE SGLANG_LOCAL_IP_NIC
    SGLANG_BACKUP_PORT_BASE SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS SGLANG_RAY_BUNDLE_INDICES SGLANG_IS_FIRST_RANK_ON_NODE
    SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE SGLANG_NCCL_SO_PATH SGLANG_SKIP_P2P_CHECK SGLANG_PP_LAYER_PARTITION
    SGLANG_SET_CPU_AFFINITY SGLANG_CPU_OMP_THREADS_BIND SGLANG_USE_CUDA_IPC_TRANSPORT SGLANG_USE_IPC_POOL_HANDLE_CACHE
    SGLANG_USE_PICKLE_IPC SGLANG_USE_MESSAGE_QUEUE_BROADCASTER SGLANG_MOONCAKE_CUSTOM_MEM_POOL SGLANG_HUGEPAGE_SIZE
    SGLANG_MLA_DEDUP_CHUNK_TOKENS"""
    # The server; tokens, which the hashes cover; samples; which request comes when.
    """
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION SGLANG_FORCE_STREAM_INTERVAL
    SGLANG_DEFAULT_THINKING SGLANG_MAX_THINK_TOKENS SGLANG_DSV4_REASONING_EFFORT SGLANG_DSV41_REASONING_EFFORT
    SGLANG_INKLING_DEFAULT_REASONING_EFFORT SGLANG_TOOL_STRICT_LEVEL SGLANG_RETURN_ORIGINAL_LOGPROB
    SGLANG_DISABLE_OUTLINES_DISK_CACHE SGLANG_INIT_NEW_TOKEN_RATIO SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR
    SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS SGLANG_RETRACT_DECODE_STEPS SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
    SGLANG_MAX_NEW_TOKENS_LIMIT SGLANG_EMPTY_CACHE_INTERVAL SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"""
    # Logs, metrics, checks.
    """
    SGLANG_RECORD_STEP_TIME SGLANG_CACHE_HIT_RATE_WINDOW_SECONDS SGLANG_ENABLE_METRICS_DEVICE_TIMER
    SGLANG_ENABLE_METRICS_DP_ATTENTION SGLANG_TRACE_LEVEL SGLANG_TRACE_ASYNC SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR
    SGLANG_PYSPY_DUMP_BEFORE_CRASH SGLANG_ENABLE_NAN_LOGITS_CHECK SGLANG_DEBUG_MEMORY_POOL
    SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY
    SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK SGLANG_GIT_COMMIT"""
    # Memory; how files are read; how kernels and graphs are made and kept.
    """
    SGLANG_VLM_CACHE_SIZE_MB SGLANG_MM_BUFFER_SIZE_MB SGLANG_MM_FEATURE_CACHE_MB SGLANG_SYMM_MEM_PREALLOC_GB_SIZE
    SGLANG_FLASHINFER_WORKSPACE_SIZE SGLANG_PREFETCH_BLOCK_SIZE_MB SGLANG_SORT_WEIGHT_FILES
    SGLANG_WEIGHT_CACHE_READY_TEMPLATE SGLANG_WEIGHT_CACHE_SOCKET_TEMPLATE SGLANG_ENABLE_TORCH_COMPILE
    SGLANG_TORCH_COMPILE_MODE SGLANG_USE_BREAKABLE_CUDA_GRAPH SGLANG_MEMORY_SAVER_CUDA_GRAPH
    SGLANG_JIT_DEEPGEMM_PRECOMPILE SGLANG_JIT_DEEPGEMM_FAST_WARMUP SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE
    SGLANG_DG_USE_NVRTC SGLANG_FLASHINFER_AUTOTUNE_CACHE SGLANG_USE_CUSTOM_TRITON_KERNEL_CACHE"""
)
"""Variables with the prefixes of `engine` that SGLang sets itself, that differ between hosts, or that people change.

Others that shape no byte count: a change of them costs the blocks that were stored before.
"""
