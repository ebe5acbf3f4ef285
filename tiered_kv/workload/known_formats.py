"""Names the formats of other tools that `trace` cannot read, and what to do with each.

`trace` calls these functions on its thread, for the first value of a file. They look at names of fields and at the
first bytes, and keep no state. What stays true: an empty answer means that the format is not known, not that it can be
read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

GET_IDS = (
    "a cache is simulated by the ids of blocks: tokenize each prompt, cut it into blocks, and write a line for each "
    "request with timestamp (ms), input_length, and as hash_ids for each block a hash of all tokens up to its end"
)
_OBJECTS = (
    ("ShareGPT conversations have the text of prompts", {"conversations"}),
    ("the result of a benchmark has lengths and times", {"request_throughput"}),
    ("the result of a benchmark has lengths and times", {"input_lens", "output_lens"}),
    ("the result of a benchmark has lengths and times", {"ttfts", "itls"}),
    ("BurstGPT has the lengths of prompts", {"Request tokens", "Response tokens"}),
    ("Azure's trace of LLM inference has the lengths of prompts", {"ContextTokens", "GeneratedTokens"}),
    ("requests of an API have the text of prompts", {"messages"}),
    ("requests of an API have the text of prompts", {"custom_id", "body"}),
    ("requests of an API have the text of prompts", {"prompt"}),
    ("a list of prompts has the text of them", {"text_input"}),
)
"""For each format, what it has in place of ids of blocks, and fields that only this format has."""
_ALONE = (
    (
        "aiperf's records of metrics have no prompts: run it with --export-level raw, which writes "
        "profile_export_raw.jsonl",
        {"metadata", "metrics"},
    ),
)
"""Advice on formats that come with another file, which is read."""
_TIMES = {"timestamp", "delay"}
_PROMPTS = {"messages", "text_input", "payload"}
_IDS = {"hash_ids", "chunk_hashes"}
_KEY = re.compile(rb'"([^"\\]{1,64})"\s*:')
_PARQUET = b"PAR1"
_LOG = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR) |^\[20\d\d-\d\d-\d\d ", re.MULTILINE)
_COLUMN = re.compile(r"[\w ()/#%.:+-]{0,40}")


def object_advice(keys: Iterable[str]) -> str:
    """Return what to do with an object that has these fields; empty if its format is not known."""
    names = set(keys)
    if names & _TIMES and names & _PROMPTS:
        return ""  # `turns` reads it
    if alone := next((advice for advice, fields in _ALONE if fields <= names), ""):
        return alone
    about = next((about for about, fields in _OBJECTS if fields <= names and not names & _IDS), "")
    return about and f"{about}, and no ids of blocks (hash_ids): {GET_IDS}"


def array_advice(head: bytes) -> str:
    """Return what to do with a JSON array that begins with `head`."""
    keys = [key.decode(errors="replace") for key in _KEY.findall(head)]
    return object_advice(keys) or "a JSON array is not read: write each of its objects in a line: jq -c '.[]' FILE"


def text_advice(head: bytes) -> str:
    """Return what to do with a file that begins with `head` and is no JSON; empty if its format is not known."""
    if head.startswith(_PARQUET):
        return "a file of Parquet is not read: write its requests as JSON lines"
    line = head.split(b"\n", 1)[0].decode(errors="replace")
    if "LMCache" in line:
        return (
            "this log of LMCache has no ids of blocks; the files lookup_hashes_*.jsonl can be read, which its server "
            "writes with --lookup-hash-log-dir"
        )
    columns = [column.strip().strip('"') for column in re.split(r"[,;\t]", line)]
    if len(columns) > 1 and (advice := object_advice(columns)):
        return advice
    if _LOG.search(head.decode(errors="replace")):
        return (
            "a log with no request in it: vLLM writes them with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG, "
            "SGLang with --log-requests --log-requests-level 3"
        )
    if len(columns) > 1 and all(map(_COLUMN.fullmatch, columns)):
        return (
            f"a CSV file is not read: write its requests as JSON lines; {GET_IDS}"
            if "hash_ids" not in columns
            else "a CSV file is not read: write its requests as JSON lines, hash_ids as a list"
        )
    return ""
