"""What a round commits for one stage: gathered payloads, or one result on which their group agreed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Protocol

from torch import Tensor

from node.core.optimizer.received import ReceivedPayloads
from node.ipc.stored_payload import Payload, name_of
from protocol.math.clipping import SentTensor, clipping_scales, payload_norm
from protocol.math.payload_layout import PayloadLayout
from protocol.spec.exchanges import EXCHANGES
from protocol.spec.run import RunSpec

WeightedPayload = tuple[bytes, float]
"""A payload, and the weight of the replica that sent it."""


class GroupResult(Protocol):
    """The result of a group that agrees on one in place of its payloads."""

    def contents(self, layout: PayloadLayout) -> Mapping[str, SentTensor]:
        """The aggregated pseudo-gradient. Raises HetnodeError PAYLOAD_CORRUPT."""

    def left_out(self, layout: PayloadLayout, own: bytes) -> Mapping[str, SentTensor]:
        """What is not in the result of the payload `own` of this replica, which is in it."""


Outcome = Sequence[tuple[Payload, float]] | GroupResult
"""Payloads in the order of the manifest, or the one result."""


class LocalExchange(Protocol):
    """An exchange of all replicas of a trial, in one process. Its state survives an interruption."""

    def result(self, stage: int, payloads: Sequence[WeightedPayload]) -> GroupResult:
        """The committed result of a round. Raises HetnodeError PAYLOAD_CORRUPT."""

    def state_dict(self) -> dict[str, Tensor]:
        """What is kept between rounds, under names that no other part of a trial has."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the state of an exchange of the same trial; other names are left alone."""


class AgreedResults(Protocol):
    """The results of an exchange: their size, their bytes, and a group of them in one process."""

    def most_nbytes(self, spec: RunSpec, stage: int) -> int:
        """The most bytes of what members serve of a stage, payload or result."""

    def read(self, layout: PayloadLayout, data: bytes, position: int | None) -> tuple[GroupResult, bool]:
        """The result in `data`, and whether the payload of the member at `position` of the group is in it.

        None for a member that is not in the group. Raises HetnodeError PAYLOAD_CORRUPT.
        """

    def local(self, spec: RunSpec, replicas: int) -> LocalExchange:
        """The exchange between all replicas of a trial."""


def agreed_results(spec: RunSpec) -> AgreedResults | None:
    """The results of the exchange of a run; None where members gather payloads."""
    path = EXCHANGES[spec.outer.exchange].results
    return resolve_name(path)() if path else None


def contents_of(
    received: ReceivedPayloads, outcome: Outcome
) -> tuple[Sequence[Mapping[str, SentTensor]], list[float]]:
    """What outer_step.apply_update applies, with its weights. Raises HetnodeError PAYLOAD_CORRUPT."""
    if not isinstance(outcome, Sequence):
        return [outcome.contents(received.layout)], [1.0]
    return [received.decoded(payload) for payload, _ in outcome], [weight for _, weight in outcome]


def left_out(
    layout: PayloadLayout,
    outcome: Outcome,
    own: bytes,
    contents: Sequence[Mapping[str, SentTensor]],
    clip: float,
) -> tuple[Mapping[str, SentTensor], float]:
    """What the outcome has not applied of the payload `own`, and the share of it: 0 for nothing.

    That is what clipping removed, or what a result does not have. A lower weight removes nothing: the mean is
    divided by the sum of all weights, so a payload counts in full with any weight. If its rest came back,
    what is far from the others would grow from round to round.

    Args:
        contents: of the outcome, as :func:`contents_of`.
        clip: `outer.clip` of the specification.
    """
    if not isinstance(outcome, Sequence):
        return outcome.left_out(layout, own), 1.0
    mine = [name_of(payload) for payload, _ in outcome].index(name_of(own))
    return contents[mine], 1.0 - clipping_scales([payload_norm(each) for each in contents], clip)[mine]
