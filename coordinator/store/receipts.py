"""Makes receipts of what peers have earned from the history, and counts them again from the event log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from coordinator.run.state.apply import apply
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.store.history import SqliteHistory
from coordinator.store.history_fold import changes_of
from coordinator.store.history_tables import PeerTotals
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.receipt import Receipt, encode_receipt, sign_receipt
from protocol.types import PeerId


@dataclass(frozen=True)
class Receipts:
    """Signs receipts of one run with the key of `store`, each up to the newest event in the history."""

    spec: RunSpec
    run: str
    history: SqliteHistory
    store: SqliteStore

    def of(self, peer: PeerId, time: float) -> bytes:
        """The file of a receipt for `peer` at Unix `time`. Waits for a disk. Raises NO_CREDIT, NO_HISTORY."""
        self.history.catch_up()
        row, name, credit = self.history.credit(peer)
        row_hash = self.store.row_hash(row)
        if credit is None or not credit.stage_rounds or row_hash is None:
            raise HetnodeError(
                ErrorCode.NO_CREDIT,
                f"No payload of peer {peer} has counted in this run yet.",
                "Ask again after a round in which it has trained.",
            )
        figures = {each: getattr(credit, each) for each in _FIGURES}
        about = {"run": self.run, "spec_hash": self.spec.hash, "peer": peer, "name": name}
        at = {"log_row": row, "log_hash": row_hash.hex(), "time": int(time)}
        receipt = Receipt(**about, **figures, **at, coordinator=self.store.coordinator)  # type: ignore[arg-type]
        return encode_receipt(sign_receipt(receipt, self.store.sign))


_SUMS = ("stage_tokens", "stage_rounds", "payload_bytes")
_FIGURES = (*_SUMS, "first_round", "last_round")


def check_receipt(receipt: Receipt, spec: RunSpec, log: Iterable[Event], row_hash: bytes) -> None:
    """Count `receipt` again from the `log` of a run of `spec`, whose row `receipt.log_row` has `row_hash`.

    Reads the log up to that row, one event after the other.

    Raises HetnodeError RECEIPT_MISMATCH, which names what differs.
    """
    if spec.hash != receipt.spec_hash:
        raise mismatch(f"the log is of the specification {spec.hash[:12]}, not {receipt.spec_hash[:12]}")
    if row_hash.hex() != receipt.log_hash:
        raise mismatch(f"row {receipt.log_row} of the log is another one than that of the receipt")
    for name, value in _counted(receipt, spec, log).items():
        if (said := getattr(receipt, name)) != value:
            what = f"{name.replace('_', ' ')} {value!r}, not {said!r}"
            raise mismatch(f"up to row {receipt.log_row}, the log gives this peer {what}")


def _counted(receipt: Receipt, spec: RunSpec, log: Iterable[Event]) -> dict[str, int | str]:
    state, sums, rounds, name = State(spec, receipt.run), Counter[str](), [0], ""
    for sequence, event in enumerate(islice(log, receipt.log_row), start=1):
        before, state = state, apply(state, event)
        for change in changes_of(sequence, event, before, state):
            if isinstance(change, PeerTotals) and change.peer == receipt.peer:
                sums.update({each: getattr(change, each) for each in _SUMS})
                rounds += [change.last_round] if change.last_round else []
                name = name if change.name is None else change.name
    first = rounds[1] if len(rounds) > 1 else 0
    return {
        **{each: sums[each] for each in _SUMS},
        "first_round": first,
        "last_round": rounds[-1],
        "name": name,
    }


def mismatch(why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RECEIPT_MISMATCH,
        f"The receipt does not belong there: {why}.",
        "Compare run and coordinator: the operator may have restored an older copy of the log, or signs what "
        "the log does not say.",
    )
