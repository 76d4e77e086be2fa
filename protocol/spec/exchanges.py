"""The exchanges that a run can name in ``outer.exchange``. A new one: a line here, and its class.

The gathered exchange is that of the core. Each other one is a leaf: nothing but its line here names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ExchangeEntry:
    """An exchange of pseudo-gradients.

    Attributes:
        settlement: module and class of its :class:`coordinator.run.state.settlement.Settlement`.
        results: those of its :class:`node.core.optimizer.outcome.AgreedResults`; "" where members gather
            payloads.
        members: module, within the package of the transport, and class of the
            :class:`node.exchange.transport.MemberExchange` in which members of a group agree; "" likewise.
        view: module and function of the sentence that ``hetnode spec show`` has about it; "" for none.
        traffic: module and class of its :class:`coordinator.ops.forecast.exchange_traffic.ExchangeTraffic`;
            "" where members gather payloads.
    """

    settlement: str
    results: str = ""
    members: str = ""
    view: str = ""
    traffic: str = ""


_ROOT = __name__.removesuffix("protocol.spec.exchanges")
EXCHANGES: Mapping[str, ExchangeEntry] = {
    "gathered": ExchangeEntry(f"{_ROOT}coordinator.run.state.settlement.Settlement"),
    "reduced": ExchangeEntry(
        f"{_ROOT}coordinator.reduction.settlement.ReducedSettlement",
        f"{_ROOT}node.reduction.results.ReducedResults",
        "reduction.reduction_peer.ReductionPeer",
        f"{_ROOT}node.reduction.volume.volume_text",
        f"{_ROOT}coordinator.reduction.traffic.ReducedTraffic",
    ),
}
"""By the name in ``outer.exchange``."""
