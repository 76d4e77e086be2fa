"""A hub that fails for a while, or for good: a real server, and a clock that does not wait."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.data.hub import Shard, hub_shards
from node.data.stream import open_stream
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from tests.support.hub_server import NAME, HubServer, hub_with

LIBRARY_TRIES = 6
"""Of one request, before the hub's own library gives up."""


def _lines(number: int) -> bytes:
    return b"".join(json.dumps({"text": f"{number}/{n} " * 8}).encode() + b"\n" for n in range(300))


FILES = {f"data/part-{number}.jsonl": _lines(number) for number in range(2)}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited; nobody really does."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    monkeypatch.setattr("node.data.hub.sleep", found.append)
    monkeypatch.setattr("node.data.hub.monotonic", lambda: sum(found))
    return found


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Iterator[HubServer]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub_with(FILES) as server:
        yield server


def _texts(shard: Shard) -> list[str]:
    return [record["text"] for record in shard.records() if isinstance(record, dict)]


def test_the_hub_tells_the_size_of_each_file_with_the_list(hub: HubServer) -> None:
    shards = hub_shards(NAME)
    assert [(shard.name, shard.nbytes) for shard in shards] == [
        (f"{NAME}, part-{number}.jsonl", len(_lines(number))) for number in range(2)
    ]
    assert sum("/tree/" in path for path in hub.requested) == 2, "each folder is listed once"


def test_a_hub_that_fails_for_a_while_delays_the_data(
    hub: HubServer, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    shards = hub_shards(NAME)
    expected = _texts(shards[1])
    waits.clear()
    hub.failures = 5 * LIBRARY_TRIES
    with caplog.at_level(logging.WARNING, "node.data.hub"):
        assert _texts(shards[1]) == expected
    own = [record.getMessage() for record in caplog.records if record.name == "node.data.hub"]
    assert len(own) == 5
    assert "502" in own[0]
    assert sum(waits) > 5 * 23


def test_after_a_failure_in_the_middle_no_record_is_lost_or_doubled(hub: HubServer) -> None:
    (shard, _) = hub_shards(NAME)
    expected = _texts(shard)
    records = shard.records()
    found = [next(records) for _ in range(5)]
    hub.failures = LIBRARY_TRIES
    found += records
    assert [record["text"] for record in found if isinstance(record, dict)] == expected


def test_a_hub_that_fails_while_the_data_are_listed_is_asked_again(hub: HubServer) -> None:
    hub.failures = 2 * LIBRARY_TRIES
    spec = resolve("nano", overrides={"data.source": f"hf:{NAME}"})
    assert open_stream(spec).read(range(4)).shape == (4, spec.model.context + 1)


@pytest.mark.parametrize("status", [500, 502, 429])
def test_a_hub_that_fails_for_good_stops_the_node_with_the_reason(
    hub: HubServer, waits: list[float], status: int
) -> None:
    shards = hub_shards(NAME)
    waits.clear()
    hub.failures, hub.status = 10**9, status
    with pytest.raises(HetnodeError) as caught:
        _texts(shards[1])
    assert caught.value.code is ErrorCode.DATA_UNREADABLE
    assert str(status) in caught.value.cause
    assert "part-1.jsonl" in caught.value.cause
    assert "--data hf:FOLDER" in caught.value.remedy
    assert 1800 < sum(waits) < 3 * 1800


def test_a_file_that_is_gone_is_no_reason_to_wait(hub: HubServer, waits: list[float]) -> None:
    shards = hub_shards(NAME)
    waits.clear()
    hub.failures, hub.status = 10**9, 404
    with pytest.raises(HetnodeError) as caught:
        _texts(shards[1])
    assert caught.value.code is ErrorCode.DATA_UNREADABLE
    assert not waits
