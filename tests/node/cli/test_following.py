"""Followers of a run are processes of their own beside a real coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.store.log_copy import last_status
from node.checkpoint import global_model
from node.checkpoint.layout import round_folder
from node.cli.main import app
from node.core.model.init import initial_parameters
from node.ipc.template import ForkedProcess
from protocol.errors import ErrorCode, ExitCode, HetnodeError
from tests.builders import keyed, spec_of
from tests.support import commands
from tests.support.coordinator_process import Running, running
from tests.support.hub_uploads import TOKEN, hub_for_uploads

A, B = keyed(0), keyed(1)
SPEC = spec_of(stages=2, replicas=2, rounds=4, timing__lost_after=300.0)
TEXT = "the cafe is open. " * 3 + "\n"
pytestmark = pytest.mark.swarm


def write_model(folder: Path, round_number: int) -> None:
    stages = {stage: initial_parameters(SPEC, stage) for stage in range(2)}
    global_model.write(folder / "checkpoint" / round_folder(round_number), SPEC, round_number, stages)


async def play(run: Running, *rounds: int) -> None:
    for round_number in rounds:
        for stage in range(2):
            await run.settle(stage, round_number, A, B)
        write_model(run.folder, round_number)


@asynccontextmanager
async def following(
    *arguments: str, log: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[ForkedProcess]:
    process = commands.start(*arguments, log=log, environment=environment)
    try:
        yield process
    finally:
        process.kill()


async def until_told(run: Running, round_number: int, name: str) -> None:
    async with asyncio.timeout(60):
        while all(  # noqa: ASYNC110  another process tells
            (each.name, each.round_number) != (name, round_number)
            for each in (await run.status()).evaluations
        ):
            await asyncio.sleep(0.1)


async def test_eval_tells_of_each_due_model_goes_on_after_errors_and_ends_with_the_run(
    tmp_path: Path,
) -> None:
    folder, log, prompts, text = (tmp_path / name for name in ("run", "log", "prompts", "text"))
    prompts.write_text("\nimport \n")
    text.write_text(TEXT * 100)
    sets = "--data", f"own=text:{text}", "--data", f"gone=text:{tmp_path}/gone", "--split", "all"
    async with running(SPEC, folder) as run:
        (folder / "address").write_text(run.address)
        for peer in (A, B):
            await run.join(peer)
        await play(run, 1, 2)
        options = "--every", "2", "--prompts", str(prompts), "--json", *sets
        async with following("eval", str(folder), *options, log=log) as process:
            await until_told(run, 2, "prompts")
            await play(run, 3, 4)
            await until_told(run, 4, "prompts")
            assert await process.wait_async() == 0
    told = {each.name: each for each in last_status(folder).evaluations}
    assert told.keys() == {"own", "prompts"}
    assert told["own"].round_number == 4
    assert 4 < told["own"].figures["loss"] < 7, "near ln 256: the model knows nothing"
    assert [each.prompt for each in told["prompts"].samples] == ["import "]
    lines = log.read_text().splitlines()
    printed = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(each["round"], each["name"]) for each in printed] == [
        (number, name) for number in (2, 4) for name in ("own", "prompts")
    ]
    warned = [line for line in lines if ErrorCode.DATA_UNREADABLE.label in line]
    assert len(warned) == 2, "one for each model"
    assert printed[1]["samples"] == printed[3]["samples"], "equal models say the same"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--every", "2", "--data", "text:/home/me/diary.txt"), "--data NAME=text:/home/me/diary.txt"),
        (("--every", "2", "--prompts", "nowhere"), "--prompts nowhere cannot be read"),
        (("--prompts", "nowhere"), "cannot be read"),
        (("--data", "builtin", "--data", "text:x"), "for --every"),
    ],
)
async def test_what_cannot_be_asked_or_told_is_refused_at_once(
    options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    async with running(SPEC, tmp_path / "run") as run:
        (run.folder / "address").write_text(run.address)
        found = CliRunner().invoke(app, ["eval", str(run.folder), *options])
    assert isinstance(found.exception, HetnodeError)
    assert says in str(found.exception)


async def test_a_signal_ends_a_follower_and_what_it_says_can_be_read_at_once(tmp_path: Path) -> None:
    folder, log, out = (tmp_path / name for name in ("run", "log", "out"))
    async with running(SPEC, folder) as run:
        (folder / "address").write_text(run.address)
        for peer in (A, B):
            await run.join(peer)
        await play(run, 1)
        async with following("export", str(folder), str(out), "--every", "1", log=log) as process:
            async with asyncio.timeout(60):
                while "after round 1" not in log.read_text():  # noqa: ASYNC110  another process tells
                    await asyncio.sleep(0.1)
            os.kill(process.pid, signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 20) == ExitCode.INTERRUPTED
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
async def test_export_puts_each_due_model_on_the_hub_also_after_a_failure(tmp_path: Path) -> None:
    folder, log, out = (tmp_path / name for name in ("run", "log", "out"))
    with hub_for_uploads() as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        environment["HF_HOME"] = str(tmp_path / "hub")
        hub.refusals = 1
        async with running(SPEC, folder) as run:
            (folder / "address").write_text(run.address)
            for peer in (A, B):
                await run.join(peer)
            await play(run, 1, 2)
            options = "--every", "2", "--hub", "owner/name"
            about = {"log": log, "environment": {**os.environ, **environment}}
            async with following("export", str(folder), str(out), *options, **about) as process:
                async with asyncio.timeout(60):
                    while "may not write" not in log.read_text():  # noqa: ASYNC110  another process tells
                        await asyncio.sleep(0.1)
                await play(run, 3, 4)
                assert await process.wait_async() == 0
    assert hub.commits == ["after round 4"]
    assert json.loads(hub.files["hetnode_run.json"])["round"] == 4
    assert hub.files["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert TOKEN not in log.read_text()
