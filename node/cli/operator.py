"""The operator's commands for who takes part: ``hetnode invite`` and ``peers``."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Column, Table
from rich.text import Text

from coordinator.base.phrases import short
from node import command_runner
from node.cli.family import CommandFamily
from node.cli.options import option, seconds_of
from node.cli.output import say
from node.cli.run import answer_of
from node.command_runner import TerminalConsole, bad_option
from node.folder import disk_errors_reported, make_usable
from node.here.known_runs import only_coordinator
from node.security.credentials import load_operator
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.invite import decode
from protocol.trust.private_file import write_private
from protocol.trust.public_name import name_as_text
from protocol.trust.short_id import named_by
from protocol.types import PeerId, Role
from protocol.wire import operator_calls as calls
from protocol.wire.typed_calls import Request

if TYPE_CHECKING:
    from protocol.trust.invite import Invite

Answer = TypeVar("Answer")

_ID_LETTERS = 52  # of each peer id

invite_app = typer.Typer(cls=CommandFamily, help="Invites: who may come into a run.", no_args_is_help=True)
peers_app = typer.Typer(
    cls=CommandFamily, help="Peers that were let in or are kept out.", no_args_is_help=True
)
Peer = Annotated[
    str,
    typer.Argument(
        help="Peer id, its beginning or end as in 'hetnode status', or a public name that one peer has."
    ),
]


@invite_app.callback()
@peers_app.callback()
def _coordinator(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        option(
            "Folder of the coordinator, or of 'hetnode swarm up'; also behind the name of the command. "
            "Default: that of the only run here."
        ),
    ] = None,
) -> None:
    context.obj = folder


@invite_app.command("create")
def invite_create(
    context: typer.Context,
    uses: Annotated[int, option("How many peers it lets in.", min=1)] = 1,
    expires: Annotated[str, option("How long it lets them in: 90s, 15m, 24h, 7d.")] = "7d",
    role: Annotated[Role | None, option("The only role for those who come with it. Default: any.")] = None,
    out: Annotated[
        Path | None, option("Write it to this file, for its owner's eyes only, not to the screen.")
    ] = None,
    keep: Annotated[
        str | None,
        option(
            "Wait so long for the coordinator, such as 15m, and make no invite if that in --out still lets "
            "nodes in, for this role, or if the run is finished. For scripts that start a swarm again and "
            "again.",
            metavar="DURATION",
        ),
    ] = None,
) -> None:
    """Print a new invite. Everyone who has it can join the run, so send it like a password.

    Join with 'hetnode join INVITE', or with 'hetnode join --invite-file FILE' where others can see what runs.
    """
    seconds = seconds_of(expires, "--expires")
    _check_writable(out)
    console = TerminalConsole(highlight=False, soft_wrap=True)
    if keep is not None:
        if out is None:
            raise bad_option("--keep looks at the invite in a file.", "Give --out FILE, too.")
        command_runner.configure_logging()
        wait, wanted = seconds_of(keep, "--keep"), calls.IssueInvite(uses, seconds, role)
        text = command_runner.run(_kept(context.obj or only_coordinator(), out, wanted, wait))
        console.print(text, markup=False)
        return
    issued = _asking(context, calls.IssueInvite(uses, seconds, role))
    if out is None:
        say(issued.invite)
    else:
        _write_invite(out, issued.invite)
        console.print(f"invite {issued.id} is in {out}", markup=False)


@invite_app.command("list")
def invite_list(context: typer.Context) -> None:
    """Show the invites that were made, by name. Their secrets are kept nowhere."""
    table = Table(Column("invite", no_wrap=True), "used", "role", "state", "peers")
    for invite in _asking(context, calls.ListInvites()):
        table.add_row(
            invite.id,
            f"{len(invite.peers)} of {invite.uses}",
            invite.role or "any",
            _state(invite),
            "\n".join(map(short, map(PeerId, invite.peers))),
        )
    TerminalConsole().print(table)


@invite_app.command("revoke")
def invite_revoke(
    context: typer.Context,
    invite: Annotated[str, typer.Argument(help="Its name, as 'hetnode invite list' shows it.")],
) -> None:
    """Take an invite back. Peers that have come with it stay; see 'hetnode peers ban'."""
    _asking(context, calls.WithdrawInvite(invite))


@peers_app.command("list")
def peers_list(
    context: typer.Context,
    as_json: Annotated[bool, option("Print one JSON object instead, for programs.", "--json")] = False,
) -> None:
    """Show all peers that came or are banned. Whole ids: --json."""
    if as_json:
        say(json.dumps({"peers": [asdict(peer) for peer in _asking(context, calls.ListPeers())]}))
        return
    table = Table(
        Column("peer", no_wrap=True),
        Column("name", overflow="fold"),
        Column("invite", no_wrap=True),
        "role",
        "state",
    )
    for peer in _asking(context, calls.ListPeers()):
        table.add_row(
            short(PeerId(peer.peer)),
            Text(name_as_text(peer.name)),
            peer.invite,
            peer.role or "",
            _run_view(peer),
        )
    TerminalConsole().print(table)


@peers_app.command("ban")
def peers_ban(
    context: typer.Context,
    peer: Peer,
    reason: Annotated[str, option("Told to the peer and to the log.")] = "",
    revoke_invite: Annotated[
        bool, option("Revoke its invite, too, if that still lets others in.", "--revoke-invite")
    ] = False,
) -> None:
    """Keep a peer out from now on: its streams end, and all other peers refuse it.

    Its owner can make a new identity, and come back with an invite that has uses left: revoke that, too.
    """
    peer = _peer_named(context, peer)
    invites = _asking(context, calls.BanPeer(peer, reason, revoke_invite))
    lines = [f"{peer} is banned", *(_fate_of(invite, context.obj) for invite in invites)]
    TerminalConsole().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@peers_app.command("unname")
def peers_unname(
    context: typer.Context,
    peer: Peer,
    allow: Annotated[bool, option("Let it have a name again, from its next join on.", "--allow")] = False,
) -> None:
    """Take the public name of a peer, and refuse it any other.

    The event log keeps the name, as it keeps everything.
    """
    peer = _peer_named(context, peer)
    former = _asking(context, calls.TakeName(peer, allow))
    text = f"{peer} may have a public name" if allow else _unnamed(peer, former)
    TerminalConsole().print(text, highlight=False, markup=False, soft_wrap=True)


@peers_app.command("unban")
def peers_unban(
    context: typer.Context,
    peer: Peer,
) -> None:
    """Let a banned peer come back with the certificate or the identity that it has."""
    peer = _peer_named(context, peer, banned=True)
    _asking(context, calls.UnbanPeer(peer))
    TerminalConsole().print(f"{peer} may come back", highlight=False, markup=False, soft_wrap=True)


async def _kept(folder: Path, out: Path, wanted: calls.IssueInvite, wait: float) -> str:
    """Make the invite `wanted` unless that in `out` is as good, and say what was done.

    Raises COORDINATOR_UNREACHABLE after `wait` seconds.
    """
    from node.cli.finished import has_finished  # noqa: PLC0415
    from node.net.coordinator_channel import CoordinatorChannel  # noqa: PLC0415
    from node.net.waiting import CoordinatorWait  # noqa: PLC0415

    async def once(_: float) -> str:
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
        async with CoordinatorChannel(address, operator) as client:
            former = _invite_in(out)
            if former is not None and former.api == address:
                for known in await client.ask(calls.ListInvites()):
                    if known.id == former.id and known.lets_in and known.role is wanted.role:
                        return f"invite {former.id} in {out} is still good"
            issued = await client.ask(wanted)
        _write_invite(out, issued.invite)
        return f"invite {issued.id} is in {out}"

    return await CoordinatorWait(wait).answer(once)


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


def _peer_named(context: typer.Context, text: str, banned: bool = False) -> str:
    """The peer of the run that `text` means; of those that are banned, and no other, if `banned` is set.

    Raises BAD_OPTION. Another id is returned as it is: a peer can be banned before it comes.
    """
    peers = [each for each in _asking(context, calls.ListPeers()) if each.banned or not banned]
    known, called = [each.peer for each in peers], [each.peer for each in peers if each.name == text]
    peer = called[0] if len(called) == 1 else named_by(text, known, "peers")
    if peer not in known and (banned or len(peer) < _ID_LETTERS):
        raise bad_option(
            f"{text!r:.80} is not {'banned' if banned else 'a peer of this run'}.",
            "See 'peers list'.",
        )
    return peer


def _asking(context: typer.Context, request: Request[Answer]) -> Answer:
    """The answer to `request` of the operator whose folder ``--folder`` names."""
    return answer_of(context.obj or only_coordinator(), request)


def _unnamed(peer: str, former: str) -> str:
    what = f"is not called {name_as_text(former)} any more, and" if former else "had no public name, and"
    return f"{peer} {what} may have none"


def _run_view(peer: calls.EnrolledPeer) -> str:
    if peer.banned:
        return f"banned: {peer.reason}" if peer.reason else "banned"
    if peer.quarantined:
        return "in quarantine"
    return "paused" if peer.rests else peer.lifecycle or "never joined"


def _state(invite: calls.InviteStatus) -> str:
    if invite.revoked:
        return "revoked"
    if invite.expires_in_seconds <= 0:
        return "expired"
    return f"good for {invite.expires_in_seconds / 3600:.1f} h" if invite.lets_in else "used up"
