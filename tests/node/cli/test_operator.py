"""The operator's commands, as they are typed, against a coordinator that runs."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from node.cli import finished
from node.cli.options import seconds_of
from node.security.identity import open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.run_files.resolve import toml_of
from protocol.trust.invite import Invite, decode
from protocol.types import Pause, PausedBy, Role
from tests.builders import keyed, spec_of
from tests.support import commands
from tests.support.coordinator_process import Running, refusal_of, running
from tests.support.hub_server import NAME, hub_with

A, B, C = (keyed(i) for i in range(3))


async def hetnode(*arguments: str) -> tuple[int, str, str]:
    """Status, standard output and standard error of the command; this process serves the coordinator."""
    result = await asyncio.to_thread(commands.hetnode, *arguments)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    # However long a command takes to start, no peer is lost meanwhile.
    async with running(spec_of(timing__lost_after=3600.0), tmp_path) as coordinator:
        (tmp_path / "address").write_text(coordinator.address)
        yield coordinator


async def test_an_invite_from_its_making_to_its_end(run: Running) -> None:
    folder = ("--folder", str(run.folder))
    status, out, errors = await hetnode(
        *("invite", "create", *folder, "--uses", "2", "--expires", "90m", "--role", "stage")
    )
    assert (status, errors) == (0, "")
    invite = decode(out)
    assert invite.pin == run.authority.pin
    assert (await run.enroll(A, invite)).role == Role.STAGE.value
    status, out, _ = await hetnode("invite", "list", *folder)
    assert status == 0
    for part in (invite.id, "1 of 2", "stage", "good for 1.5 h", A.peer[-8:]):
        assert part in out
    assert (await hetnode("invite", "revoke", invite.id, *folder))[0] == 0
    assert "revoked" in (await hetnode("invite", "list", *folder))[1]


async def test_a_peer_is_named_by_the_end_of_its_id(run: Running) -> None:
    """As other commands show it; of several, of none and of too little, nobody is banned."""
    folder = ("--folder", str(run.folder))
    await run.join(A)
    await run.join(B)
    status, _, errors = await hetnode("peers", "ban", A.peer[:7], *folder)
    assert status == 2
    assert A.peer in errors
    assert B.peer in errors
    for wrong in ("nobody", A.peer[-3:]):
        assert (await hetnode("peers", "ban", wrong, *folder))[0] == 2
    assert (await hetnode("peers", "ban", f"..{A.peer[-8:]}", *folder))[1].startswith(f"{A.peer} is banned")
    for stranger in (B.peer, C.peer, "nobody"):
        status, _, errors = await hetnode("peers", "unban", stranger, *folder)
        assert status == 2
        assert "is not banned" in errors
    assert A.peer in (await hetnode("peers", "unban", A.peer[-8:], *folder))[1]


async def test_lists_fit_a_narrow_terminal_and_programs_get_whole_ids(run: Running) -> None:
    folder = ("--folder", str(run.folder))
    invite = decode((await hetnode("invite", "create", *folder))[1])
    await run.enroll(A, invite)
    await run.join(A, name="a-name-of-many-letters")
    assert (await hetnode("peers", "ban", A.peer, "--reason", "it sends noise for hours", *folder))[0] == 0
    narrow = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    for family in ("peers", "invite"):
        listing = ("node.__main__", family, "list", *folder)
        done = await asyncio.to_thread(commands.run, *listing, environment=narrow)
        assert f"..{A.peer[-8:]}" in done.stdout, done.stdout + done.stderr
        assert invite.id in done.stdout
        assert "…" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80
    assert (await hetnode("peers", "unban", "a-name-of-many-letters", *folder))[0] == 0
    assert (await hetnode("peers", "ban", A.peer, "--reason", "it sends noise for hours", *folder))[0] == 0
    status, out, _ = await hetnode("peers", "list", "--json", *folder)
    (peer,) = json.loads(out)["peers"]
    assert (status, peer["peer"], peer["invite"], peer["banned"]) == (0, A.peer, invite.id, True)
    assert peer["reason"] == "it sends noise for hours"


async def test_a_peer_whose_owner_has_paused_it_is_not_called_gone(run: Running) -> None:
    await run.join(A)
    await run.stub(A).Leave(pb.LeaveRequest(peer=A.peer, reason="r"))
    resting = run.stub(A).Watch(pb.WatchRequest(peer=A.peer, end_only=True))
    while not (await run.status()).peers[0].rests:
        pass
    assert "paused" in (await hetnode("peers", "list", "--folder", str(run.folder)))[1]
    resting.cancel()


async def test_a_peer_is_banned_and_let_in_again(run: Running) -> None:
    folder = ("--folder", str(run.folder))
    await run.join(A)
    assert (await hetnode("peers", "ban", A.peer, "--reason", "sends noise", *folder))[0] == 0
    assert (await refusal_of(run.join(A))).code is ErrorCode.BANNED
    assert "banned: sends noise" in (await hetnode("peers", "list", *folder))[1]
    assert (await hetnode("peers", "unban", A.peer, *folder))[0] == 0
    await run.join(A)


async def test_a_ban_names_the_invite_by_which_the_peer_could_come_back(run: Running) -> None:
    folder = ("--folder", str(run.folder))
    _, out, _ = await hetnode("invite", "create", *folder, "--uses", "3")
    invite = decode(out)
    await run.enroll(A, invite)
    status, out, errors = await hetnode("peers", "ban", A.peer, *folder)
    assert (status, errors) == (0, "")
    assert f"{A.peer} is banned" in out
    advice = f"hetnode invite revoke {invite.id} --folder {run.folder}"
    assert f"its invite {invite.id} still lets in 2 more" in out
    assert advice in out
    # The same person comes back with a new key. The operator does as the output said.
    await run.enroll(B, invite)
    assert invite.id in (await hetnode("peers", "list", *folder))[1]
    assert (await hetnode(*advice.split()[1:]))[0] == 0
    assert (await refusal_of(run.enroll(C, invite))).code is ErrorCode.INVITE_REVOKED
    # Nothing is open any more, so there is nothing to say.
    assert (await hetnode("peers", "ban", B.peer, *folder))[1].split("\n") == [f"{B.peer} is banned", ""]


async def test_a_ban_can_revoke_the_invite_of_the_peer(run: Running) -> None:
    folder = ("--folder", str(run.folder))
    _, out, _ = await hetnode("invite", "create", *folder, "--uses", "3")
    invite = decode(out)
    await run.enroll(A, invite)
    status, out, errors = await hetnode("peers", "ban", A.peer, "--revoke-invite", *folder)
    assert (status, errors) == (0, "")
    assert f"its invite {invite.id} is revoked" in out
    assert (await refusal_of(run.enroll(B, invite))).code is ErrorCode.INVITE_REVOKED
    assert "revoked" in (await hetnode("invite", "list", *folder))[1]


async def test_an_invite_in_a_file_is_its_owners_alone_and_not_on_the_screen(
    run: Running, tmp_path: Path
) -> None:
    file = tmp_path / "invite"
    status, out, errors = await hetnode("invite", "create", "--folder", str(run.folder), "--out", str(file))
    assert status == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    invite = decode(file.read_text())
    assert invite.encode() not in out + errors
    assert invite.id in out


async def test_what_the_operator_cannot_have_is_refused_with_code_and_status(run: Running) -> None:
    folder = ("--folder", str(run.folder))
    status, _, errors = await hetnode("invite", "revoke", "000000000000", *folder)
    assert (status, "[invite-unknown]" in errors) == (5, True)
    status, _, errors = await hetnode("invite", "create", "--expires", "soon", *folder)
    assert (status, "[bad-option]" in errors) == (2, True)
    await run.stop()
    status, _, errors = await hetnode("invite", "list", *folder)
    assert (status, "[coordinator-unreachable]" in errors) == (4, True)
    assert f"is not running. Start it again: 'hetnode coordinator --folder {run.folder}'" in errors
    with (run.folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"event": "finished"}\n')
    status, _, errors = await hetnode("peers", "list", *folder)
    assert (status, f"[run-started] The run in {run.folder} is finished" in errors) == (5, True)


def test_what_a_silent_coordinator_waits_for_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = open_identity(tmp_path / "identity.key").lock  # the coordinator runs, and waits
    told = finished.reason_of_silence(tmp_path)
    assert told is not None
    assert "does not listen yet" in told.cause

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(finished, "TemporaryFile", full)
    told = finished.reason_of_silence(tmp_path)
    os.close(lock)
    assert told is not None
    assert "full" in told.cause


@pytest.mark.parametrize("command", [("status",), ("invite", "list", "--folder")], ids=" ".join)
async def test_a_short_command_imports_nothing_heavy(run: Running, command: tuple[str, ...]) -> None:
    rules = ("coordinator.run.state.state", "coordinator.placement", "coordinator.store")
    heavy = ("torch", "numpy", "hivemind", "cryptography", "node.runtime", *rules)
    found = await asyncio.to_thread(commands.imported_by, [*command, str(run.folder)], names=heavy)
    assert found == "[]"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("1.5m", 90.0), ("24h", 86400.0), ("7d", 604800.0)]
)
def test_durations_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert seconds_of(text, "--expires") == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "0s", "1e9d", "7 days", "99999999999d", "infd"])
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(HetnodeError) as error:
        seconds_of(text, "--expires")
    assert error.value.code is ErrorCode.BAD_OPTION


async def test_an_invite_in_a_file_is_made_once_and_again_when_it_is_of_no_use(
    run: Running, tmp_path: Path
) -> None:
    file = tmp_path / "invite"
    ensure = ("invite", "create", "--keep", "1m", "--folder", str(run.folder), "--out", str(file))

    async def ensured() -> Invite:
        status, out, errors = await hetnode(*ensure)
        assert status == 0, errors
        found = decode(file.read_text())
        assert found.id in out
        return found

    first = await ensured()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert await ensured() == first
    await run.enroll(A, first)  # it lets no other peer in
    second = await ensured()
    assert second.id != first.id
    file.write_text("no invite")
    third = await ensured()
    await hetnode("invite", "revoke", third.id, "--folder", str(run.folder))
    fourth = await ensured()
    assert len({each.id for each in (first, second, third, fourth)}) == 4
    moved = dataclasses.replace(fourth, api="192.0.2.1:7700")
    file.write_text(moved.encode())
    assert (await ensured()).api == run.address


async def test_an_invite_waits_for_its_coordinator(run: Running, tmp_path: Path) -> None:
    (run.folder / "address").rename(run.folder / "later")
    file = tmp_path / "invite"
    command = ("invite", "create", "--keep", "1m", "--folder", str(run.folder), "--out", str(file))
    waiting = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node", *command), stderr=asyncio.subprocess.PIPE
    )
    assert waiting.stderr is not None
    while b"coordinator" not in (line := await waiting.stderr.readline()):
        assert line, "it has ended"
    assert not file.exists()
    (run.folder / "later").rename(run.folder / "address")
    await waiting.communicate()
    assert waiting.returncode == 0
    assert decode(file.read_text()).api == run.address


async def test_an_invite_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "invite"))
    status, _, errors = await hetnode("invite", "create", "--keep", "1s", "--folder", str(tmp_path), *out)
    assert status != 0
    assert "coordinator-unreachable" in errors
    assert "--folder" in errors, "what the user can do"


async def test_no_invite_is_made_for_a_finished_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "finished"}\n')
    file = tmp_path / "invite"
    status, out, _ = await hetnode(
        *("invite", "create", "--keep", "1s", "--folder", str(tmp_path), "--out", str(file))
    )
    assert (status, file.exists()) == (0, False)
    assert "finished" in out


async def test_an_invite_in_a_file_of_another_role_is_replaced(run: Running, tmp_path: Path) -> None:
    file = tmp_path / "invite"
    ensure = ("invite", "create", "--keep", "1m", "--folder", str(run.folder), "--out", str(file))
    found = set()
    for role in ("stage", "stage", "replica"):
        assert (await hetnode(*ensure, "--role", role))[0] == 0
        found.add(decode(file.read_text()).id)
    assert len(found) == 2


@pytest.mark.parametrize("keep", [(), ("--keep", "1m")])
@pytest.mark.parametrize("place", ["a-file/invite", "."])
async def test_no_invite_is_made_that_cannot_be_kept(
    run: Running, tmp_path: Path, keep: tuple[str, ...], place: str
) -> None:
    (tmp_path / "a-file").touch()
    out = ("--out", str(tmp_path / place))
    status, _, errors = await hetnode("invite", "create", *keep, "--folder", str(run.folder), *out)
    assert status == 2
    assert "[bad-option]" in errors
    assert "--out" in errors
    assert "good for" not in (await hetnode("invite", "list", "--folder", str(run.folder)))[1]


async def test_a_public_name_is_listed_and_taken(run: Running) -> None:
    folder = ("--folder", str(run.folder))
    await run.join(A, name="red José")
    assert "red José" in (await hetnode("peers", "list", *folder))[1]
    assert (await run.status()).peers[0].name == "red José"
    status, out, errors = await hetnode("peers", "unname", A.peer, *folder)
    assert (status, errors) == (0, "")
    assert out == f"{A.peer} is not called red José any more, and may have none\n"
    assert not (await run.status()).peers[0].name
    assert "had no public name" in (await hetnode("peers", "unname", A.peer, *folder))[1]
    assert "may have a public name" in (await hetnode("peers", "unname", A.peer, "--allow", *folder))[1]
    status, _, errors = await hetnode("peers", "unname", B.peer, *folder)
    assert (status, "[unknown-peer]" in errors) == (5, True)


async def test_a_run_is_paused_and_goes_on(run: Running) -> None:
    await run.join(A)
    await run.join(B)
    folder = str(run.folder)
    assert await hetnode("run", "pause", folder, "--reason", "a [bold]spike[/]") == (
        0,
        "round 1 still ends, then it waits before round 2; 'hetnode run resume' ends the pause\n",
        "",
    )
    status, out, _ = await hetnode("run", "pause", folder)
    assert status == 0
    assert out.startswith("the run was paused already, by the operator: a [bold]spike[/]\n")
    assert (await run.status()).pause == Pause(2, PausedBy.OPERATOR, "a [bold]spike[/]")
    assert await hetnode("run", "resume", folder) == (0, "the run goes on\n", "")
    assert await hetnode("run", "resume", folder) == (0, "the run was not paused\n", "")


async def test_other_data_of_a_run_are_tried_before_they_are_told(
    run: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrong name would end all nodes."""
    pytest.importorskip("datasets")
    await run.join(A)
    await run.join(B)
    lines = "".join(json.dumps({"text": f"text {n} " * 50}) + "\n" for n in range(200)).encode()
    with hub_with({"data/part-0.jsonl": lines}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))

        async def changed(source: object) -> tuple[int, str, str]:
            told = f"data.source={toml_of(source)}"
            return await hetnode("run", "change", str(run.folder), "--set", told, "--from", "3")

        status, _, errors = await changed("hf:owner/none")
        assert (status, "[data-unreadable]" in errors) == (3, True)
        status, _, errors = await changed([{"name": "web", "source": "text:/x", "weight": 0}])
        assert (status, "[bad-spec]" in errors) == (2, True)
        assert not (await run.status()).changes
        web, code = (
            {"name": "web", "source": f"hf:{NAME}", "weight": 7},
            {"name": "code", "source": "text:/x"},
        )
        status, out, errors = await changed([web, code])
    assert (status, out.startswith("from round 3 on: data.source=[")) == (0, True)
    assert "nodes without --data code=text:/x, or their own copies, end at the change" in errors
    [change] = (await run.status()).changes
    assert json.loads(change.settings[0].partition("=")[2]) == [web, code]


async def test_other_data_of_a_swarm_here_are_told_by_whole_paths(run: Running, tmp_path: Path) -> None:
    """Its nodes may run in another folder than the command."""
    await run.join(A)
    await run.join(B)
    (run.folder / "nodes").mkdir()
    for name in ("web", "kept"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {n}\n" for n in range(3000)))

    async def changed(source: str) -> tuple[int, str, str]:
        told = ("--set", f"data.source={source}", "--set", "data.validation=text:kept.txt", "--from", "3")
        command = ("run", "change", str(run.folder), *told)
        done = await asyncio.to_thread(commands.hetnode, *command, folder=tmp_path)
        return done.returncode, done.stdout, done.stderr

    long = [{"name": f"s{n}", "source": f"text:{'long' * 30}{n}.txt"} for n in range(30)]
    for each in long:
        (tmp_path / each["source"].removeprefix("text:")).symlink_to(tmp_path / "web.txt")
    status, _, errors = await changed(json.dumps(long))
    assert (status, "[bad-option]" in errors, "4000 characters" in errors) == (2, True, True)
    assert (await changed("text:none.txt"))[0] == 3
    assert (await changed('[{"name": "web", "source": "text:web.txt"}]'))[0] == 0  # as messages show lists
    [change] = (await run.status()).changes
    assert [json.loads(each.partition("=")[2]) for each in change.settings] == [
        [{"name": "web", "source": f"text:{tmp_path / 'web.txt'}"}],
        f"text:{tmp_path / 'kept.txt'}",
    ]


async def test_only_the_operator_pauses_a_run(run: Running, tmp_path: Path) -> None:
    status, _, errors = await hetnode("run", "pause", str(tmp_path / "nowhere"))
    assert status == 7
    assert "[no-credentials]" in errors
    assert "Only the operator may do this" in errors


@pytest.mark.parametrize("reason", ["a\nline", "x" * 10_000])
async def test_a_reason_that_is_no_sentence_is_refused(run: Running, reason: str) -> None:
    status, _, errors = await hetnode("run", "pause", str(run.folder), "--reason", reason)
    assert status == 5
    assert "[bad-request]" in errors
    assert (await run.status()).pause is None


async def test_a_rollback_is_listed_confirmed_and_decided(run: Running) -> None:
    for peer in (A, B):
        await run.join(peer)
    for peer in (A, B):
        for stage in (0, 1):
            await run.attest(peer, stage, 0)
        await run.attest(peer, 0, 0, part="embedding")
    await run.settle(0, 1, A, B)
    await run.settle(1, 1, A, B)
    folder = str(run.folder)
    status, out, _ = await hetnode("rollback", folder)
    assert status == 0
    rows = [line.replace("│", "").split() for line in out.splitlines()]
    assert ["0", "1"] in [row[:2] for row in rows]
    status, _, errors = await hetnode("rollback", folder, "--to", "1", "--yes")
    assert status == 5
    assert "[no-rollback]" in errors
    assert "Choose another round: 0." in errors
    status, out, _ = await hetnode("rollback", folder, "--to", "0")  # nobody answers the question
    assert status != 0
    assert "This undoes 1 round (" in out
    assert (await run.status()).pause is None
    assert await hetnode("rollback", folder, "--to", "0", "--yes", "--reason", "a [red]spike[/]") == (
        0,
        "round 2 is a rollback to round 0\nthe run is paused; 'hetnode run resume' lets it go on\n",
        "",
    )
    assert (await run.status()).rounds_decided == 2
    assert "back to round 0: a [red]spike[/]" in (await run.status()).pause.reason


async def test_what_nodes_hold_after_later_rounds_is_listed_confirmed_and_adopted(run: Running) -> None:
    for peer in (A, B):
        await run.join(peer)
    for peer in (A, B):
        for stage, part in ((0, "stage"), (1, "stage"), (0, "embedding")):
            with pytest.raises(grpc.aio.AioRpcError, match="restored from an older copy"):
                await run.attest(peer, stage, 2, part=part)
    folder = str(run.folder)
    status, out, _ = await hetnode("rollback", folder)
    assert ["2", "0", "0", "yes,"] in [line.replace("│", "").split()[:4] for line in out.splitlines()]
    status, out, _ = await hetnode("rollback", folder, "--to", "2")  # nobody answers the question
    assert status != 0
    assert "they are trusted" in out
    assert await hetnode("rollback", folder, "--to", "2", "--yes") == (
        0,
        "round 3 is a rollback to round 2\nthe run goes on\n",
        "",
    )
    assert ((await run.status()).rounds_decided, (await run.status()).pause) == (3, None)
