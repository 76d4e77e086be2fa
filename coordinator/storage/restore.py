"""The state of a run from its event log, at the start of its coordinator."""

from __future__ import annotations

from coordinator.state import events
from coordinator.state.apply import replay
from coordinator.state.events import Event
from coordinator.state.state import State
from coordinator.storage.store import Store
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec


def restore(store: Store, spec: RunSpec, run: str) -> tuple[State, tuple[Event, ...]]:
    """The events of `store`, and the state after them. An empty store gets `spec` and begins a new run.

    Raises:
        HetnodeError: SPEC_MISMATCH if `store` holds a run of another spec; STORE_CORRUPT, also if its
            payloads are signed for another run than `run`.
    """
    stored_json, stored_events = store.load()
    if stored_json is None:
        store.begin(spec.canonical_json)
    elif (stored := RunSpec.from_json(stored_json)).hash != spec.hash:
        raise HetnodeError(
            ErrorCode.SPEC_MISMATCH,
            f"The folder holds a run of the specification {stored.hash}, but {spec.hash} was given.",
            "Give the options of the stored run, or another folder.",
        )
    offered = (each.descriptor.run for each in stored_events if isinstance(each, events.PayloadOffered))
    if (signed_for := next(offered, run)) != run:
        raise HetnodeError(
            ErrorCode.STORE_CORRUPT,
            f"The payloads in this folder are signed for run {signed_for}; its authority makes it {run}.",
            "Restore authority.key and authority.pem. If an earlier version of hetnode began the run, end it "
            "with that version.",
        )
    return replay(State(spec, run), stored_events), stored_events
