"""Traces with a request in each line: what a line means, and sessions whose lines have only new blocks.

`trace` gives the lines in their order, on its thread. The forms that are read:

- Mooncake, with `session` and `hints` of our own: the line has the whole prompt.
- Qwen-Bailian (`chat_id`, `parent_chat_id`): the whole prompt, times in seconds.
- LMCache's log of lookups (`chunk_hashes`, `seq_len`): the whole prompt, times in seconds.
- aiperf's lines with the text of a prompt (`text_input`, `messages`, `payload`): the whole prompt.
- Sessions with `session_id`, as aiperf writes and reads them: a line has the blocks that its turn adds, unless
  `context_mode` says otherwise. Other tools write whole prompts with the same fields, so the ids decide. Whole prompts
  of a session begin with the same block; the blocks that a turn adds repeat no earlier block.

What stays true: in the requests that come out, an id stands for a block with all blocks before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BaseModel

from tiered_kv.errors import ConfigError
from tiered_kv.hints import Hints
from tiered_kv.workload.agents import is_session
from tiered_kv.workload.fields import HashIds, Time, Whole, checked, milliseconds
from tiered_kv.workload.forms import Form
from tiered_kv.workload.known_formats import GET_IDS
from tiered_kv.workload.prompts import CONVERT, PromptBlocks, contents_of
from tiered_kv.workload.request import Request, id_number

_UNCLEAR = (
    "hash_ids: some are of earlier turns of the session, so this may be the whole prompt, or what the turn adds: give "
    "each line context_mode message_array_with_responses (whole), or deltas_without_responses"
)

_SINCE_1970_S = (1.2e9, 2.5e9)
"""From 2008 to 2049. Read as milliseconds, such times are in the 14th to the 29th day of a trace."""


def _valid_hints(hints: dict[str, object] | None) -> dict[str, object] | None:
    if hints is not None:
        Hints.parse(hints)
    return hints


class _Line(BaseModel):
    """The fields of a line of any form."""

    timestamp: Time | None = None
    delay: Time | None = None
    input_length: Whole
    output_length: Whole | None = 0
    session: str | int | None = ""
    session_id: str | int | None = ""
    chat_id: str | int | None = None
    parent_chat_id: str | int | None = None
    context_mode: (
        Literal["message_array_with_responses", "deltas_without_responses", "deltas_with_responses"] | None
    ) = None
    hints: Annotated[dict[str, object] | None, AfterValidator(_valid_hints)] = None
    hash_ids: HashIds


@dataclass(slots=True)
class _SessionTurns:
    """A session so far.

    Args:
        last_ms: When its last turn came, in milliseconds of the trace.
        prompt: The ids of its last prompt.
        tokens: Tokens of its last prompt, without outputs.
        given: All ids in its lines that were not known to be whole prompts.
        is_whole: Whether a line has the whole prompt; None if that is not known.
    """

    last_ms: int = 0
    prompt: tuple[int, ...] = ()
    tokens: int = 0
    given: set[int] = field(default_factory=set)
    is_whole: bool | None = None


class Turns:
    """Makes requests of lines. One thread calls.

    `form` is that of the last line.
    """

    def __init__(self, time_unit: str, blocks: PromptBlocks | None = None) -> None:
        self._time_unit = time_unit
        self._blocks = blocks
        self.form: Form | None = None
        self._has_begun = False
        self._chats: dict[str, str] = {}
        """The first chat of each chat's chain, by chat."""
        self._sessions: dict[str, _SessionTurns] = {}
        self.have_sessions = False
        """Whether a line had a `session_id`, or no timestamp."""
        self.are_relative = False
        """Whether a line had no timestamp. Then lines may be in another order than their times."""

    def request(self, entry: object, where: str) -> Request:
        """Return the request of a line; raise ConfigError if it is none."""
        if is_session(entry):
            problem = "an agents' session, with hash_id_scope and requests, among lines with a request: give it alone"
            raise ConfigError(problem, location=where)
        form = None
        if isinstance(entry, dict) and "hash_ids" not in entry:
            form, entry = self._with_ids(entry, where)
        line = checked(_Line, entry, where)
        self.form = form or _form(line)
        is_lookup = form is Form.LOOKUPS
        is_in_seconds = self._time_unit == "s" if self._time_unit else is_lookup or line.parent_chat_id is not None
        own, joint = (_name(line.session), _name(line.session_id))
        self._check_unit(line, where, is_in_seconds)
        at_ms = self._time_ms(line, own or joint, where, is_in_seconds)
        ids, tokens = cast("tuple[int, ...]", line.hash_ids), line.input_length
        if joint and not own:
            self.have_sessions = True
            turns = self._sessions.setdefault(joint, _SessionTurns())
            ids, tokens = self._put_together(turns, line, where)
            if at_ms < turns.last_ms and not turns.is_whole:
                problem = "timestamp: expected the turns of a session in the order of their times, found an earlier one"
                raise ConfigError(problem, location=where)
        if own or joint:
            self._sessions.setdefault(own or joint, _SessionTurns()).last_ms = at_ms
        return Request(at_ms, tokens, line.output_length or 0, ids, own or joint or self._chain(line), line.hints)

    def _with_ids(self, entry: dict[str, object], where: str) -> tuple[Form, dict[str, object]]:
        """Return the form of a line without `hash_ids`, and the line with them."""
        if "chunk_hashes" in entry:
            return Form.LOOKUPS, {**entry, "hash_ids": entry["chunk_hashes"], "input_length": entry.get("seq_len")}
        payload = entry.get("payload")
        body = payload if isinstance(payload, dict) else {**entry, "prompt": entry.get("text_input")}
        contents = contents_of(body)
        if not contents:
            raise ConfigError(f"hash_ids: this key is required; {GET_IDS}", location=where)
        if self._blocks is None:
            raise ConfigError(CONVERT, location=where)
        if len(contents) > 1 or ("text_input" in entry and entry.get("session_id") in self._sessions):
            problem = "expected a whole prompt in each line; of sessions, lines with messages are read"
            raise ConfigError(problem, location=where)
        length, ids = self._blocks.ids_of(contents[0], where)
        mode = "message_array_with_responses"
        return Form.TEXTS, {**entry, "hash_ids": [*ids], "input_length": length, "context_mode": mode}

    def _check_unit(self, line: _Line, where: str, is_in_seconds: bool) -> None:
        """Refuse seconds since 1970 that would be read as milliseconds. Only the first line is checked."""
        is_first, self._has_begun = not self._has_begun, True
        time = line.timestamp or 0.0
        if is_first and not is_in_seconds and not self._time_unit and _SINCE_1970_S[0] <= time < _SINCE_1970_S[1]:
            problem = (
                f"timestamp: {time:.0f} is like seconds since 1970, and this form has ms: give --time-unit s, or ms"
            )
            raise ConfigError(problem, location=where)

    def _chain(self, line: _Line) -> str:
        """Return the first chat of a chat's chain; empty if the line names no chat."""
        if line.chat_id is None:
            return ""
        first = self._chats.get(str(line.parent_chat_id), str(line.chat_id))
        self._chats[str(line.chat_id)] = first
        return first

    def _time_ms(self, line: _Line, session: str, where: str, is_in_seconds: bool) -> int:
        if line.timestamp is not None:
            return milliseconds(line.timestamp, is_in_seconds=is_in_seconds)
        if not session:
            problem = "timestamp: this key is required"
            if line.delay is not None:
                problem += " in a line with delay that names no session (session_id)"
            raise ConfigError(problem, location=where)
        if session in self._sessions and line.delay is None:
            problem = "expected a timestamp, or a delay (ms) after the turn before of this session"
            raise ConfigError(problem, location=where)
        self.have_sessions = self.are_relative = True
        last_ms = self._sessions[session].last_ms if session in self._sessions else 0
        return last_ms + milliseconds(line.delay or 0, is_in_seconds=is_in_seconds)

    def _put_together(self, session: _SessionTurns, line: _Line, where: str) -> tuple[tuple[int, ...], int]:
        """Return the ids and the tokens of the whole prompt, and add this turn to `session`."""
        new = cast("tuple[int, ...]", line.hash_ids)
        if line.context_mode is not None:
            session.is_whole = line.context_mode == "message_array_with_responses"
        elif session.prompt and new and not session.is_whole:
            begins_so = new[0] == session.prompt[0]
            if not (begins_so or session.given.isdisjoint(new)) or (begins_so and session.is_whole is False):
                raise ConfigError(_UNCLEAR, location=where)
            session.is_whole = begins_so
        if not session.prompt or session.is_whole:
            session.prompt, session.tokens = new, line.input_length
        else:
            prompt = list(session.prompt)
            for each in new:  # an id may follow other blocks in another chat
                prompt.append(id_number(f"block {each} after {prompt[-1]}"))
            session.prompt = tuple(prompt)
            session.tokens += line.input_length
        if not session.is_whole:
            session.given.update(new)
        return session.prompt, session.tokens


def _form(line: _Line) -> Form:
    if line.parent_chat_id is not None:
        return Form.BAILIAN
    if line.session or line.hints:
        return Form.OWN
    return Form.TURNS if line.session_id or line.timestamp is None else Form.MOONCAKE


def _name(session: str | int | None) -> str:
    return "" if session is None else str(session)
