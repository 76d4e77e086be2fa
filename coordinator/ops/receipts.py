"""Receipts of what peers have earned, and their ranks, from the history of the run."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from coordinator.api.access import AccessControl, certificate_refused
from coordinator.store.history import SqliteHistory
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.calls import Context
from protocol.spec.run import RunSpec
from protocol.trust.names import identity_of, peer_of
from protocol.trust.receipt import Receipt, encode_receipt, sign_receipt
from protocol.types import PeerId
from protocol.wire.operator_calls import AskRank, AskReceipt, Rank

_FIGURES = ("stage_tokens", "stage_rounds", "payload_bytes", "first_round", "last_round")


class Receipts:
    """Answers :class:`AskReceipt` and :class:`AskRank`, for every enrolled peer about itself, live or not.

    The key of `store`, the event log of the run, signs the receipts.
    """

    def __init__(
        self, access: AccessControl, spec: RunSpec, run: str, history: SqliteHistory, store: SqliteStore
    ) -> None:
        self._access, self._spec, self._run, self._history = access, spec, run, history
        self._store = store

    async def receipt(self, _: AskReceipt, context: Context) -> str:
        """Raises HetnodeError: NO_CREDIT, NO_HISTORY, RATE_LIMITED; CERTIFICATE_REFUSED for no peer's."""
        return await asyncio.to_thread(self._made, self._caller(context), int(time.time()))

    async def rank(self, _: AskRank, context: Context) -> Rank:
        """Raises as :meth:`receipt`."""
        return await asyncio.to_thread(self._rank_of, self._caller(context))

    def _caller(self, context: Context) -> PeerId:
        if (peer := peer_of(identity_of(context))) is None:
            raise certificate_refused("A receipt was asked for with the certificate of no peer")
        self._access.check_rate(peer, "asks for receipts")
        return peer

    def _rank_of(self, peer: PeerId) -> Rank:
        self._history.catch_up()
        _, _, credit = self._history.credit(peer)
        if credit is None or not credit.stage_tokens:
            raise _no_credit(peer)
        return Rank(*self._history.rank(credit))

    def _made(self, peer: PeerId, now: int) -> str:
        self._history.catch_up()
        row, figures = _figures(self._history, peer)
        row_hash = self._store.row_hash(row)
        if not figures or row_hash is None:
            raise _no_credit(peer)
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
    figures = {"name": name} | {each: getattr(credit, each) for each in _FIGURES}
    if credit.owner:
        sums = history.summed(credit)
        figures |= {"owner": credit.owner, "owner_nodes": sums.nodes, "owner_stage_tokens": sums.stage_tokens}
    return row, figures


def _no_credit(peer: PeerId) -> HetnodeError:
    return HetnodeError(
        ErrorCode.NO_CREDIT,
        f"No payload of peer {peer} has counted in this run yet.",
        "Ask again after a round in which it has trained.",
    )
