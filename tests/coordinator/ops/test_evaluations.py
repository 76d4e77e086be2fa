"""Evaluations at a real coordinator: what outlives a restart and a copy, and where it is shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from coordinator.store.backup import back_up
from coordinator.store.history import SqliteHistory
from coordinator.store.log_copy import last_status
from protocol.errors import ErrorCode
from protocol.status import ModelEvaluation, ModelSample
from protocol.types import PeerId
from protocol.wire.operator_calls import TellEvaluation
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import COORDINATOR, refusal_of, running
from tests.support.dashboard import ask

A, B, C = (keyed(i) for i in range(3))
SPEC = spec_of(stages=1, replicas=2, rounds=3)
FRONT = "/login"
HOSTILE = "<b>x</b>\n  y"
SAMPLES = (ModelSample("def ", HOSTILE),)


async def test_what_is_told_outlives_a_restart_and_a_copy_and_is_shown(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    async with running(SPEC, folder, dashboard="0.0.0.0:0", contact="ask me") as run:
        for peer in (A, B):
            await run.join(peer)
        for number in (1, 2):
            await run.settle(0, number, A, B)
        refused = await refusal_of(run.ask(TellEvaluation(1, "wiki", {"loss": 1.0}), C))
        assert refused.code is ErrorCode.UNKNOWN_PEER
        for _ in range(2):  # gRPC may send a call twice
            await run.ask(TellEvaluation(1, "wiki", {"loss": 3.5}), A)
        await run.ask(TellEvaluation(2, "wiki", {"loss": 3.25, "bits_per_byte": 1.5}), A)
        for _ in range(30):  # a harness tells all its tasks at once
            await run.ask(TellEvaluation(1, "wiki", {"loss": 1.0}), A)
        await run.ask(TellEvaluation(1, "prompts", {}, SAMPLES))
        assert "After round 1:\n\ndef &lt;b&gt;x&lt;/b&gt;\n  y</pre>" in (await ask(folder, FRONT)).text
        (folder / "samples.txt").write_text("chosen by hand")
        assert "After round 1" not in (await ask(folder, FRONT)).text
        await asyncio.to_thread(back_up, folder, copy, COORDINATOR.peer)
        status = await run.status()
    expected = (
        ModelEvaluation(A.peer, 2, "wiki", {"loss": 3.25, "bits_per_byte": 1.5}),
        ModelEvaluation(PeerId(""), 1, "prompts", {}, SAMPLES),
    )
    assert status.evaluations == last_status(copy).evaluations == expected
    (folder / "history.sqlite").unlink()
    async with running(SPEC, folder) as run:  # which writes the history again
        await run.ask(TellEvaluation(2, "wiki", {"loss": 9.0}), A)
        assert (await run.status()).evaluations == expected
    async with running(SPEC, folder, dashboard="127.0.0.1:0"):
        told = (await ask(folder, "/api/evaluations")).json
    assert [(each["name"], each["metric"], each["peer"]) for each in told["lines"]] == [
        ("wiki", "bits_per_byte", A.peer),
        ("wiki", "loss", A.peer),
    ]
    assert [(each["round"], each["value"]) for each in told["lines"][1]["points"]] == [(1, 3.5), (2, 3.25)]
    (sample,) = told["samples"]
    assert (sample["round_number"], sample["peer"], sample["prompt"]) == (1, "", "def ")
    assert sample["text"] == HOSTILE
    history = SqliteHistory(folder / "history.sqlite")
    assert [each.value for each in history.evaluations(1)] == [1.5, 3.25], "the newest of the thinned rounds"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(each["round"], each["figures"]) for each in lines if each["event"] == "evaluation"]
    assert found == [(1, {"loss": 3.5}), (2, {"loss": 3.25, "bits_per_byte": 1.5})]


async def test_a_member_cannot_fill_the_log_with_evaluations_of_former_rounds(tmp_path: Path) -> None:
    async with running(SPEC, tmp_path) as run:
        for peer in (A, B):
            await run.join(peer)
        await run.settle(0, 1, A, B)
        for number in range(64):
            await run.ask(TellEvaluation(number % 2, f"set {number // 2}", {"loss": 1.0}), A)
        refused = await refusal_of(run.ask(TellEvaluation(1, "set 0", {"loss": 1.0}), A))
        assert refused.code is ErrorCode.RATE_LIMITED
        await run.ask(TellEvaluation(1, "wiki", {"loss": 1.0}), B)
