"""The operator's commands, next to the coordinator's folder: ``hetnode invite`` and ``hetnode peers``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node import command_runner
from node.cli.known_runs import only_coordinator
from node.cli.options import option, seconds_of
from node.command_runner import bad_option
from node.folder import disk_errors_reported, make_usable
from node.security.credentials import load_operator
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.invite import decode
from protocol.trust.private_file import write_private
from protocol.trust.public_name import name_as_text
from protocol.types import Role
from protocol.wire import operator_calls as calls
from protocol.wire.typed_calls import Request

if TYPE_CHECKING:
    from protocol.trust.invite import Invite

Answer = TypeVar("Answer")

invite_app = typer.Typer(help="Invites: who may come into a run.", no_args_is_help=True)
peers_app = typer.Typer(help="Peers that were let in or are kept out.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    option("Folder of the coordinator, or of 'hetnode swarm up'. Default: that of the only run here."),
]


@invite_app.command("create")
def invite_create(
    uses: Annotated[int, option("How many peers it lets in.", min=1)] = 1,
    expires: Annotated[str, option("How long it lets them in: 90s, 15m, 24h, 7d.")] = "7d",
    role: Annotated[Role | None, option("The only role for those who come with it. Default: any.")] = None,
    out: Annotated[
        Path | None, option("Write it to this file, for its owner's eyes only, not to the screen.")
    ] = None,
    folder: Folder = None,
) -> None:
    """Print a new invite. Everyone who has it can join the run, so send it like a password.

    Join with 'hetnode join INVITE', or with 'hetnode join --invite-file FILE' where others can see what runs.
    """
    seconds = seconds_of(expires, "--expires")
    _check_writable(out)
    issued = _asking(folder, calls.IssueInvite(uses, seconds, role))
    if out is None:
        sys.stdout.write(f"{issued.invite}\n")
    else:
        _write_invite(out, issued.invite)
        Console().print(f"invite {issued.id} is in {out}", highlight=False, markup=False)


@invite_app.command("ensure")
def invite_ensure(
    out: Annotated[Path, option("File of the invite.")],
    uses: Annotated[int, option("How many peers a new one lets in.", min=1)] = 1000,
    expires: Annotated[str, option("How long a new one lets them in: 90s, 15m, 24h, 7d.")] = "366d",
    role: Annotated[Role | None, option("The only role for those who come with it. Default: any.")] = None,
    wait: Annotated[
        str | None, option("How long to wait for the coordinator: 90s, 15m. Default: without end.")
    ] = None,
    folder: Folder = None,
) -> None:
    """Wait for the coordinator, and leave an invite in the file --out that lets nodes in.

    An invite that is there stays if it still lets nodes in, for this role, at the coordinator's address. For
    scripts that start a swarm again and again. Where the run is finished, this says so and makes no invite.
    """
    command_runner.configure_logging()
    _check_writable(out)
    coordinator = folder or only_coordinator()
    seconds = seconds_of(expires, "--expires")
    most = None if wait is None else seconds_of(wait, "--wait")
    console = Console(highlight=False, soft_wrap=True)

    async def ensured() -> str:
        from node.net.waiting import CoordinatorWait  # noqa: PLC0415

        return await CoordinatorWait(most).answer(lambda _: _ensure(coordinator, out, uses, seconds, role))

    console.print(command_runner.run(ensured()), markup=False)


@invite_app.command("list")
def invite_list(folder: Folder = None) -> None:
    """Show the invites that were made, by name. Their secrets are kept nowhere."""
    table = Table("invite", "used", "role", "state", "peers")
    for invite in _asking(folder, calls.ListInvites()):
        table.add_row(
            invite.id,
            f"{len(invite.peers)} of {invite.uses}",
            invite.role or "any",
            _state(invite),
            "\n".join(invite.peers),
        )
    Console().print(table)


@invite_app.command("revoke")
def invite_revoke(
    invite: Annotated[str, typer.Argument(help="Its name, as 'hetnode invite list' shows it.")],
    folder: Folder = None,
) -> None:
    """Take an invite back. Peers that have come with it stay; see 'hetnode peers ban'."""
    _asking(folder, calls.WithdrawInvite(invite))


@peers_app.command("list")
def peers_list(folder: Folder = None) -> None:
    """Show every peer that was let in, has joined, or is banned."""
    table = Table("peer", "name", "invite", "role", "state")
    for peer in _asking(folder, calls.ListPeers()):
        table.add_row(peer.peer, Text(name_as_text(peer.name)), peer.invite, peer.role or "", _run_view(peer))
    Console().print(table)


@peers_app.command("ban")
def peers_ban(
    peer: Annotated[str, typer.Argument(help="Peer id, as 'hetnode peers list' shows it.")],
    reason: Annotated[str, option("Told to the peer and to the log.")] = "",
    revoke_invite: Annotated[
        bool, option("Revoke its invite, too, if that still lets others in.", "--revoke-invite")
    ] = False,
    folder: Folder = None,
) -> None:
    """Keep a peer out from now on: its streams end, and all other peers refuse it.

    Its owner can make a new identity, and come back with an invite that has uses left: revoke that, too.
    """
    invites = _asking(folder, calls.BanPeer(peer, reason, revoke_invite))
    lines = [f"{peer} is banned", *(_fate_of(invite, folder) for invite in invites)]
    Console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@peers_app.command("unname")
def peers_unname(
    peer: Annotated[str, typer.Argument(help="Peer id, as 'hetnode peers list' shows it.")],
    allow: Annotated[bool, option("Let it have a name again, from its next join on.", "--allow")] = False,
    folder: Folder = None,
) -> None:
    """Take the public name of a peer, and refuse it any other.

    The event log keeps the name, as it keeps everything.
    """
    former = _asking(folder, calls.TakeName(peer, allow))
    text = f"{peer} may have a public name" if allow else _unnamed(peer, former)
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


@peers_app.command("unban")
def peers_unban(
    peer: Annotated[str, typer.Argument(help="Peer id, as 'hetnode peers list' shows it.")],
    folder: Folder = None,
) -> None:
    """Let a banned peer come back with the certificate or the identity that it has."""
    _asking(folder, calls.UnbanPeer(peer))


async def _ensure(folder: Path, out: Path, uses: int, seconds: float, role: Role | None) -> str:
    """Make an invite unless that in `out` is good, and say what was done.

    Raises COORDINATOR_UNREACHABLE also while there is no coordinator in `folder` yet.
    """
    from node.cli.finished import has_finished  # noqa: PLC0415
    from node.net.admin_client import AdminClient  # noqa: PLC0415

    if has_finished(folder):
        return f"the run in {folder} is finished: no node needs an invite"
    try:
        address, operator = load_operator(folder)
    except HetnodeError:
        raise HetnodeError(
            ErrorCode.COORDINATOR_UNREACHABLE,
            f"No coordinator has started in {folder} yet.",
            "Start 'hetnode coordinator' with that --folder, and look at what it says.",
        ) from None
    async with AdminClient(address, operator) as client:
        kept = _invite_in(out)
        if kept is not None and kept.api == address:
            for known in await client.ask(calls.ListInvites()):
                if known.id == kept.id and known.lets_in and known.role is role:
                    return f"invite {kept.id} in {out} is still good"
        issued = await client.ask(calls.IssueInvite(uses, seconds, role))
    _write_invite(out, issued.invite)
    return f"invite {issued.id} is in {out}"


def _check_writable(out: Path | None) -> None:
    """Raise BAD_OPTION unless an invite can be written to `out`: one that is made and lost lets nodes in."""
    if out is None:
        return
    if out.is_dir():
        raise bad_option(f"--out {out} is a folder.", "Name a file.")
    make_usable(out.parent, "--out: the folder")


def _write_invite(out: Path, text: str) -> None:
    with disk_errors_reported(out):
        write_private(out, f"{text}\n".encode())


def _invite_in(file: Path) -> Invite | None:
    """The invite in `file`; None if there is no file, or another content."""
    try:
        return decode(file.read_text(errors="replace")) if file.exists() else None
    except HetnodeError:
        return None


def _fate_of(invite: calls.InviteStatus, folder: Path | None) -> str:
    """What the operator must know about an invite of a peer that was just banned."""
    if invite.revoked:
        return f"its invite {invite.id} is revoked"
    left = invite.uses - len(invite.peers)
    where = f" --folder {shlex.quote(str(folder))}" if folder else ""
    return (
        f"its invite {invite.id} still lets in {left} more, also the same person under a new identity; "
        f"revoke it with: hetnode invite revoke {invite.id}{where}"
    )


def _asking(folder: Path | None, request: Request[Answer]) -> Answer:
    from node.net.admin_client import AdminClient  # noqa: PLC0415

    address, operator = load_operator(folder or only_coordinator())

    async def call() -> Answer:
        async with AdminClient(address, operator) as client:
            return await client.ask(request)

    return command_runner.run(call())


def _unnamed(peer: str, former: str) -> str:
    what = f"is not called {name_as_text(former)} any more, and" if former else "had no public name, and"
    return f"{peer} {what} may have none"


def _run_view(peer: calls.EnrolledPeer) -> str:
    if peer.banned:
        return f"banned: {peer.reason}" if peer.reason else "banned"
    if peer.quarantined:
        return "in quarantine"
    return peer.lifecycle or "never joined"


def _state(invite: calls.InviteStatus) -> str:
    if invite.revoked:
        return "revoked"
    if invite.expires_in_seconds <= 0:
        return "expired"
    return f"good for {invite.expires_in_seconds / 3600:.1f} h" if invite.lets_in else "used up"
