"""A host's server records what the requests of its engines ask for."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.host_server import keys_of, serving, stack_of


def test_a_request_of_an_engine_has_what_it_loaded_and_what_it_stored(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    keys = keys_of(5)
    with serving(tmp_path, stack_of(record=str(path))) as served:
        engines = [served.engine(), served.engine()]
        engines[0].store(keys[:3])
        served.count(lambda host: host.granted)  # the server's thread has taken the messages
        for engine in engines:
            context = engine.begin()
            found = engine.load(keys, context)
            engine.store(keys[found:], context)
            engine.end(context)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found_ids = [line["hash_ids"] for line in lines]
    assert [len(ids) for ids in found_ids] == [3, 5, 5]
    assert found_ids[1] == found_ids[2]
    assert found_ids[1][:3] == found_ids[0]
