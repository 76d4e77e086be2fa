"""What a volunteer is told of a run before its machine takes part, and the question at a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from node.folder import agreed_spec
from node.net.joining import Agreement, RunOffer
from node.net.waiting import CoordinatorWait
from node.security.identity import open_identity
from node.views.offer import offer_lines
from protocol.errors import ExitCode
from protocol.run_files.presets import PRESETS
from protocol.run_files.resolve import resolve
from protocol.spec.change import changed
from protocol.spec.run import RunSpec
from protocol.types import Capacity, Role, RunChange
from protocol.wire.operator_calls import IssueInvite
from tests.builders import spec_of
from tests.support.certificates import authority, enrolled
from tests.support.commands import PLAIN
from tests.support.coordinator_process import Running, running

ABLE = Capacity("cpu", 8 * 10**9, 2)
IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def offer(role: Role | None = None, **settings: object) -> RunOffer:
    preset = str(settings.pop("preset", "tiny"))
    spec = resolve(preset, overrides={key.replace("__", "."): each for key, each in settings.items()})
    return RunOffer("tiny-1-2", spec, role, ABLE, "example.org:7700", bytes(range(32)), 60.0)


def told(of: RunOffer, *own: str) -> str:
    return "\n".join(offer_lines(of, Path("/here"), own))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("role", [None, Role.STAGE, Role.REPLICA])
@pytest.mark.parametrize("exchange", ["gathered", "reduced"])
def test_every_run_can_be_told(preset: str, role: Role | None, exchange: str) -> None:
    text = told(offer(role, preset=preset, outer__exchange=exchange))
    assert bytes(range(32)).hex() in text
    assert "example.org:7700" in text
    for what in ("memory", "disk", "traffic"):
        line = next(line for line in text.splitlines() if line.startswith(f"- {what}: "))
        assert ("the whole model" in line, "one stage" in line) == (
            role is not Role.STAGE,
            role is not Role.REPLICA,
        )
        assert "nan" not in line
        assert " 0 B" not in line


def test_a_machine_with_too_little_memory_is_told_what_to_do() -> None:
    assert "too little" not in told(offer())
    text = told(replace(offer(), capacity=Capacity("cpu", 10**5, 2)))
    assert "of the 100.0 kB that it may use on cpu: too little" in text
    assert "ask the operator" in text


def test_the_largest_run_can_be_told_soon() -> None:
    """The sizes are those of somebody else."""
    huge = {"swarm__replicas": 10_000, "swarm__pipelines": 10_000, "model__layers": 512, "swarm__stages": 512}
    assert "TB for the whole model" in told(offer(**huge, model__width=2**15, model__heads=256))


def test_where_the_data_comes_from() -> None:
    assert "this machine's interpreter" in told(offer())
    assert "Hugging Face Hub" in told(offer(data__source="hf:owner/name"))
    assert "nothing here is read" in told(offer(data__source="text:/home/ada/.ssh/id_ed25519"))
    assert "what you have named, text:/mine" in told(offer(data__source="text:/x"), "text:/mine")
    assert "\x1b" not in told(offer(data__source="text:\x1b]0;x\x07"))


def test_where_each_source_of_a_mixture_comes_from() -> None:
    mixture = [{"name": "web", "source": "hf:owner/name"}, {"name": "code", "source": "text:/code"}]
    of = offer(data__source=mixture, data__validation="text:/other")
    lines = [line for line in told(of, "web=text:/mine").splitlines() if line.startswith("- data: ")]
    assert len(lines) == 3
    assert "what you have named, text:/mine" in lines[0]
    assert "none with --data code=, so nothing here is read" in lines[1]
    assert "none with --data validation=" in lines[2]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    (tmp_path / "coordinator").mkdir()
    async with running(spec_of(), tmp_path / "coordinator") as coordinator:
        yield coordinator


async def test_a_run_is_told_once_and_again_with_another_specification(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "peer.key")
    credentials = enrolled(identity, authority().run_id(spec_of()))
    asked: list[RunOffer] = []
    answers = [RuntimeError("no"), None, None]

    async def ask(told_of: RunOffer) -> None:
        asked.append(told_of)
        if (error := answers.pop(0)) is not None:
            raise error

    agreement = Agreement(tmp_path, ask, None, ABLE, CoordinatorWait(None))
    with pytest.raises(RuntimeError):
        await agreement.on(credentials, spec_of())
    assert agreed_spec(tmp_path, credentials.run) == ""
    for _ in range(3):
        await agreement.on(credentials, spec_of())
    assert len(asked) == 2
    assert agreed_spec(tmp_path, credentials.run) == spec_of().hash
    await agreement.on(credentials, spec_of(rounds=7))
    assert [each.spec.rounds for each in asked] == [spec_of().rounds] * 2 + [7]
    await replace(agreement, ask=None).on(replace(credentials, run="another"), spec_of())
    assert agreed_spec(tmp_path, credentials.run) == spec_of(rounds=7).hash


async def test_a_run_that_was_changed_is_told_once_as_it_is_now(tmp_path: Path) -> None:
    identity, first = open_identity(tmp_path / "peer.key"), spec_of()
    credentials = enrolled(identity, authority().run_id(first))
    asked: list[RunSpec] = []

    async def ask(told_of: RunOffer) -> None:
        asked.append(told_of.spec)

    change = RunChange(2, ("rounds=9", 'data.source="text:/x"', "inner.steps=7"), "", first_sample=40)
    now = changed(first, [change])
    agreement = Agreement(tmp_path, ask, None, ABLE, CoordinatorWait(None))
    await agreement.on(credentials, now)
    await agreement.on(credentials, first, now)
    await agreement.on(credentials, first)  # the next start
    assert asked == [now]
    # What a run cannot change is another run, whatever the coordinator says of its begin.
    other = spec_of(seed=8)
    await agreement.on(credentials, other, now.model_copy(update={"began_as": other.hash}))
    assert asked == [now, other]


async def start(run: Running, folder: Path, *options: str) -> asyncio.subprocess.Process:
    """``hetnode join`` at a terminal of its own."""
    command = [sys.executable, "-m", "node", "join", "--invite-file", str(folder / "invite")]
    command += ["--folder", str(folder / "node"), "--identity", str(folder / "peer.key"), "--no-measure"]
    command += ["--listen", "127.0.0.1:0", "--advertise", "127.0.0.1", "--device", "cpu", *options]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", IN_A_TERMINAL, *command),
        env={**os.environ, **PLAIN, "TERM": "xterm"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def until(process: asyncio.subprocess.Process, text: str) -> str:
    """What the process has written until it wrote `text`."""
    assert process.stdout is not None
    written = ""
    async with asyncio.timeout(60):
        while text not in written:
            more = (await process.stdout.read(4096)).decode(errors="replace")
            assert more, written
            written += more
    return written


async def test_a_person_at_a_terminal_is_asked_once(run: Running, tmp_path: Path) -> None:
    (tmp_path / "invite").write_text((await run.ask(IssueInvite(1, 600.0))).invite)
    refusing = await start(run, tmp_path)
    assert refusing.stdin is not None
    written = await until(refusing, "Take part? [y/N]")
    assert "fingerprint" in written
    refusing.stdin.write(b"n\n")
    await until(refusing, "takes no part")
    assert await refusing.wait() == ExitCode.INTERRUPTED
    assert not (await run.status()).peers
    agreeing = await start(run, tmp_path)
    assert agreeing.stdin is not None
    await until(agreeing, "Take part? [y/N]")
    agreeing.stdin.write(b"y\n")
    await until(agreeing, "joined run")
    agreeing.stdin.write(b"\x03")
    await agreeing.communicate()
    again = await start(run, tmp_path)
    assert "Take part?" not in await until(again, "joined run")
    assert again.stdin is not None
    again.stdin.write(b"\x03")
    await again.communicate()
