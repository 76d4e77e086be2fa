"""The hive host's calls come in several threads: what one of them changes, the others must not miss."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.hive import host as host_room
from node.hive.host import Host


class Averager:
    """Stands for one that is being forked, just when a new roster comes in another thread."""

    on_launch: Any

    def __init__(
        self, _dht: object, _run: str, _stage: int, _storage: object, allow_list: Any, _: object
    ) -> None:
        self.allow_list = tuple(allow_list)
        self.calls = SimpleNamespace(call=self._call)

    def launch(self) -> None:
        type(self).on_launch()

    def wait_until_ready(self, _: float) -> None:
        pass

    def _call(self, name: str, body: dict[str, Any]) -> None:
        assert name == "admit"
        self.allow_list = tuple(body["peers"])


def test_a_roster_that_comes_while_averagers_are_forked_reaches_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host()
    host._run, host._folder = "run", tmp_path
    host._dht = SimpleNamespace(keep_out=lambda banned, deadline: None)  # type: ignore[assignment]
    monkeypatch.setattr(host_room, "SparseAverager", Averager)
    admitting: list[threading.Thread] = []

    def admit() -> None:
        if not admitting:
            body = {"peers": ["newcomer"], "banned": [], "deadline": 1}
            admitting.append(threading.Thread(target=host.admit, args=(body, ())))
            admitting[0].start()
            admitting[0].join(0.1)  # as far as it comes by itself

    monkeypatch.setattr(Averager, "on_launch", staticmethod(admit), raising=False)
    body = {
        "deadline": 9,
        "payload_folder": str(tmp_path),
        "checkpoint_folder": str(tmp_path),
        "capacities": {str(stage): 100 for stage in range(3)},
        "keep_rounds": 2,
    }
    host.host_stages(body, ())
    admitting[0].join(10)
    averagers = [host._averagers[stage] for stage in range(3)]
    assert [averager.allow_list for averager in averagers] == 3 * [("newcomer",)]  # type: ignore[attr-defined]
