"""The state of a run from its event log, at the start of its coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.state import events
from coordinator.state.apply import apply
from coordinator.state.events import Event
from coordinator.state.state import State
from coordinator.storage.store import Store
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec


def restore(
    store: Store, spec: RunSpec, run: str, observers: Sequence[Callable[[Event], None]] = ()
) -> State:
    """The state after the events of `store`: :func:`open_log`, then :func:`replay_log` of all of them."""
    open_log(store, spec)
    return replay_log(store, State(spec, run), observers)


def open_log(store: Store, spec: RunSpec) -> None:
    """Verify the log of a run of `spec`. An empty store gets `spec` and begins a new run.

    Raises:
        HetnodeError: SPEC_MISMATCH if `store` holds a run of another spec; STORE_CORRUPT.
    """
    stored_json = store.verify()
    if stored_json is None:
        store.begin(spec.canonical_json)
    elif (stored := RunSpec.from_json(stored_json)).hash != spec.hash:
        raise HetnodeError(
            ErrorCode.SPEC_MISMATCH,
            f"The folder holds a run of the specification {stored.hash}, but {spec.hash} was given.",
            "Give the options of the stored run, or another folder.",
        )


def replay_log(
    store: Store, state: State, observers: Sequence[Callable[[Event], None]] = (), after: int = 0
) -> State:
    """The state after the events of a verified `store`, where `state` is that after the first `after`.

    Args:
        observers: each gets every event that is applied, in order. No list of all events is in memory at any
            time.

    Raises:
        HetnodeError: STORE_CORRUPT, also if its payloads are signed for another run than that of `state`.
    """
    for event in store.events(after):
        if isinstance(event, events.PayloadOffered):
            _check_run(event.descriptor.run, state.run)
        state = apply(state, event)
        for each in observers:
            each(event)
    return state


def _check_run(signed_for: str, run: str) -> None:
    if signed_for != run:
        raise HetnodeError(
            ErrorCode.STORE_CORRUPT,
            f"The payloads in this folder are signed for run {signed_for}; its authority makes it {run}.",
            "Restore authority.key and authority.pem. If an earlier version of hetnode began the run, end it "
            "with that version.",
        )
