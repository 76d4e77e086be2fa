"""``hetnode receipt``: what a peer has done for a run, signed by the coordinator, for anybody to verify."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from node import command_runner
from node.cli import known_runs
from node.cli.options import option
from node.command_runner import bad_option
from protocol.errors import ErrorCode, HetnodeError

if TYPE_CHECKING:
    from node.security.credentials import RunCredentials
    from protocol.trust.receipt import Receipt

receipt_app = typer.Typer(
    help="Receipts: what a peer has done for a run, signed by its coordinator.", no_args_is_help=True
)


@receipt_app.command("get")
def get(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="A run that this machine is or was in, or the folder of a node's credentials. Default: the "
            "only one.",
        ),
    ] = None,
) -> None:
    """Ask the coordinator for a receipt of what this machine's node has done so far.

    It goes to standard output; keep it in a file, which 'hetnode receipt verify' reads anywhere. The node
    need not run. When it leaves in order, it keeps a receipt by itself, in the folder 'receipts'
    below its own.
    """
    from node.net.receipts import fetch_receipt  # noqa: PLC0415
    from protocol.types import PeerId  # noqa: PLC0415

    credentials = _membership(run)
    _, data = command_runner.run(fetch_receipt(credentials, PeerId(_peer_of(credentials))))
    sys.stdout.write(data.decode())


@receipt_app.command("verify")
def verify(
    file: Annotated[Path, typer.Argument(help="The file of the receipt.")],
    coordinator: Annotated[
        str, option("Peer id of the coordinator that must have signed it, from the run's operator.")
    ] = "",
    log: Annotated[
        Path | None,
        option(
            "Folder with the coordinator's event log, or a copy, coordinator.sqlite and its .head: count the "
            "receipt again from that."
        ),
    ] = None,
) -> None:
    """Verify a receipt offline: no network and no folder of the run is needed.

    Ends with status 0 if the signature is valid, the coordinator is the given one, and the log, if given, has
    the same figures at the receipt's row; else with 3.
    """
    from node.views.receipt import proof_text, receipt_text  # noqa: PLC0415

    receipt = _opened(file)
    if coordinator and coordinator != receipt.coordinator:
        raise HetnodeError(
            ErrorCode.RECEIPT_MISMATCH,
            f"The receipt is signed by {receipt.coordinator}, not by {coordinator:.64}.",
            "Compare both ids with the one that the run's operator has told you.",
        )
    if log is None:
        _print(f"{receipt_text(receipt)}\n{proof_text(receipt, bool(coordinator))}")
    else:
        newer = _recounted(receipt, log)
        _print(f"{receipt_text(receipt)}\n\nthe log gives the same figures at that row; {newer}")


def _recounted(receipt: Receipt, log: Path) -> str:
    """How much newer the log is, which gives the same figures. Raises RECEIPT_MISMATCH."""
    from coordinator.run.state.text import counted  # noqa: PLC0415
    from coordinator.store.log_copy import opened_copy  # noqa: PLC0415
    from coordinator.store.receipts import check_receipt, mismatch  # noqa: PLC0415
    from protocol.spec.run import RunSpec  # noqa: PLC0415
    from protocol.types import PeerId  # noqa: PLC0415

    with opened_copy(log, PeerId(receipt.coordinator)) as (spec, store):
        (rows, _), row_hash = store.end, store.row_hash(receipt.log_row)
        if row_hash is None:
            raise mismatch(f"it counts up to row {receipt.log_row}, and the log has {rows} rows")
        check_receipt(receipt, RunSpec.from_json(spec), store.events(), row_hash)
    return f"it has {counted(rows - receipt.log_row, 'newer row')}"


def _opened(file: Path) -> Receipt:
    """The receipt in `file`. Raises RECEIPT_UNREADABLE, RECEIPT_FORGED."""
    from node.net.receipts import read_bounded  # noqa: PLC0415
    from protocol.trust.receipt import open_receipt  # noqa: PLC0415

    try:
        data = read_bounded(file)
    except OSError as error:
        raise HetnodeError(
            ErrorCode.RECEIPT_UNREADABLE,
            f"{file} cannot be read: {error.strerror or error}.",
            "Name the file that 'hetnode receipt get' has written.",
        ) from None
    return open_receipt(data)


def _membership(run: str | None) -> RunCredentials:
    """The one node of this machine that is meant. Raises NO_CREDENTIALS, BAD_OPTION."""
    runs = [run] if run is not None else known_runs.runs_here()
    found = [each for name in runs for each in known_runs.memberships(name)]
    if len(found) == 1 or (run is not None and found and Path(run) == found[0].folder):
        return found[0]
    if not found:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"This machine was let into no run {run!r:.80}." if run else "This machine was in no run.",
            "Name a run that a node of this user was in, or the folder of its credentials.",
        )
    names = ", ".join(str(each.folder) for each in found)
    raise bad_option(f"Several nodes of this machine are meant: {names}.", "Name the folder of one.")


def _peer_of(credentials: RunCredentials) -> str:
    """The peer in a certificate. The key file may be locked by the node that runs."""
    from ssl import PEM_cert_to_DER_cert  # noqa: PLC0415

    from cryptography.x509 import load_pem_x509_certificate  # noqa: PLC0415

    from protocol.trust.tls import certified_peer  # noqa: PLC0415

    certificate = PEM_cert_to_DER_cert(credentials.tls.certificate.decode())
    return certified_peer(certificate, load_pem_x509_certificate(credentials.tls.authority)).peer


def _print(text: str) -> None:
    Console(highlight=False).print(text, markup=False, soft_wrap=False)
