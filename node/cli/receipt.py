"""``hetnode receipt``: what a peer has done for a run, signed by the coordinator, for anybody to verify."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node import command_runner
from node.cli.options import option
from node.cli.output import say
from node.command_runner import TerminalConsole, bad_option
from node.here import known_runs
from node.security import credentials
from protocol.errors import ErrorCode, HetnodeError

if TYPE_CHECKING:
    from node.security.credentials import RunCredentials
    from protocol.trust.receipt import Receipt


def receipt(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FILE",
            help="A run that this machine is or was in, a node here by its name, or the folder of its "
            "credentials; or the file of a receipt, to verify it. Default: the only run.",
        ),
    ] = None,
    coordinator: Annotated[
        str, option("Peer id of the coordinator that must have signed a file, from the run's operator.")
    ] = "",
) -> None:
    """Ask the coordinator for a receipt of what this machine's node has done so far; or verify one.

    The node need not run. When it leaves in order, it keeps a receipt by itself, in the folder 'receipts'
    below its own. A file is verified offline: it ends with status 0 if the signature is valid and the
    coordinator is the given one, else with 3.
    """
    if run is not None and Path(run).is_file():
        _verify(Path(run), coordinator)
    elif coordinator:
        raise bad_option("--coordinator is for the file of a receipt.", "Name that file.")
    else:
        from node.net.receipts import fetch_receipt  # noqa: PLC0415

        _, data = command_runner.run(fetch_receipt(_membership(run)))
        say(data.decode(), end="")


def _verify(file: Path, coordinator: str) -> None:
    found = _opened(file)
    if coordinator and coordinator != found.coordinator:
        raise HetnodeError(
            ErrorCode.RECEIPT_MISMATCH,
            f"The receipt is signed by {found.coordinator}, not by {coordinator:.64}.",
            "Compare both ids with the one that the run's operator has told you.",
        )
    _print(f"{_text(found)}\n\n{_proof(bool(coordinator))}")


def _opened(file: Path) -> Receipt:
    """The receipt in `file`. Raises RECEIPT_UNREADABLE, RECEIPT_FORGED."""
    from protocol.trust.receipt import open_receipt, read_bounded  # noqa: PLC0415

    try:
        return open_receipt(read_bounded(file))
    except OSError as error:
        raise HetnodeError(
            ErrorCode.RECEIPT_UNREADABLE,
            f"{file} cannot be read: {error.strerror or error}.",
            "Name the file that 'hetnode receipt' has written.",
        ) from None


def _membership(run: str | None) -> RunCredentials:
    """The one node of this machine that is meant. Raises NO_CREDENTIALS, BAD_OPTION."""
    from node.here.nodes import chosen, nodes_here  # noqa: PLC0415

    runs = known_runs.runs_here() if run is None else []
    known = [node for node in nodes_here() if run is not None or node.run in runs]
    node = known[0] if run is None and len(known) == 1 else chosen(run, known)
    if node.credentials is None:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"The credentials of the node in {node.folder} are not among this user's.",
            "Name the folder of its credentials.",
        )
    return credentials.load(node.credentials)


def _text(receipt: Receipt) -> str:
    """What the receipt says."""
    from node.views.text import plain  # noqa: PLC0415
    from protocol.trust.public_name import shown_peer  # noqa: PLC0415

    rounds = f"rounds {receipt.first_round} to {receipt.last_round}"
    lines = {
        "peer": receipt.peer,
        "public name": shown_peer(receipt.peer, receipt.name) if receipt.name else "",
        "owner": _owner_text(receipt) if receipt.owner else "",
        "run": plain(receipt.run),
        "specification": receipt.spec_hash,
        "stage tokens": f"{receipt.stage_tokens:,}",
        "stage rounds": f"{receipt.stage_rounds:,} committed, in {rounds}",
        "payload bytes": f"{receipt.payload_bytes:,}",
        "counted up to": f"row {receipt.log_row} of the event log, hash {receipt.log_hash[:16]}",
        "signed": time.strftime("%Y-%m-%d %H:%M:%S UTC, by the coordinator's clock", _utc(receipt.time)),
        "coordinator": receipt.coordinator,
    }
    return "\n".join(f"{name:<15}{text}" for name, text in lines.items() if text)


def _owner_text(receipt: Receipt) -> str:
    nodes = f"{receipt.owner_nodes:,} node{'s' * (receipt.owner_nodes != 1)}"
    return f"{receipt.owner}, with {receipt.owner_stage_tokens:,} stage tokens of {nodes}"


def _utc(seconds: int) -> time.struct_time:
    return time.gmtime(min(seconds, 2**35))  # a receipt may claim any time


def _proof(is_known: bool) -> str:
    """What a valid signature proves and what it does not. `is_known`: the coordinator is the one meant."""
    meant = (
        "That is the coordinator which you meant."
        if is_known
        else "Whether that is the coordinator of the run which you mean, the file cannot tell: compare the "
        "id with one that you have from its operator, or give it with --coordinator."
    )
    return (
        "valid: the holder of the coordinator's key above has signed all of this, and nothing was changed. "
        f"{meant}\n\nNot proved: that the coordinator has counted honestly. Nor does it say who is behind "
        "the peer or its name, or what was earned since."
    )


def _print(text: str) -> None:
    TerminalConsole(highlight=False).print(text, markup=False, soft_wrap=False)
