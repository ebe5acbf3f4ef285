"""Facts of an engine's namespace that shape its blocks: the model's files, and the engine's surroundings.

The engines' plugins call it, on any thread; no function keeps state. The files have the weights and the model's
configuration. The surroundings are variables of the environment, installed packages, and the CPU. A variable with one
of an engine's prefixes counts, and so does a package that computes, unless `ignored_settings.toml` names it. So new
variables and packages of a release count by default.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

import xxhash

from tiered_kv.engines.ignored import ignored_settings

_IGNORED = ignored_settings(Path(__file__).parent)

_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_BESIDE = frozenset({".py"})
"""Code that comes with a model."""
_DESCRIBES = re.compile("quant|processor|index")
"""JSON files that count: of quantizers (with scales of a KV cache), of processors for images and sound, of an index."""

_SAMPLES = 4096
"""Samples of all files together."""
_SAMPLES_PER_FILE_MIN = 16
_SAMPLE_BYTES = 4096
_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "id2label", "label2id"})
_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "deepseek_yarn", "proportional", "mrope"})
"""Rotary embeddings that follow from the configuration alone. Others may depend on the model's length."""

_BIDIRECTIONAL: Mapping[str, tuple[object, ...]] = {
    "is_causal": (False,),
    "prefix_lm": (True,),
    "use_bidirectional_attention": (True, "all"),  # "vision" concerns images alone
}
"""Settings of text models, and their values with which a token sees later tokens of the text."""


def weights_in_files(model: str, commit: str | None, which: str) -> str | None:
    """Return how a namespace describes weights in files: by their digest, or else by the commit of their repository.

    `which` is the engine's choice among several files with weights, such as its load format.
    """
    digest = files_digest(model)
    if digest is not None:
        return f"files {digest} {which}"
    return f"commit {commit} {which}" if commit else None


def files_digest(model: str) -> str | None:
    """Return 32 hexadecimal digits for the weights in a directory, or for a file; None if there are no weights.

    Names, sizes and samples count: at least 16 pages of 4 KiB of each file, spread evenly, and about 4,096 pages of all
    files. So other weights have another digest, but a change of a few values may not show. A copy on another machine
    has the same digest.
    """
    path, mode = Path(model), _mode(Path(model))
    if stat.S_ISREG(mode):
        files = [path]
    elif stat.S_ISDIR(mode):
        files = sorted(each for each in path.iterdir() if _counts(each))
        if not any(each.suffix in _SUFFIXES for each in files):
            return None
    else:
        return None
    samples = max(_SAMPLES_PER_FILE_MIN, _SAMPLES // len(files))
    digest = xxhash.xxh3_128()
    for each in files:
        size = each.stat().st_size
        digest.update(f"{each.name} {size}\n".encode())
        with each.open("rb", buffering=0) as file:
            for start in _starts(size, samples):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, start))
    return digest.hexdigest()


def content_of(value: object) -> str | None:
    """Return the digest of the file, or directory with weights, whose path is a setting's value; None for other values.

    A path without a slash is not recognized.
    """
    try:
        return files_digest(value) if isinstance(value, str) and os.sep in value else None
    except (OSError, ValueError):  # it cannot be read, or is no path
        return None


def _counts(path: Path) -> bool:
    is_named = path.suffix in _SUFFIXES | _BESIDE or (path.suffix == ".json" and _DESCRIBES.search(path.name))
    return bool(is_named) and stat.S_ISREG(_mode(path))


def _mode(path: Path) -> int:
    """Return the type and mode of a file or directory; 0 if there is none.

    A file that cannot be looked at is an error on every Python. From 3.14 on `Path.is_file` says that there is none.
    """
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return 0
        raise


def _starts(size: int, samples: int) -> list[int]:
    if size <= samples * _SAMPLE_BYTES:
        return list(range(0, size, _SAMPLE_BYTES))
    last = size - _SAMPLE_BYTES
    return [last * number // (samples - 1) for number in range(samples)]


def without_origin(value: object) -> object:
    """Return a configuration, as its `to_dict` gives it, without the entries that no key or value depends on."""
    if isinstance(value, Mapping):
        return {str(name): without_origin(item) for name, item in value.items() if name not in _NOT_OF_THE_MODEL}
    return value


def depends_on_length(described: object, model_type: object, *, is_foreign_code: bool) -> bool:
    """Return whether keys may depend on the model's maximum length.

    LongRoPE chooses its factors by this length, Llama 4 its attention's temperature. Code that is not the engine's
    (`is_foreign_code`) may do anything. `described` is the configuration as its `to_dict` gives it; `model_type` is the
    text model's.
    """
    is_rope_fixed = rope_types(described) <= _FIXED_ROPE_TYPES
    return is_foreign_code or not is_rope_fixed or str(model_type).startswith("llama4")


def bidirectional_setting(described: Mapping[str, object]) -> str:
    """Return the setting that lets a text model's tokens attend to later tokens of the text; "" if there is none.

    `described` is the configuration as its `to_dict` gives it.
    """
    for name, values in _BIDIRECTIONAL.items():
        value = described.get(name)
        if any(value is each or (isinstance(each, str) and value == each) for each in values):
            return f"{name}={value}"
    return ""


def rope_types(value: object, in_rope: bool = False) -> set[str]:
    """Return the types of rotary embeddings in a configuration; `in_rope` says that `value` describes one."""
    found: set[str] = set()
    if isinstance(value, Mapping):
        for name, item in value.items():
            if in_rope and name in ("rope_type", "type"):
                found.add(str(item))
            found |= rope_types(item, in_rope or name in ("rope_parameters", "rope_scaling"))
    return found


_NEVER_COUNTS = re.compile(
    r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|ADDR))?)?$|"
    r"_HOST_IP$|_HOSTNAME$|_(POD|NODE)_(ID|IP|NAME|UID)$|"
    r"_(API_KEY|(API|AUTH|ACCESS)_TOKEN|PASSWORD)$|_(CACHE|DUMP|LOG|PROFILER)_DIR$|_LOG(GING)?_?(LEVEL|DEST|FILE)$|"
    r"_VERBOSE$|_TIMEOUT(_|$)|_(RETRIES|WORKERS)$|NUMA_|NVTX|PROFIL"
)
"""Variables that never count: first ports, and the variables that Kubernetes sets for each service. A service "vllm"
makes variables with vLLM's prefix. Then names of machines and pods, credentials, directories of caches, logs, timeouts,
numbers of processes, and profiles."""

_NEEDS_TORCH = re.compile(
    r"^Requires-Dist: *(torch|triton|jax)(?![\w.-])(?!.*\bextra *==)", re.MULTILINE | re.IGNORECASE
)
_COMPUTES = re.compile(
    "aiter|attention|attn|awq|cutlass|flash|gemm|gptq|(?<!ipy)kernel|mamba|-mla|moe|quant|triton(?!client)"
)
"""Names of packages with kernels. Their metadata does not always say that they need PyTorch."""


def counting_variables(
    counts: re.Pattern[str], ignored: frozenset[str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables of `environ` that count: all with a name that `counts` finds, but for the ignored ones.

    A value counts as it is spelled. The path of a file, or of a directory with weights, counts by samples of the
    content. Bytes that are no UTF-8 become escapes, which every description of a namespace can hold.
    """
    return {
        _as_utf8(name): content_of(value) or _as_utf8(value)
        for name, value in sorted(environ.items())
        if counts.search(name) and name not in ignored | _IGNORED.variables and not _NEVER_COUNTS.search(name)
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
        texts = (_text(each, name) for name in ("METADATA", "PKG-INFO", ""))  # an .egg-info file has the last one
        metadata = next(filter(None, texts), "").partition("\n\n")[0]
        name, version = (_field(field, metadata) for field in ("Name", "Version"))
        name = _normal(name)
        computes = name in listed or _COMPUTES.search(name) or _NEEDS_TORCH.search(metadata)
        if (computes and name not in _IGNORED.packages) or _has_plugin(_text(each, "entry_points.txt"), plugins):
            # With two installations, the one in use depends on the order of a directory, so both count.
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
