"""Prompts as tokens, texts or messages, and the ids of their blocks.

The readers of logs and reports give each prompt to `PromptBlocks`, on the command's thread. What must stay true: an id
stands for a block with all blocks before it, and only whole blocks have ids, as in an engine. Prompts of another
adapter or with another image share no block.
"""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Protocol

from tiered_kv.errors import ConfigError, MissingExtraError
from tiered_kv.workload.request import Request

BLOCK_TOKENS: Final = 16
"""Tokens in a block, as in vLLM by default."""
CONVERT: Final = (
    "it has prompts and no ids of blocks (hash_ids): make a trace of it by "
    "'tiered-kv trace FILE --tokenizer MODEL --to OUT'"
)
_TOKENIZER: Final = "it has the text of prompts: give --tokenizer, the folder of the model or of its tokenizer"
_PERSON: Final = b"tiered-kv trace"
_ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Messages:
    """A chat, as a request of OpenAI's API has it."""

    messages: Sequence[object]
    tools: Sequence[object] | None = None


Content = Sequence[int] | str | Messages


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a log or a report.

    Args:
        at_ms: Arrival, in milliseconds.
        content: The tokens, the text, or the chat.
        output_length: Tokens that were generated; 0 if unknown.
        session: Name of its session; empty if unknown.
        apart: Whatever else its blocks depend on, such as an adapter; empty for none.
    """

    at_ms: int
    content: Content
    output_length: int = 0
    session: str = ""
    apart: str = ""


class Tokenizer(Protocol):
    """Makes tokens of a text, or of a chat."""

    def encode(self, text: str) -> Sequence[int]: ...

    def encode_chat(self, messages: Sequence[object], tools: Sequence[object] | None) -> Sequence[int]: ...


class PromptBlocks:
    """Makes requests of prompts. One thread calls.

    Args:
        block_tokens: Tokens in a block.
        tokenizer: None if prompts have to be tokens.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS, tokenizer: Tokenizer | None = None) -> None:
        self.block_tokens = block_tokens
        self._tokenizer = tokenizer
        self.count = 0
        """Prompts so far."""

    def request(self, prompt: Prompt, where: str) -> Request:
        """Return the request of a prompt; raise `ConfigError` with the place if there are no tokens."""
        length, ids = self.ids_of(prompt.content, where, prompt.apart)
        return Request(prompt.at_ms, length, prompt.output_length, ids, prompt.session)

    def ids_of(self, content: Content, where: str, apart: str = "") -> tuple[int, tuple[int, ...]]:
        """Return the number of tokens, and the ids of the whole blocks."""
        self.count += 1
        try:
            tokens = array("q", self._tokens(content, where))
        except (TypeError, OverflowError) as error:
            raise ConfigError("expected tokens that are whole numbers", location=where) from error
        except ValueError as error:  # of a tokenizer
            raise ConfigError(f"the tokenizer refuses the prompt: {error}", location=where) from error
        digest = apart.encode(errors="surrogatepass")
        ids = []
        for end in range(self.block_tokens, len(tokens) + 1, self.block_tokens):
            block = tokens[end - self.block_tokens : end].tobytes()
            digest = blake2b(digest + block, digest_size=_ID_BYTES, person=_PERSON).digest()
            ids.append(int.from_bytes(digest, "little"))
        return len(tokens), tuple(ids)

    def _tokens(self, content: Content, where: str) -> Sequence[int]:
        if not isinstance(content, (str, Messages)):
            return content
        if self._tokenizer is None:
            raise ConfigError(_TOKENIZER, location=where)
        if isinstance(content, str):
            return self._tokenizer.encode(content)
        return self._tokenizer.encode_chat(content.messages, content.tools)


def contents_of(body: Mapping[str, object]) -> list[Content]:
    """Return the prompts of a request's body, of OpenAI's API or of SGLang's own; empty if it has none."""
    messages, tools = body.get("messages"), body.get("tools")
    if isinstance(messages, list):
        return [Messages(messages, tools if isinstance(tools, list) else None)]
    found = next((body[name] for name in ("prompt", "input_ids", "text") if body.get(name)), None)
    if isinstance(found, str):
        return [found]
    if not isinstance(found, list):
        return []
    return [*found] if isinstance(found[0], (str, list)) else [found]


class _ModelTokenizer:
    """A tokenizer of Transformers."""

    def __init__(self, found: Any) -> None:  # Any: Transformers has no types here
        self._found = found

    def encode(self, text: str) -> Sequence[int]:
        tokens: list[int] = self._found.encode(text)
        return tokens

    def encode_chat(self, messages: Sequence[object], tools: Sequence[object] | None) -> Sequence[int]:
        if not self._found.chat_template:
            raise ConfigError("the tokenizer has no chat template, and the prompts are chats", location="--tokenizer")
        import jinja2

        try:
            text = self._found.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        tokens: list[int] = self._found.encode(text, add_special_tokens=False)  # the template has them
        return tokens


def open_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model's folder. It asks no network, and runs no code of the folder but its template.

    Raises:
        MissingExtraError: Transformers is not installed.
        ConfigError: The folder has no tokenizer that Transformers reads.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("'--tokenizer'", "transformers")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: expected that of a model", location="--tokenizer")
    from transformers import AutoTokenizer

    try:
        return _ModelTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except Exception as error:  # of any file in the folder
        message = str(error).splitlines()
        raise ConfigError(
            f"Transformers reads no tokenizer in {folder}: {message[0] if message else type(error).__name__}",
            location="--tokenizer",
        ) from error
