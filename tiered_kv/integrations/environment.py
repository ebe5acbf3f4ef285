"""What is around an engine and shapes its blocks: variables of the environment, installed packages, the CPU.

A variable with one of an engine's prefixes counts unless it is known to be irrelevant, and a package that computes
counts unless it is known not to. So what is new counts by default.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Collection, Mapping

from tiered_kv.integrations.model_files import content_of


def names(*texts: str) -> frozenset[str]:
    """Return the names in texts, which white space separates."""
    return frozenset(" ".join(texts).split())


_NEVER_COUNTS = re.compile(
    r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|ADDR))?)?$|"
    r"_HOST_IP$|_HOSTNAME$|_(POD|NODE)_(ID|IP|NAME|UID)$|"
    r"_(API_KEY|(API|AUTH|ACCESS)_TOKEN|PASSWORD)$|_(CACHE|DUMP|LOG|PROFILER)_DIR$|_LOG(GING)?_?(LEVEL|DEST|FILE)$|"
    r"_VERBOSE$|_TIMEOUT(_|$)|_(RETRIES|WORKERS)$|NUMA_|NVTX|PROFIL"
)
"""Ports, and what Kubernetes sets for each of its services: a service "vllm" makes variables with vLLM's prefix. Then
names of machines and pods, credentials, directories of caches, logs, times to wait, processes, and profiles."""

_IRRELEVANT = names(
    """
    CUBLAS_LOGDEST_DBG CUBLAS_LOGINFO_DBG CUBLAS_WORKSPACE_CONFIG CUBLASLT_LOG_MASK CUBLASLT_WORKSPACE_SIZE
    CUTE_DSL_LOG_TO_CONSOLE CUTE_DSL_LOG_TO_FILE CUTE_DSL_PTXAS_PATH DG_JIT_DEBUG DG_JIT_NVCC_COMPILER
    DG_JIT_PRINT_COMPILER_COMMAND DG_JIT_USE_NVRTC DG_PRINT_CONFIGS DG_USE_NVIDIA_TOOLS FLASHINFER_CUBIN_DIR
    FLASHINFER_CUBINS_REPOSITORY FLASHINFER_CUDA_ARCH_LIST FLASHINFER_DISABLE_VERSION_CHECK FLASHINFER_JIT_DEBUG
    FLASHINFER_NVCC FLASHINFER_NVCC_THREADS FLASHINFER_WORKSPACE_BASE FLA_CACHE_RESULTS FLA_CI_ENV
    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED FMHA_GMEM_CHECK HIPBLASLT_LOG_MASK HIPBLASLT_TENSILE_LIBPATH ROCBLAS_LAYER
    ROCBLAS_TENSILE_LIBPATH MINIMAX_KERNELS_CUTE_AOT_CACHE MINIMAX_KERNELS_KVOUTER_DEBUG_ARTIFACTS MINIMAX_LOG_COMPILE
    MM_SPARSE_ATTN_AOT_CACHE MM_SPARSE_ATTN_AOT_DISABLE TILELANG_CLEANUP_TEMP_FILES TILELANG_TMP_DIR
    TRITON_CACHE_AUTOTUNING TRITON_CACHE_MANAGER TRITON_CUOBJDUMP_PATH TRITON_HOME TRITON_LIBCUDA_PATH
    TRITON_LIBHIP_PATH TRITON_NVDISASM_PATH TRITON_PRINT_AUTOTUNING TRITON_PTXAS_BLACKWELL_PATH TRITON_PTXAS_PATH
    """
)
"""Variables of libraries that count for nothing: how they compile, where they keep it, and what they print."""

_NEEDS_TORCH = re.compile(
    r"^Requires-Dist: *(torch|triton|jax)(?![\w.-])(?!.*\bextra *==)", re.MULTILINE | re.IGNORECASE
)
_COMPUTES = re.compile(
    "aiter|attention|attn|awq|cutlass|flash|gemm|gptq|(?<!ipy)kernel|mamba|-mla|moe|quant|triton(?!client)"
)
"""Names of packages with kernels. Their metadata does not always say that they need PyTorch."""
_COMPUTES_NOTHING = names(
    """
    fastsafetensors instanttensor lmcache lm-format-enforcer nixl outlines outlines-core runai-model-streamer tensorizer
    torch-memory-saver xgrammar
    """
)
"""Packages that need PyTorch and leave keys and values alone: readers of weights, transfers, grammars, memory."""


def counting_variables(
    counts: re.Pattern[str], irrelevant: Collection[str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables of `environ` that count: all whose names `counts` finds, but for the irrelevant ones.

    A value counts as it is spelled. One that is the path of a file, or of a directory with weights, counts by samples
    of the content. Bytes that are no UTF-8 become escapes, which every description of a namespace can hold.
    """
    return {
        _as_utf8(name): content_of(value) or _as_utf8(value)
        for name, value in sorted(environ.items())
        if counts.search(name) and name not in irrelevant and name not in _IRRELEVANT and not _NEVER_COUNTS.search(name)
    }


def computing_packages(known: Collection[str], plugins: re.Pattern[str]) -> str:
    """Return the installed packages that compute, with their versions, or "none".

    Args:
        known: Names of packages or modules that count. A module without metadata counts as present.
        plugins: Finds the groups of entry points whose packages are part of the engine.
    """
    listed = {_normal(name) for name in known}
    found: dict[str, set[str]] = {}
    for each in importlib.metadata.distributions():
        texts = (_text(each, name) for name in ("METADATA", "PKG-INFO", ""))  # the last is that of an .egg-info file
        metadata = next(filter(None, texts), "").partition("\n\n")[0]
        name, version = (_field(field, metadata) for field in ("Name", "Version"))
        name = _normal(name)
        computes = name in listed or _COMPUTES.search(name) or _NEEDS_TORCH.search(metadata)
        if (computes and name not in _COMPUTES_NOTHING) or _has_plugin(_text(each, "entry_points.txt"), plugins):
            # Of two installations the one in use depends on the order of a directory, so both count.
            found.setdefault(name, set()).add(version)
    for name in listed - found.keys():
        if _is_module(name.replace("-", "_")):
            found[name] = {"of no known version"}
    return ", ".join(" ".join([name, *sorted(versions)]) for name, versions in sorted(found.items())) or "none"


def instruction_sets() -> str:
    """Return a CPU's architecture and a digest of its instruction sets, by which kernels are chosen."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    flags = sorted(flag for flag, is_there in capabilities.items() if is_there is True)
    return f"{capabilities['architecture']} {hashlib.blake2b(' '.join(flags).encode(), digest_size=8).hexdigest()}"


def _as_utf8(text: str) -> str:
    return os.fsencode(text).decode(errors="backslashreplace")


def _text(package: importlib.metadata.Distribution, name: str) -> str:
    try:
        return package.read_text(name) or ""
    except (OSError, UnicodeError):  # half installed, or damaged
        return ""


def _field(name: str, metadata: str) -> str:
    found = re.search(rf"^{name}: *(.*?)\s*$", metadata, re.MULTILINE)
    return found[1] if found else ""


def _normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def _has_plugin(entry_points: str, plugins: re.Pattern[str]) -> bool:
    return any(plugins.search(group) for group in re.findall(r"^\s*\[([^\]]+)\]", entry_points, re.MULTILINE))


def _is_module(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a stand-in without a specification
        return False
    return spec is not None and spec.origin is not None  # and not a mere directory of that name
