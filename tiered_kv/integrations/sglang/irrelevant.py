"""What shapes no byte of a page: settings and variables of SGLang that do not count for the namespace.

SGLang sorts its settings by what they are for. A setting or variable that is not named here counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiered_kv.integrations.environment import names

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
        # `_weights` has the seed, and `check_adapters` the adapters.
        "device": """
            base_gpu_id gpu_id_step random_seed mlx_enable_sampling watchdog_timeout soft_watchdog_timeout sleep_on_idle
            use_ray custom_sigquit_handler numa_node gc_threshold""",
        "lora": """
            enable_lora_overlap_loading max_lora_rank lora_paths max_loaded_loras max_loras_per_batch
            lora_eviction_policy max_lora_chunk_size lora_strict_loading lora_drain_wait_threshold""",
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
        "schedule": """
            mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
            prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens
            prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption
            default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
            priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
            swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set prefill_only_disable_kv_cache
            disable_chunked_prefix_cache disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval
            enable_mixed_chunk max_mamba_cache_size mamba_full_memory_ratio enable_prefill_delayer
            prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
            prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
            prefill_delayer_max_delay_ms min_free_slots_delay""",
        # Transfers between engines for prefill and for decoding.
        "disagg": """
            decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank disaggregation_mode
            disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
            disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
            disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
            disaggregation_decode_polling_interval disaggregation_decode_host_receive_threshold
            disaggregation_decode_allocation_policy disaggregation_enable_kv_checksum optimistic_prefill_attempts
            encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
            enable_adaptive_dispatch_to_encoder enable_pdmux pdmux_config_path sm_group_num enable_pd_role_switch""",
        # The server, its tokens and its templates, which the hashes cover.
        "serving": """
            tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
            skip_tokenizer_init host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads
            grpc_response_timeout_secs sidecar sidecar_args skip_server_warmup warmups enable_http2
            http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs
            ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name chat_template
            trust_request_chat_template hf_chat_template_name completion_template file_storage_path enable_cache_report
            return_input_ids return_output_ids reasoning_parser default_chat_template_kwargs strip_thinking_cache
            enable_strict_thinking tool_call_parser tool_server sampling_defaults asr_max_buffer_seconds
            asr_max_concurrent_sessions preferred_sampling_params allow_auto_truncate stream_interval batch_notify_size
            stream_response_default_include_usage incremental_streaming_output enable_streaming_session
            constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
            constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
            dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
            enable_response_store enable_http_worker_reuseport""",
        "observability": """
            log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
            uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port
            enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
            tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
            bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
            generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
            kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
            forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
            export_metrics_to_file export_metrics_to_file_dir stat_loggers kv_canary_sweep_interval
            debug_tensor_dump_output_folder msprobe_dump_config""",
    }.items()
}
"""Settings that do not count, by section."""

VARIABLES = names(
    # Addresses and processes; transfers between engines, to host memory and to other storage.
    """
    SGLANG_ROLE_NAMESPACES SGLANG_ROLE_NAMESPACES_OUT SGLANG_RUN_ID SGLANG_DP_RANK SGLANG_DP_SIZE SGLANG_HOST_IP
    SGLANG_LOCAL_IP_NIC SGLANG_BACKUP_PORT_BASE SGLANG_ZMQ_ALLOWED_PEERS SGLANG_ZMQ_SOURCE_IP SGLANG_USE_PICKLE_IPC
    SGLANG_USE_MESSAGE_QUEUE_BROADCASTER SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS SGLANG_RAY_BUNDLE_INDICES
    SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE SGLANG_IS_FIRST_RANK_ON_NODE SGLANG_SYNC_TOKEN_IDS_ACROSS_TP
    SGLANG_BLOCK_NONZERO_RANK_CHILDREN SGLANG_NCCL_SO_PATH SGLANG_SKIP_P2P_CHECK SGLANG_RINGBUFFER_WARNING_INTERVAL
    SGLANG_WAIT_PORT_TIMEOUT SGLANG_PP_LAYER_PARTITION SGLANG_PP_COMM_OVERLAP SGLANG_PP_SKIP_PURE_CHUNKED_OUTPUT_COMM
    SGLANG_SET_CPU_AFFINITY SGLANG_NUMA_BIND_V2 SGLANG_AUTO_NUMA_BIND SGLANG_CRASH_ON_NUMA_BIND_FAILURE
    SGLANG_CPU_OMP_THREADS_BIND SGLANG_USE_CUDA_IPC_TRANSPORT SGLANG_USE_IPC_POOL_HANDLE_CACHE
    SGLANG_LOAD_SNAPSHOT_USE_ZMQ SGLANG_DISAGGREGATION_THREAD_POOL_SIZE SGLANG_DISAGGREGATION_QUEUE_SIZE
    SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT
    SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE
    SGLANG_DISAGGREGATION_WAITING_TIMEOUT SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT SGLANG_DISAGGREGATION_NIXL_BACKEND
    SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS SGLANG_DISAGGREGATION_ZMQ_MAX_SOCKETS
    SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK
    SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE
    SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS
    SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX SGLANG_DISAGG_STAGING_BUFFER SGLANG_DISAGG_STAGING_POOL_SIZE_MB
    SGLANG_ENABLE_DISAGG_PREFILL_CONTINUOUS_INPUT_POLLING SGLANG_ENABLE_DISAGG_SAMPLING_MASK SGLANG_STAGING_USE_TORCH
    SGLANG_ENABLE_FAILED_SESSION_PROBE SGLANG_FAILED_SESSION_IDLE_TIMEOUT_S SGLANG_FAILED_SESSION_PROBE_INTERVAL_S
    SGLANG_FAILED_SESSION_PROBE_MAX_INTERVAL_S SGLANG_MOONCAKE_CUSTOM_MEM_POOL
    SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES SGLANG_MOONCAKE_SEND_AUX_TCP SGLANG_MORI_NUM_WORKERS
    SGLANG_MORI_POST_BATCH_SIZE SGLANG_MORI_QP_PER_TRANSFER SGLANG_MORI_SEND_AUX_RDMA SGLANG_MORI_TRANSFER_SHARDS
    SGLANG_MORI_TRANSFER_TIMEOUT_MS SGLANG_MORI_WAIT_POLL_MS SGLANG_HICACHE_BUFFER_ANCHOR_LOCK_CAP
    SGLANG_HICACHE_DECODE_OFFLOAD_STRIDE SGLANG_HICACHE_FILE_BACKEND_ENABLE_METADATA_CACHE
    SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE
    SGLANG_HICACHE_FILE_BACKEND_METADATA_TTL SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE
    SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR SGLANG_HICACHE_HF3FS_CONFIG_PATH SGLANG_HICACHE_HOST_HUGEPAGE
    SGLANG_HICACHE_HOST_HUGEPAGE_SIZE SGLANG_HICACHE_HOST_MEM_BACKEND SGLANG_HICACHE_HOST_NUMA_NODE
    SGLANG_HICACHE_HOST_PREFAULT SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB
    SGLANG_HICACHE_MEMCACHE_CONFIG_PATH SGLANG_HICACHE_MOONCAKE_CONFIG_PATH SGLANG_HICACHE_MOONCAKE_REUSE_TE
    SGLANG_HICACHE_NIXL_BACKEND_PLUGIN SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR SGLANG_HICACHE_NIXL_USE_DIRECT_IO
    SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM SGLANG_HICACHE_TMA_TRANSFER SGLANG_HUGEPAGE_SIZE
    SGLANG_MLA_DEDUP_CHUNK_TOKENS SGLANG_NPU_MEMCACHE_ENABLE_WARMUP SGLANG_ZBAL_BOOTSTRAP_URL
    SGLANG_ZBAL_LOCAL_MEM_SIZE"""
    # The server and its requests; tokens, which the hashes cover; samples and grammars.
    """
    SGL_FORCE_SHUTDOWN SGLANG_FORCE_SHUTDOWN SGLANG_ENABLE_REQUEST_DECOMPRESSION SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES
    SGLANG_TIMEOUT_KEEP_ALIVE SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT SGLANG_HTTP_SERVER_APP_PATH
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION SGLANG_EXPOSE_OWN_ENV_VARS SGLANG_DIAG_BYPASS_HEALTH_GENERATE
    SGLANG_HEALTH_CHECK_TIMEOUT SGLANG_WARMUP_TIMEOUT SGLANG_WAIT_WEIGHTS_READY_TIMEOUT
    SGLANG_REQUEST_STATE_WAIT_TIMEOUT SGLANG_MAX_BATCH_REQS_PER_HTTP_REQ SGLANG_GRPC_WORKER_THREADS SGLANG_RUST_SERVER
    SGLANG_RUST_BUILD_MODE SGLANG_OLLAMA_CHAT_ROUTE SGLANG_OLLAMA_GENERATE_ROUTE SGLANG_OLLAMA_ROOT_ROUTE
    SGLANG_OLLAMA_SHOW_ROUTE SGLANG_OLLAMA_TAGS_ROUTE SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION SGLANG_FORCE_STREAM_INTERVAL
    SGLANG_EXA_INCLUDE_HIGHLIGHTS SGLANG_EXA_NUM_RESULTS SGLANG_EXA_SEARCH_TYPE SGLANG_FORWARD_UNKNOWN_TOOLS
    SGLANG_TOOL_STRICT_LEVEL SGLANG_ENABLE_RESPONSE_TEMPLATE_TURN_GRAMMAR SGLANG_DEFAULT_THINKING
    SGLANG_MAX_THINK_TOKENS SGLANG_DSV4_REASONING_EFFORT SGLANG_DSV41_REASONING_EFFORT
    SGLANG_INKLING_DEFAULT_REASONING_EFFORT SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN SGLANG_PATCH_TOKENIZER
    SGLANG_BATCH_TOKENIZER_OUTPUTS SGLANG_PARALLEL_PROMPT_ENCODE SGLANG_PARALLEL_PROMPT_ENCODE_MIN_CHARS
    SGLANG_DETOKENIZER_MAX_STATES SGLANG_GRAMMAR_POLL_INTERVAL SGLANG_GRAMMAR_MAX_POLL_ITERATIONS
    SGLANG_DISABLE_OUTLINES_DISK_CACHE SGLANG_RETURN_ORIGINAL_LOGPROB SGLANG_SANITIZE_NAN_LOGITS
    SGLANG_ENABLE_LOGPROB_CHUNK SGLANG_LOGPROB_CHUNK_SIZE SGLANG_ENABLE_FAST_INPUT_LOGPROBS SGLANG_OPT_USE_GUMBEL_SAMPLE
    SGLANG_DISABLE_AITER_GREEDY_SAMPLE"""
    # Which request comes when.
    """
    SGLANG_ENABLE_WAITING_PREFIX_REFRESH SGLANG_INIT_NEW_TOKEN_RATIO SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR
    SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS SGLANG_RETRACT_DECODE_STEPS SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
    SGLANG_MAX_NEW_TOKENS_LIMIT SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR SGLANG_DATA_PARALLEL_BUDGET_INTERVAL
    SGLANG_PREFILL_DELAYER_DEBUG_LOG SGLANG_PREFILL_DELAYER_MAX_DELAY_PASSES
    SGLANG_PREFILL_DELAYER_MAX_PREFILL_BS_WINDOW_SIZE SGLANG_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK
    SGLANG_PREFILL_TILE_BUDGET SGLANG_PREFILL_TILE_BUDGET_MODE SGLANG_EXACT_CHUNK_FILL
    SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DEFAULT SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DECODE
    SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_NONE SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_TARGET_VERIFY
    SGLANG_SCHEDULER_MAX_RECV_PER_POLL SGLANG_SCHEDULER_SKIP_ALL_GATHER SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE
    SGLANG_EMPTY_CACHE_INTERVAL SGLANG_REQ_WAITING_TIMEOUT SGLANG_REQ_RUNNING_TIMEOUT
    SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP SGLANG_NCCL_ALL_GATHER_IN_OVERLAP_SCHEDULER_SYNC_BATCH
    SGLANG_RADIX_FORCE_MISS SGLANG_SWA_EVICTION_INTERVAL SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"""
    # Logs, metrics, checks.
    """
    SGLANG_LOG_GC SGLANG_LOG_FORWARD_ITERS SGLANG_LOG_DECODE_GRAPH_KEY SGLANG_LOG_MS SGLANG_LOG_REQUEST_EXCEEDED_MS
    SGLANG_LOG_REQUEST_HEADERS SGLANG_LOG_SCHEDULER_STATUS_TARGET SGLANG_LOG_SCHEDULER_STATUS_INTERVAL
    SGLANG_LOG_PICKLE_IPC_OBJECTS SGLANG_LOG_LAZY_COMPACTION_STATS SGLANG_LOG_LAZY_COMPACTION_STATS_INTERVAL_SEC
    SGLANG_LOG_EXPERT_LOCATION_METADATA SGLANG_LOGGING_CONFIG_PATH SGLANG_EXPERT_LOCATION_UPDATER_LOG_INPUT
    SGLANG_EXPERT_LOCATION_UPDATER_LOG_METRICS SGLANG_EXPERT_LOCATION_UPDATER_CANARY
    SGLANG_EPLB_HEATMAP_COLLECTION_INTERVAL SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR SGLANG_ROUTING_KEY_POLICY_DEBUG_LOG
    SGLANG_JIT_LOG_RESOURCE_USAGE SGLANG_KERNEL_API_DUMP_EXCLUDE SGLANG_KERNEL_API_DUMP_INCLUDE SGLANG_CUDA_COREDUMP
    SGLANG_CUDA_COREDUMP_DIR SGLANG_CUDA_COREDUMP_BEFORE_CRASH SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS
    SGLANG_PYSPY_DUMP_BEFORE_CRASH SGLANG_PROFILE_WITH_STACK SGLANG_PROFILE_RECORD_SHAPES SGLANG_PROFILE_V2
    SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS SGLANG_TORCH_PROFILER_DIR SGLANG_MEM_PROFILE_MAX_ENTRIES SGLANG_NSYS_PROFILING
    SGLANG_ENABLE_NVTX_SCHEDULER SGLANG_ENABLE_NVTX_OPERATIONS SGLANG_RECORD_STEP_TIME
    SGLANG_ENABLE_CUDA_GRAPH_CAPTURE_TRACE SGLANG_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE
    SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS SGLANG_TRACE_ASYNC SGLANG_TRACE_ASYNC_FLUSH_THRESHOLD SGLANG_TRACE_LEVEL
    SGLANG_TRACE_LOGITS_E2E SGLANG_TRACE_LOGITS_E2E_SYNC SGLANG_TRACE_SAMPLER_E2E SGLANG_ENABLE_METRICS_DEVICE_TIMER
    SGLANG_ENABLE_METRICS_DP_ATTENTION SGLANG_BUCKET_EVICTION_DURATION SGLANG_BUCKET_LOAD_BACK_DURATION
    SGLANG_CACHE_HIT_RATE_WINDOW_SECONDS SGLANG_DETECT_SLOW_RANK SGLANG_DEBUG_MEMORY_POOL SGLANG_DEBUG_SYMM_MEM
    SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY
    SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK SGLANG_CHECK_KV_PAGE_INVARIANTS
    SGLANG_ENABLE_NAN_LOGITS_CHECK SGLANG_INVARIANT_CHECK SGLANG_ENABLE_RANK_CONSENSUS_CHECKER
    SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK SGLANG_GIT_COMMIT SGLANG_DSPARK_STS_COLLECT_PATH SGLANG_TEST_METRICS_FILE"""
    # Memory and threads; how files are read; how kernels and graphs are made and kept.
    """
    SGLANG_VLM_CACHE_SIZE_MB SGLANG_MM_BUFFER_SIZE_MB SGLANG_MM_FEATURE_CACHE_MB
    SGLANG_MM_ITEM_MEM_POOL_RECYCLE_INTERVAL_SEC SGLANG_EMBEDDING_POOL_SIZE_MB SGLANG_SYMM_MEM_PREALLOC_GB_SIZE
    SGLANG_FLASHINFER_WORKSPACE_SIZE SGLANG_DSA_MQA_LOGITS_FREE_MEM_FRACTION SGLANG_MLX_CACHE_LIMIT_GB
    SGLANG_MLX_CLEAR_CACHE_STEPS SGLANG_CPU_WORKERS SGLANG_IO_WORKERS SGLANG_MM_LOAD_MAX_RETRIES
    SGLANG_ENCODER_VIDEO_DECODE_NUM_THREADS SGLANG_ENCODER_GRPC_TIMEOUT_SECS SGLANG_ENCODER_RECV_TIMEOUT
    SGLANG_ENCODER_SEND_TIMEOUT SGLANG_ENCODER_HTTP_TIMEOUT SGLANG_ENCODER_REQ_TIMEOUT SGLANG_ENCODER_MM_RECEIVER_MODE
    SGLANG_ENCODER_PREPROC_WORKERS SGLANG_ENCODER_MM_LOAD_WORKERS SGLANG_ENCODER_DP_WORKER_MAX_INFLIGHT
    SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT
    SGLANG_ENCODER_BOOTSTRAP_EVICTED_TTL SGLANG_SORT_WEIGHT_FILES SGLANG_PREFETCH_BLOCK_SIZE_MB
    SGLANG_MOE_COPY_WEIGHT_VIEWS_BEFORE_H2D SGLANG_QWEN4_PLE_FILE_DIR SGLANG_QWEN4_PLE_FILE_PREFETCH
    SGLANG_QWEN4_PLE_FILE_RSS_BUDGET_GB SGLANG_QWEN4_PLE_FILE_RSS_INTERVAL_S SGLANG_QWEN4_PLE_FILE_SKIP_DEVICE_CHECK
    SGLANG_EXPERT_PACK_STATS_PATH SGLANG_EXPERT_CACHE_VRAM_MIB SGLANG_EXPERT_STAGE_SLOTS
    SGLANG_EPLB_P2P_BATCH_CHUNK_SIZE SGLANG_WEIGHT_CACHE_READY_TEMPLATE SGLANG_WEIGHT_CACHE_SOCKET_TEMPLATE
    SGLANG_JIT_CACHE_DEBUG SGLANG_JIT_CACHE_KEEP SGLANG_JIT_FORCE_RECOMPILE SGLANG_CRASH_ON_JIT_COMPILE
    SGLANG_ENABLE_TORCH_COMPILE SGLANG_TORCH_COMPILE_MODE SGLANG_TORCH_DYNAMIC_SHAPE SGLANG_USE_BREAKABLE_CUDA_GRAPH
    SGLANG_ENABLE_CUDA_GRAPH_DEDUP SGLANG_MEMORY_SAVER_CUDA_GRAPH SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH
    SGLANG_ENABLE_GRAPH_POOL_BORROW SGLANG_ENABLE_GRAPH_POOL_PRECARVE SGLANG_GRAPH_BATCH_CAPTURE
    SGLANG_JIT_DEEPGEMM_PRECOMPILE SGLANG_JIT_DEEPGEMM_FAST_WARMUP SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE
    SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP SGLANG_DEEPGEMM_SANITY_CHECK SGLANG_DG_USE_NVRTC SGLANG_FLASHINFER_AUTOTUNE_CACHE
    SGLANG_TRITON_LOAD_WARNING_THRESHOLD_GB SGLANG_TRITON_SLOW_COMPILE_THRESHOLD_SECS
    SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY SGLANG_USE_CUSTOM_TRITON_KERNEL_CACHE"""
)
"""Variables with the prefixes of `engine`. SGLang sets some of them itself, a few with a new value each time."""
