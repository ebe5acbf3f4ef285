"""What shapes no byte of a block: settings and variables of vLLM that do not count for the namespace.

They decide about memory, scheduling, serving, sampling and compilation. What is not named here counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiered_kv.integrations.environment import names

SECTIONS = names(
    """
    scheduler_config offload_config structured_outputs_config reasoning_config watermark_config observability_config
    logging_config profiler_config watchdog_config aux_output_config instance_id shutdown_timeout
    kv_transfer_config kv_events_config ec_transfer_config ec_manager_config
    compilation_config optimization_level performance_mode
    quant_config device_config load_config weight_transfer_config
    """
)
"""Sections that do not count: memory, scheduling, serving, sampling and observing; other transfers, and this one; how
kernels are made, which changes the last bits of a value and not its meaning. `quant_config` is made from what counts,
and `engine` covers the last three in other ways."""

FIELDS: Mapping[str, frozenset[str]] = {
    section: names(text)
    for section, text in {
        # The model's origin, which `engine` has; its length, which counts for some models; `hf_overrides`, whose
        # result counts. Then what concerns tokens, which the hashes cover; logits, samples and pools; serving, memory.
        "model_config": """
            model model_weights revision hf_config_path config_format hf_token max_model_len
            spec_target_max_model_len seed hf_overrides
            tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init enable_prompt_embeds
            allowed_local_media_path allowed_media_domains renderer_num_workers io_processor_plugin
            max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel enable_trace_replay generation_config
            override_generation_config logits_processors pooler_config word_embeddings_untied_by_checkpoint
            served_model_name allow_deprecated_quantization enforce_eager disable_cascade_attn enable_sleep_mode
            sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend
            enable_cumem_allocator""",
        "multimodal_config": """
            limit_per_prompt mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
            mm_ipc_gpu_memory_gb mm_tensor_ipc mm_encoder_tp_mode mm_encoder_fp8_scale_save_path
            mm_encoder_fp8_scale_save_margin skip_mm_profiling""",
        # The last line derives from the groups, which count, where an engine has got that far.
        "cache_config": """
            gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
            kv_cache_size_tokens kv_cache_max_concurrency kv_offloading_size kv_offloading_backend
            simple_cpu_offload_num_blocks enable_prefix_caching prefix_cache_retention_interval
            enable_mamba_shared_prefix_checkpoint user_specified_block_size _block_size_resolved
            kv_cache_layout effective_attention_block_size hash_block_size cache_hit_alignment_tokens""",
        "attention_config": """
            flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph
            tokenspeed_mla_min_split_kv""",
        # What is left chooses a backend, and with it the type in which a quantized layer computes.
        "kernel_config": """
            ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup
            enable_jit_warmup""",
        # The sizes that vLLM's summary has, and places: of processes, of experts, of batches.
        "parallel_config": """
            pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size
            data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index
            data_parallel_master_ip data_parallel_master_port data_parallel_rpc_port data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb _data_parallel_master_port_list _coord_store_port
            dp_sync_interval disable_nccl_for_dp_synchronization is_moe_model world_size rank node_rank nnodes
            master_addr master_port placement_group distributed_executor_backend ray_workers_use_nsight ray_runtime_env
            assigned_physical_gpu_ids numa_bind numa_bind_nodes numa_bind_cpus _api_process_count _api_process_rank
            distributed_timeout_seconds cpu_distributed_timeout_seconds enable_fault_tolerance fault_tolerance_config
            enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy enable_elastic_ep
            elastic_ep_max_dp_size max_parallel_loading_workers enable_batch_sharded_sampling enable_shm_tensor_arena
            disable_custom_all_reduce enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
            _allow_auto_resolve_cp_interleave_size""",
        "lora_config": "max_loras max_cpu_loras max_lora_rank fully_sharded_loras specialize_active_lora",
        "speculative_config": "target_model_config target_parallel_config draft_parallel_config enforce_eager",
    }.items()
}
"""Fields that do not count, by section."""

VARIABLES = names(
    # Addresses and processes; transfers and sums between them.
    """
    VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_RPC_BASE_PATH VLLM_DIST_IDENT VLLM_DP_MASTER_IP VLLM_DP_RANK VLLM_DP_RANK_LOCAL
    VLLM_DP_SIZE VLLM_PP_LAYER_PARTITION VLLM_XPU_PP_MICROBATCH VLLM_CPU_SIM_MULTI_NUMA VLLM_ELASTIC_EP_DRAIN_REQUESTS
    VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_WORKER_MULTIPROC_METHOD
    VLLM_ENABLE_V1_MULTIPROCESSING VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY
    VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
    VLLM_RAY_PER_WORKER_GPUS VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
    VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_MQ_MAX_CHUNK_BYTES_MB
    VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
    VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_EC_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_HOST
    VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
    VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS
    VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MORIIO_TRANSFER_TIMEOUT_S VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
    VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS VLLM_NCCL_SO_PATH
    VLLM_NCCL_INCLUDE_PATH VLLM_CUDART_SO_PATH VLLM_DISABLE_PYNCCL VLLM_SKIP_P2P_CHECK VLLM_USE_NCCL_SYMM_MEM
    VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC
    VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_CUSTOM_ALLREDUCE_ALGO VLLM_FLASHINFER_ALLREDUCE_BACKEND"""
    # The server and its requests; tokens, which the hashes cover; samples and grammars; adapters, which the user names.
    """
    VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
    VLLM_SNAPSHOT_TIMEOUT_S VLLM_SNAPSHOT_IGNORED_FD_MAP VLLM_PROCESS_NAME_PREFIX VLLM_USE_SPINLOOP_EXT
    VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_SERVER_DEV_MODE VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    VLLM_USE_RUST_FRONTEND VLLM_RUST_FRONTEND_PATH VLLM_USE_RUST_BENCH VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
    VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS
    VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_ALLOW_LONG_MAX_MODEL_LEN
    VLLM_CHAT_TEMPLATE_FUEL VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_USE_FASTOKENS VLLM_SYSTEM_START_DATE
    VLLM_ENABLE_COHERE_API VLLM_ENABLE_RESPONSES_API_STORE VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
    VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY
    VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT
    VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_XGRAMMAR_CACHE_MB VLLM_V1_USE_OUTLINES_CACHE VLLM_USE_FLASHINFER_SAMPLER
    VLLM_XPU_USE_SAMPLER_KERNEL VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS VLLM_ALLOW_RUNTIME_LORA_UPDATING
    VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_LORA_ENABLE_DUAL_STREAM VLLM_LORA_DISABLE_PDL"""
    # How images and sound are fetched, and how large they may be.
    """
    VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE
    VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT
    VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES
    VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_BYTES
    VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_EMBED_DECODE_BYTES
    VLLM_MAX_IMAGE_PIXELS"""
    # Logs, metrics, checks.
    """
    VLLM_CONFIGURE_LOGGING VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_COLOR
    VLLM_LOG_STATS_INTERVAL VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_DISABLE_LOG_LOGO
    VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE VLLM_GC_DEBUG
    VLLM_GPU_SYNC_CHECK VLLM_PATTERN_MATCH_DEBUG VLLM_TRACE_FUNCTION VLLM_CUSTOM_SCOPES_FOR_PROFILING
    VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK"""
    # Memory, threads and streams; how kernels are made and kept, as `compilation_config`; how vLLM was built.
    """
    VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
    VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
    VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
    VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DBO_COMM_SMS VLLM_DISABLE_SHARED_EXPERTS_STREAM
    VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD
    VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_KIMI_K3_AUX_ATTN_RES_STREAM
    VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_ENABLE_STARTUP_PLAN
    VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_XLA_CACHE_PATH VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN
    VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_DISABLE_COMPILE_CACHE VLLM_FORCE_AOT_LOAD VLLM_USE_AOT_COMPILE
    VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_STANDALONE_COMPILE VLLM_USE_BYTECODE_HOOK VLLM_USE_LAYERNAME
    VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_PREGRAD_PASSES VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE
    VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TRITON_JIT_WARMUP_NUM_THREADS
    VLLM_TUNED_CONFIG_FOLDER VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_DEEP_GEMM_WARMUP VLLM_XLA_CHECK_RECOMPILATION
    VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_CUDA_COMPATIBILITY_PATH VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION
    VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST VLLM_PRECOMPILED_WHEEL_LOCATION VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
    VLLM_SKIP_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
    VLLM_IMAGE_TAG"""
)
"""What vLLM's own list for its compiled graphs leaves out, and more: for them, the number of processes counts."""
