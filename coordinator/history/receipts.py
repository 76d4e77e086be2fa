"""Makes receipts of what peers have earned, and counts them again from the event log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice

from coordinator.history.ledger import Ledger
from coordinator.state.events import Event
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.envelope import Signer
from protocol.trust.receipt import Receipt, encode_receipt, sign_receipt
from protocol.types import PeerId


class Receipts:
    """Signs receipts of one run, each up to the newest stored event.

    Args:
        spec, run: of the run, the latter its id.
        ledger: of the events so far; later ones come through :meth:`record`.
        log_end: rows of the log and its newest row hash. It is read here and in :meth:`record`, when it
            belongs to the events that are recorded: at other times a thread may be appending.
        coordinator: peer id of the key of `sign`.
    """

    def __init__(
        self,
        spec: RunSpec,
        run: str,
        ledger: Ledger,
        log_end: Callable[[], tuple[int, bytes]],
        coordinator: PeerId,
        sign: Signer,
    ) -> None:
        self._log_end, self._end = log_end, log_end()
        self.ledger = ledger
        self._spec_hash, self._run = spec.hash, run
        self._coordinator, self._sign = coordinator, sign

    def record(self, event: Event) -> None:
        """Count `event`, which has just been stored with its whole batch."""
        self.ledger.record(event)
        self._end = self._log_end()

    def of(self, peer: PeerId, time: float) -> bytes:
        """The file of a receipt for `peer` at Unix `time`. Raises NO_CREDIT."""
        rows, row_hash = self._end
        assert rows == self.ledger.rows, "a receipt would name a row up to which it does not count"
        earned = self.ledger.of(peer)
        if not earned.stage_rounds:
            raise HetnodeError(
                ErrorCode.NO_CREDIT,
                f"No payload of peer {peer} has counted in this run yet.",
                "Ask again after a round in which it has trained.",
            )
        unsigned = Receipt(
            run=self._run,
            spec_hash=self._spec_hash,
            peer=peer,
            name=self.ledger.name_of(peer),
            **asdict(earned),
            log_row=rows,
            log_hash=row_hash.hex(),
            time=int(time),
            coordinator=self._coordinator,
        )
        return encode_receipt(sign_receipt(unsigned, self._sign))


def check_receipt(receipt: Receipt, spec: RunSpec, log: Iterable[Event], row_hash: bytes) -> None:
    """Count `receipt` again from the `log` of a run of `spec`, whose row `receipt.log_row` has `row_hash`.

    Reads the log up to that row, one event after the other.

    Raises HetnodeError RECEIPT_MISMATCH, which names what differs.
    """
    if spec.hash != receipt.spec_hash:
        raise mismatch(f"the log is of the specification {spec.hash[:12]}, not {receipt.spec_hash[:12]}")
    if row_hash.hex() != receipt.log_hash:
        raise mismatch(f"row {receipt.log_row} of the log is another one than that of the receipt")
    ledger = Ledger(spec)
    for event in islice(log, receipt.log_row):
        ledger.record(event)
    peer = PeerId(receipt.peer)
    counted = asdict(ledger.of(peer)) | {"name": ledger.name_of(peer)}
    for name, value in counted.items():
        if (said := getattr(receipt, name)) != value:
            what = f"{name.replace('_', ' ')} {value!r}, not {said!r}"
            raise mismatch(f"up to row {receipt.log_row}, the log gives this peer {what}")


def mismatch(why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RECEIPT_MISMATCH,
        f"The receipt does not belong there: {why}.",
        "Compare run and coordinator: the operator may have restored an older copy of the log, or signs what "
        "the log does not say.",
    )
