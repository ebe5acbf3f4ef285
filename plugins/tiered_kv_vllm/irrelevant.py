"""What shapes no byte of a block: settings and variables of vLLM that do not count for the namespace.

They decide about memory, scheduling, serving, sampling and compilation. What is not named here counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiered_kv.engines.facts import names

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
    VLLM_LOOPBACK_IP VLLM_RPC_BASE_PATH VLLM_DIST_IDENT VLLM_DP_MASTER_IP VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE
    VLLM_PP_LAYER_PARTITION VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_RAY_BUNDLE_INDICES
    VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY
    VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
    VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM
    VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_EC_SIDE_CHANNEL_HOST
    VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_HOST VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS
    VLLM_NCCL_SO_PATH VLLM_NCCL_INCLUDE_PATH VLLM_CUDART_SO_PATH VLLM_SKIP_P2P_CHECK VLLM_USE_NCCL_SYMM_MEM
    VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_CUSTOM_ALLREDUCE_ALGO"""
    # The server; tokens, which the hashes cover; samples; adapters, which the user names; images and sound.
    """
    VLLM_PROCESS_NAME_PREFIX VLLM_SERVER_DEV_MODE VLLM_USE_RUST_FRONTEND VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
    VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_SYSTEM_START_DATE VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
    VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_ENABLE_RESPONSES_API_STORE VLLM_USE_FLASHINFER_SAMPLER
    VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB
    VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"""
    # Logs, metrics, checks.
    """
    VLLM_CONFIGURE_LOGGING VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_COLOR
    VLLM_LOG_STATS_INTERVAL VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_DUMP_PATH VLLM_TRACE_FUNCTION
    VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK"""
    # Memory and threads; how kernels are made and kept, as `compilation_config`; how vLLM was built.
    """
    VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU
    VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_XLA_CACHE_PATH VLLM_ASSETS_CACHE
    VLLM_DISABLE_COMPILE_CACHE VLLM_DEEP_GEMM_WARMUP VLLM_DISABLE_SHARED_EXPERTS_STREAM
    VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_FORCE_AOT_LOAD VLLM_USE_AOT_COMPILE VLLM_USE_STANDALONE_COMPILE
    VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_ENABLE_CUDAGRAPH_GC VLLM_TUNED_CONFIG_FOLDER VLLM_ENABLE_CUDA_COMPATIBILITY
    VLLM_CUDA_COMPATIBILITY_PATH VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION VLLM_USE_PRECOMPILED VLLM_BUILD_COMMIT
    VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG"""
)
"""Variables that vLLM or its image sets, that differ between hosts, or that people change. Others that shape no byte
count: a change of them costs the blocks that were stored before."""
