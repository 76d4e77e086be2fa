"""What leaves a log when it is redacted, and that its decisions stay."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.membership.presence import FINISHED
from coordinator.ops.incident.file import Incident, to_bytes
from coordinator.ops.incident.redaction import (
    DATA_TEXTS,
    PHRASES,
    RULES,
    RUN,
    NoRule,
    Redactor,
    Rule,
    peers_in,
    redacted_log,
    redacted_spec,
)
from coordinator.run.state import commands, events
from coordinator.run.state.apply import replay
from coordinator.run.state.events import Event
from coordinator.run.state.records import Alarm, FailedLink, Invitation, Peer, Round
from coordinator.run.state.state import State
from coordinator.store.event_codec import STORED_KINDS, decode, encode
from protocol.spec.run import RunSpec
from protocol.trust.endpoints import check_endpoint, ip_version
from protocol.trust.envelope import public_key_of
from protocol.types import ExchangeGroup, Part, Pause, Reachability, Role
from tests.builders import former_log, keyed, spec_of
from tests.support.coordinator_run import Run, attest, pass_time, play_round
from tests.support.incident_replay import replay_incident
from tests.support.invariants import InvariantBroken

STATE_RULES = {
    **RULES,
    (State, "run"): Rule.RUN,
    (State, "restored_digests"): Rule.DIGEST,
    (State, "digests"): Rule.DIGEST,  # which lets the names of parts stay
    (State, "digest_changes"): Rule.PART,
    (State, "diverged"): Rule.PART,
    (State, "invitations"): Rule.INVITE,
    (State, "enrolled"): Rule.INVITE,
    (State, "banned"): Rule.REASON,
    (State, "own_uplinks"): Rule.ADDRESS,
    (Invitation, "invite"): Rule.INVITE,
    (Invitation, "secret_sha256"): Rule.SECRET,
    (Peer, "endpoint"): Rule.ADDRESS,
    (Peer, "claimed"): Rule.ADDRESS,
    (Peer, "problem"): Rule.REASON,
    (Peer, "role_reason"): Rule.REASON,
    (FailedLink, "address"): Rule.ADDRESS,
    (FailedLink, "reason"): Rule.REASON,
    (Round, "rejections"): Rule.REASON,
    (Pause, "reason"): Rule.REASON,
    (Alarm, "reason"): Rule.REASON,
    (State, "names"): Rule.NAME,
    (ExchangeGroup, "group_id"): Rule.GROUP,
}

secrets = st.text("abcdefgh", min_size=8, max_size=20).map(lambda text: f"zq{text}")
"""Texts that occur in no file by chance."""
addresses = st.one_of(
    secrets.map(lambda name: f"{name}.home:4001"),
    st.integers(0, 254).map(lambda number: f"77.188.199.{number}:4001"),
    st.integers(0, 9999).map(lambda number: f"[2a02:8109:bd40::{number}]:4001"),
)


def texts_in(value: Any) -> set[str]:
    """All texts in a record, but for the names of enumerations."""
    if isinstance(value, Enum):
        return set()
    if isinstance(value, str):
        return {value}
    if isinstance(value, bytes):
        return {value.hex()}
    if is_dataclass(value):
        return set().union(*(texts_in(getattr(value, field.name)) for field in fields(value)))
    if isinstance(value, tuple):
        return set().union(*map(texts_in, value))
    return set()


@pytest.mark.parametrize("kind", STORED_KINDS, ids=lambda kind: kind.__name__)
def test_every_field_of_every_event_has_a_rule(kind: type[Event]) -> None:
    """If this fails for a new event or field: docs/development.md, "Incidents", says what to add."""
    assert Redactor(()).value((), tuple[kind, ...]) == ()  # type: ignore[valid-type]


def test_a_field_without_a_rule_is_named() -> None:
    @dataclass(frozen=True)
    class PeerNamed:
        at: float
        name: str

    PeerNamed.__annotations__ = {"at": float, "name": str}
    with pytest.raises(NoRule, match=r"PeerNamed\.name is str, and has no rule"):
        Redactor(()).value(PeerNamed(1.0, "Ann"), PeerNamed)


def test_no_rule_names_a_field_that_does_not_exist() -> None:
    assert all(name in {field.name for field in fields(kind)} for kind, name in RULES)


def test_every_text_of_a_specification_is_known() -> None:
    """A new setting with text is redacted, or is one of few fixed words."""

    def texts(model: Any, path: str = "") -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                found |= texts(field.annotation, f"{path}{name}.")
            elif field.annotation is str:
                found.add(f"{path}{name}")
        return found

    # one of a few names of this program
    validated = {"outer.quantizer", "link.dtype", "link.gradient_dtype"}
    assert texts(RunSpec) - validated == {"preset", *(f"data.{name}" for name in DATA_TEXTS)}


def test_a_specification_loses_its_paths() -> None:
    spec = spec_of(data__source="text:/home/ann/secret.txt", data__tokenizer="/home/ann/tokenizer.json")
    assert "ann" not in redacted_spec(spec).canonical_json
    assert redacted_spec(spec).timing == spec.timing
    assert redacted_spec(redacted_spec(spec)) == redacted_spec(spec)


def test_a_former_log_keeps_no_text_but_those_of_this_program() -> None:
    log = [decode(*row) for row in former_log()]
    kept = {"cpu", FINISHED, "", *Part, *PHRASES}
    originals = set().union(*map(texts_in, log)) - kept
    found = set().union(*map(texts_in, redacted_log(log)))
    assert originals & found == set()


class Told:
    """What a run in the test was told: it must not be in the file."""

    def __init__(self) -> None:
        self.texts: set[str] = set()

    def __call__(self, text: str) -> str:
        self.texts.add(text)
        return text


def told_run(data: st.DataObject, told: Told) -> Run:
    """A run whose peers, addresses and reasons Hypothesis has chosen."""
    numbers = data.draw(st.permutations(range(4)))
    endpoints = data.draw(st.lists(addresses, min_size=4, max_size=4, unique=True))
    spec = spec_of(2, 2, 1, 6, data__source=f"text:/home/{told(data.draw(secrets))}")
    run = Run(spec)
    run.accept(commands.Start())
    invite, secret = told(data.draw(secrets)), told("ab12" * 16)
    run.accept(commands.CreateInvite(invite, secret, 9, 3600.0, None))
    peers = [keyed(number) for number in numbers]
    for i, (peer, endpoint) in enumerate(zip(peers, endpoints, strict=True)):
        run.now += 0.25
        run.accept(commands.Enroll(peer.peer, invite, secret))
        join = peer.join(spec, Role.REPLICA if i < 2 else Role.STAGE, told(endpoint))
        problem, name = told(data.draw(secrets)), told(data.draw(secrets))
        run.accept(replace(join, reachability=Reachability.OPEN, problem=problem, name=name))
        told(peer.peer)
        told(endpoint.rsplit(":", 1)[0])
    for _ in range(2):
        run.now += 1.5
        play_round(run)
    gone = data.draw(st.sampled_from(peers))
    match data.draw(st.sampled_from(["leave", "drain", "lost", "ban", "retreat"])):
        case "leave":
            run.accept(commands.Leave(gone.peer, told(data.draw(secrets))))
        case "drain":
            run.accept(commands.Drain(gone.peer, told(data.draw(secrets))))
        case "lost":
            alive = [peer for peer in peers if peer != gone]
            pass_time(run, run.spec.timing.lost_after + 5, *alive, step=1.0)
        case "ban":
            run.accept(commands.Ban(gone.peer, told(data.draw(secrets)), revoke_invites=True))
        case "retreat":
            run.accept(commands.Retreat(gone.peer, 1, told(data.draw(secrets))))
    for peer in peers:
        known = run.state.peers[peer.peer]
        if known.is_live and peer.peer in run.state.reservations:
            run.now += 0.25
            attest(run, peer, 2)
    return run


@given(st.data())
@settings(max_examples=15)
def test_nothing_that_peers_or_the_operator_said_is_in_the_file_and_the_decisions_stay(
    data: st.DataObject,
) -> None:
    told = Told()
    run = told_run(data, told)
    log = [event for event in run.events if not isinstance(event, events.PeerSeen)]
    redactor = Redactor(peers_in(log), STATE_RULES)
    spec, redacted = redacted_spec(run.spec), [redactor.event(event) for event in log]
    content = spec.canonical_json + "".join(encode(event)[1] for event in redacted)
    assert [text for text in told.texts if text in content] == []
    # The state of the redacted log is the redacted state of the log.
    assert replay(State(spec, RUN), redacted) == redactor.value(
        replay(State(run.spec, run.spec.name), log), State
    )
    played = replay_incident(Incident(spec, tuple(redacted)))
    assert played.differences == ()
    assert played.broken == ""
    assert to_bytes(Incident(spec, tuple(redacted)))


@given(st.sets(st.integers(0, 500), max_size=40))
def test_pseudonyms_are_peer_ids_in_the_order_of_the_originals(numbers: set[int]) -> None:
    peers = sorted(keyed(number).peer for number in numbers)
    redactor = Redactor(peers)
    found = [redactor.peer(peer) for peer in peers]
    assert found == sorted(set(found))
    assert not set(found) & set(peers)
    assert all(public_key_of(peer) for peer in found)


@given(st.lists(addresses, max_size=30))
def test_addresses_become_addresses_for_documentation_of_the_same_kind(found: list[str]) -> None:
    redactor = Redactor(())
    mapped = {address: redactor.text(Rule.ADDRESS, address) for address in found}
    assert len(set(mapped.values())) == len(mapped)
    documentation = re.compile(r"(192\.0\.2|198\.51\.100|203\.0\.113)\.\d+:|\[2001:db8:|host-\d+\.example:")
    for address, other in mapped.items():
        check_endpoint(other)
        assert documentation.match(other)
        assert ip_version(other) == ip_version(address)


def test_a_hostile_text_becomes_a_label_and_the_phrases_of_this_program_stay() -> None:
    redactor = Redactor(())
    assert redactor.text(Rule.REASON, "\x1b[2Jyou are gone") == "reason 1"
    assert redactor.text(Rule.REASON, "connection refused by 10.1.2.3") == "reason 2 (refused)"
    assert redactor.text(Rule.REASON, FINISHED) == FINISHED
    assert redactor.text(Rule.REASON, "") == ""
    assert redactor.text(Rule.DEVICE, "cuda:1") == "cuda:1"
    assert redactor.text(Rule.DEVICE, "cpu of ann") == "text-1"
    assert redactor.text(Rule.GROUP, "nano-1-2/0/3") == "incident/0/3"
    assert all(phrase.isascii() for phrase in PHRASES)


def test_kinds_of_events_are_those_of_the_codec() -> None:
    assert set(STORED_KINDS) == {kind for kind in get_args(Event) if kind is not events.PeerSeen}
    assert issubclass(InvariantBroken, Exception)
