"""Whether the anchors agree: the digests that peers attest after a round, and who is done after the last."""

from __future__ import annotations

from collections import Counter

from coordinator.events import AnchorDiverged, DigestAttested
from coordinator.screens import bad_request, live_peer
from coordinator.state import KEPT_ROUNDS, Draft, State
from protocol.spec import RunSpec
from protocol.types import PeerId

EMBEDDING = "embedding"
STAGE = "stage"
"""The parts of an anchor that are compared: a whole stage, or the token-embedding table alone."""


def attest(
    draft: Draft, spec: RunSpec, sender: PeerId, stage: int, number: int, part: str, digest: str, now: float
) -> None:
    """Note the digest of `sender`'s anchor after `number`, and name every peer whose anchor differs.

    Round 0 stands for the anchor before the first round. Part "embedding" is attested for stage 0 by any
    member, since all of them keep the table.

    Raises:
        HetnodeError: UNKNOWN_PEER or BAD_REQUEST.
    """
    live_peer(draft.state, sender)
    seat = draft.state.seat(sender, number)
    holds = seat is not None and (stage == 0 if part == EMBEDDING else stage in seat.member.stages)
    if not holds or part not in (STAGE, EMBEDDING):
        raise bad_request(f"{sender} attests the {part} of stage {stage}, which it does not hold")
    if number > 0 and (stage, number) not in draft.state.decisions:
        raise bad_request(f"{sender} attests stage {stage} after round {number}, which is not decided")
    if number < draft.state.current_round - KEPT_ROUNDS:
        raise bad_request(
            f"{sender} attests round {number}, but the run is in round {draft.state.current_round}"
        )
    key = (stage, number, part)
    if draft.state.digests.get(key, {}).get(sender) != digest:
        draft.add(DigestAttested(now, stage, number, part, sender, digest))
    expected = expected_digest(draft.state, stage, number, part)
    assert expected is not None
    for peer, its_digest in draft.state.digests[key].items():
        if its_digest != expected:
            note_divergence(draft, now, stage, number, part, peer, its_digest, expected)


def expected_digest(state: State, stage: int, number: int, part: str) -> str | None:
    """The digest that most peers attested; of equally many the one attested first. None before any."""
    digests = state.digests.get((stage, number, part))
    return Counter(digests.values()).most_common(1)[0][0] if digests else None


def note_divergence(
    draft: Draft, now: float, stage: int, number: int, part: str, peer: PeerId, digest: str, expected: str
) -> None:
    if (peer, stage, number, part) not in draft.state.diverged:
        draft.add(AnchorDiverged(now, stage, number, part, peer, digest, expected))


def has_attested_last(state: State, spec: RunSpec, peer: PeerId) -> bool:
    """Whether the work of `peer` is done: it attested all that it hosts after the last round.

    A stage whose last round was aborted has no new anchor to attest.
    """
    seat = state.seat(peer, spec.rounds)
    if seat is None:
        return False
    for stage in seat.member.stages:
        decision = state.decisions.get((stage, spec.rounds))
        attested = state.digests.get((stage, spec.rounds, STAGE), {})
        if decision is None or (decision.committed and peer not in attested):
            return False
    return True


def unconfirmed(state: State, spec: RunSpec) -> list[PeerId]:
    """The live members of the last plan that have not attested their last anchor yet."""
    return [
        member.peer
        for replica in state.plans[-1].replicas
        for member in replica.members
        if state.peers[member.peer].is_live and not has_attested_last(state, spec, member.peer)
    ]
