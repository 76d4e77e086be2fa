"""Receipts of what peers have earned: from the history of the run, and counted again from its event log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coordinator.api.access import AccessControl, certificate_refused
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.store.history import SqliteHistory
from coordinator.store.history_writer import write_events
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.calls import Context
from protocol.spec.run import RunSpec
from protocol.trust.names import identity_of, peer_of
from protocol.trust.receipt import Receipt, encode_receipt, sign_receipt
from protocol.types import PeerId
from protocol.wire.operator_calls import AskReceipt

_FIGURES = ("stage_tokens", "stage_rounds", "payload_bytes", "first_round", "last_round")


class Receipts:
    """Answers :class:`AskReceipt`, for every enrolled peer about its own credit, also when it is not live.

    The key of `store`, the event log of the run, signs the receipts.
    """

    def __init__(
        self, access: AccessControl, spec: RunSpec, run: str, history: SqliteHistory, store: SqliteStore
    ) -> None:
        self._access, self._spec, self._run, self._history = access, spec, run, history
        self._store = store

    async def receipt(self, _: AskReceipt, context: Context) -> str:
        """Raises HetnodeError: NO_CREDIT, NO_HISTORY, RATE_LIMITED; CERTIFICATE_REFUSED for no peer's."""
        if (peer := peer_of(identity_of(context))) is None:
            raise certificate_refused("A receipt was asked for with the certificate of no peer")
        self._access.check_rate(peer, "asks for receipts")
        return await asyncio.to_thread(self._made, peer, int(time.time()))

    def _made(self, peer: PeerId, now: int) -> str:
        self._history.catch_up()
        row, figures = _figures(self._history, peer)
        row_hash = self._store.row_hash(row)
        if not figures or row_hash is None:
            raise HetnodeError(
                ErrorCode.NO_CREDIT,
                f"No payload of peer {peer} has counted in this run yet.",
                "Ask again after a round in which it has trained.",
            )
        receipt = Receipt(
            run=self._run,
            spec_hash=self._spec.hash,
            peer=peer,
            log_row=row,
            log_hash=row_hash.hex(),
            time=now,
            coordinator=self._store.coordinator or "",
            **figures,
        )
        return encode_receipt(sign_receipt(receipt, self._store.sign)).decode()


def _figures(history: SqliteHistory, peer: PeerId) -> tuple[int, dict[str, Any]]:
    """The row up to which the history counts, and the fields of a receipt for `peer`; none without credit."""
    row, name, credit = history.credit(peer)
    if credit is None or not credit.stage_rounds:
        return row, {}
    return row, {"name": name} | {each: getattr(credit, each) for each in _FIGURES}


def check_receipt(receipt: Receipt, spec: RunSpec, log: Iterable[Event], row_hash: bytes | None) -> None:
    """Count `receipt` again from the `log` of a run of `spec`, whose row `receipt.log_row` has `row_hash`.

    Raises HetnodeError RECEIPT_MISMATCH, which names what differs.
    """
    if spec.hash != receipt.spec_hash:
        raise _mismatch(f"the log is of the specification {spec.hash[:12]}, not {receipt.spec_hash[:12]}")
    if row_hash is None or row_hash.hex() != receipt.log_hash:
        raise _mismatch(f"row {receipt.log_row} of the log is another one than that of the receipt")
    with TemporaryDirectory(prefix="hetnode-") as scratch:
        path, state = Path(scratch, "history.sqlite"), State(spec, receipt.run)
        write_events(path, state, enumerate(islice(log, receipt.log_row), start=1))
        _, figures = _figures(SqliteHistory(path), PeerId(receipt.peer))
    for name in ("name", *_FIGURES):
        if (said := getattr(receipt, name)) != (value := figures.get(name, 0)):
            what = f"{name.replace('_', ' ')} {value!r}, not {said!r}"
            raise _mismatch(f"up to row {receipt.log_row}, the log gives this peer {what}")


def _mismatch(why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RECEIPT_MISMATCH,
        f"The receipt does not belong there: {why}.",
        "Compare run and coordinator: the operator may have restored an older copy of the log, or signs what "
        "the log does not say.",
    )
