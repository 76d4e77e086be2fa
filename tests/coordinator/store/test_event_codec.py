"""Events as text: every kind comes back as it was, and logs of earlier versions load."""

from __future__ import annotations

from functools import reduce
from itertools import chain
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.run.state.apply import replay
from coordinator.run.state.events import Event, PeerSeen, RoundDecided
from coordinator.run.state.state import State
from coordinator.store.event_codec import STORED_KINDS, decode, encode
from protocol.status import ModelEvaluation, RunPhase
from protocol.types import Aborted, Committed, ManifestEntry, PeerId, RolledBack, Skipped, StageRange
from tests.builders import former_log, keyed, spec_of

st.register_type_strategy(
    StageRange, st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda t: StageRange(t[0], sum(t)))
)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
# Of a Mapping, hypothesis makes any kind that it knows, also some that no rule makes.
st.register_type_strategy(
    ModelEvaluation,
    st.builds(
        ModelEvaluation,
        peer=st.builds(PeerId, st.text()),
        figures=st.dictionaries(st.text(), st.from_type(float)),
    ),
)

LATER_KINDS = {
    "ArbiterAppointed",
    "PayloadsContested",
    "PayloadArbitrated",
    "PeerWeighed",
    "PlaceAsked",
    "AddressesChanged",
    "LinkFailed",
    "RoleChanged",
    "OwnRelayTold",
    "RunPaused",
    "StageSkipped",
    "RunResumed",
    "PeerNamed",
    "AlarmRaised",
    "RunRolledBack",
    "ResultReported",
    "RunChanged",
    "ModelEvaluated",
    "OwnerBound",
}
"""Kinds that the first release of the log format did not have."""

# Other decisions are none that a rule makes.
_DECIDED = st.tuples(*[st.integers(1, 9)] * 3, st.text())
_ENTRIES = st.builds(ManifestEntry)
DECISIONS = st.one_of(
    st.builds(lambda common, entry: Committed(*common, (entry,)), _DECIDED, _ENTRIES),
    _DECIDED.map(lambda common: Aborted(*common)),
    _DECIDED.map(lambda common: Skipped(*common)),
    _DECIDED.map(lambda common: RolledBack(*common, 0)),
)


def _events_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    return st.builds(kind, decision=DECISIONS) if kind is RoundDecided else st.builds(kind)


EVENTS = st.one_of([_events_of(kind) for kind in STORED_KINDS])


@given(EVENTS)
def test_every_kind_of_event_comes_back_as_it_was(event: Event) -> None:
    assert decode(*encode(event)) == event


def test_only_the_heartbeat_is_not_stored() -> None:
    assert set(get_args(Event)) - set(STORED_KINDS) == {PeerSeen}


@given(st.sampled_from(sorted(chain(*STORED_KINDS.values()))), st.text())
def test_invalid_text_raises_only_value_error(kind: str, text: str) -> None:
    for name in (kind, text):
        with pytest.raises(ValueError, match=r"bad fields|unknown kind"):
            decode(name, text)


def test_a_former_log_has_every_kind_and_is_written_again_byte_for_byte() -> None:
    assert {kind for kind, _ in former_log()} == set(chain(*STORED_KINDS.values())) - LATER_KINDS
    again = [encode(decode(kind, text)) for kind, text in former_log()]
    # Descriptors had no epoch, those of plans begin at 1. Nobody dialled peers back, and there was no relay.
    # Reports had all payloads. All runs gathered. No standby took a run over.
    added = (
        ',"term":0',
        ',"epoch":0',
        ',"relayed":false',
        ',"reachability":null,"claimed":"","problem":"","role_reason":""',
        ',"result":null',
        ',"restore_round":null',
        ',"of_group":0,"lacking":[]',
    )
    assert [
        (kind, reduce(lambda t, new: t.replace(f"{new}}}", "}"), added, text)) for kind, text in again
    ] == former_log()


def test_a_log_of_the_first_release_leads_to_the_same_state() -> None:
    spec = spec_of(2, 2, 1, 4)
    state = replay(State(spec, spec.name), (decode(kind, text) for kind, text in former_log()))
    assert state.phase is RunPhase.FINISHED
    assert (state.rounds_decided, state.committed, state.aborted) == (4, 7, 1)
    assert state.quarantined == {keyed(1).peer}
    assert state.strikes == {keyed(1).peer: (1, 2, 4), keyed(2).peer: (1,)}
    assert [plan.from_round for plan in state.plans] == [1, 2, 3, 4]
