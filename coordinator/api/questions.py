"""What every member may ask a coordinator beside its status: explanations, and a receipt of its credit."""

from __future__ import annotations

import asyncio
import time

from coordinator.api.access import Access
from coordinator.api.run_records import Explain
from coordinator.store.receipts import Receipts
from protocol.server.calls import Context
from protocol.status import Explanation
from protocol.trust.names import identity_of
from protocol.wire.operator_calls import AskReceipt, AskWhy


class ExplanationDesk:
    """Answers :class:`AskWhy`, for any certificate of the run."""

    def __init__(self, access: Access, explain: Explain) -> None:
        self._access, self._explain = access, explain

    async def explain(self, call: AskWhy, context: Context) -> Explanation:
        self._access.check_member(context)
        return await self._explain(identity_of(context), call.question)


class ReceiptDesk:
    """Answers :class:`AskReceipt`, for every enrolled peer about its own credit, also when it is not live."""

    def __init__(self, access: Access, receipts: Receipts) -> None:
        self._access, self._receipts = access, receipts

    async def receipt(self, call: AskReceipt, context: Context) -> str:
        peer = self._access.peer(context, call.peer)
        self._access.check_receipt_rate(peer)
        return (await asyncio.to_thread(self._receipts.of, peer, time.time())).decode()
