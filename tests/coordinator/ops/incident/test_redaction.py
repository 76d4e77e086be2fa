"""What leaves a log when it is redacted, and that what follows from it stays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.ops.incident.file import Incident, to_bytes
from coordinator.ops.incident.redaction import (
    DATA_TEXTS,
    PHRASES,
    peers_in,
    redacted_log,
    redacted_spec,
    texts_in,
)
from coordinator.run.state import commands, events
from coordinator.run.state.apply import replay
from coordinator.run.state.state import State
from coordinator.store.event_codec import decode, encode
from protocol.spec.change import changed
from protocol.spec.run import RunSpec
from protocol.spec.sections import OneOf
from protocol.types import Part, Reachability, Role, RunChange
from tests.builders import former_log, keyed, spec_of
from tests.support.coordinator_run import Run, attest, pass_time, play_round

secrets = st.text("abcdefgh", min_size=8, max_size=20).map(lambda text: f"zq{text}")
"""Texts that occur in no file by chance."""
addresses = st.one_of(
    secrets.map(lambda name: f"{name}.home:4001"),
    st.integers(0, 254).map(lambda number: f"77.188.199.{number}:4001"),
    st.integers(0, 9999).map(lambda number: f"[2a02:8109:bd40::{number}]:4001"),
)


def test_every_text_of_a_specification_is_known() -> None:
    """A new setting with text is redacted, or is one of few fixed words."""

    def texts(model: Any, path: str = "") -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                found |= texts(field.annotation, f"{path}{name}.")
            elif has_text(field.annotation) and not any(isinstance(each, OneOf) for each in field.metadata):
                found.add(f"{path}{name}")
        return found

    def has_text(annotation: Any) -> bool:
        is_open = get_origin(annotation) is not Literal
        is_text = annotation is str or hasattr(annotation, "model_fields")
        return is_text or (is_open and any(map(has_text, get_args(annotation))))

    hashes = {"initial", "began_as"}
    assert texts(RunSpec) - hashes == {"preset", *(f"data.{name}" for name in DATA_TEXTS)}


def test_a_field_that_comes_later_keeps_no_text_and_one_of_an_unknown_type_is_refused() -> None:
    @dataclass(frozen=True)
    class Later:
        field: Any

    for held in (
        "zqsecret",
        ["zqsecret"],
        ("zqsecret",),
        {"zqsecret": ["zqsecret"]},
        frozenset({"zqsecret"}),
    ):
        (found,) = redacted_log([Later(held)])  # type: ignore[list-item]
        assert not any("zq" in text for text in texts_in(found))
    with pytest.raises(TypeError, match="object of an event"):
        redacted_log([Later(object())])  # type: ignore[list-item]


def test_a_specification_loses_its_paths() -> None:
    spec = spec_of(data__source="text:/home/ann/secret.txt", data__tokenizer="/home/ann/tokenizer.json")
    assert "ann" not in redacted_spec(spec).canonical_json
    assert redacted_spec(spec).timing == spec.timing
    assert redacted_spec(redacted_spec(spec)) == redacted_spec(spec)


def test_a_former_log_keeps_no_text_of_others() -> None:
    log = [decode(*row) for row in former_log()]
    kept = set(texts_in(log)) & set(texts_in(redacted_log(log)))
    assert kept <= {"cpu", "finished", "", *Part}


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
def test_nothing_that_peers_or_the_operator_said_is_in_the_file_and_what_was_decided_is(
    data: st.DataObject,
) -> None:
    told = Told()
    run = told_run(data, told)
    log = [event for event in run.events if not isinstance(event, events.PeerSeen)]
    spec, redacted = redacted_spec(run.spec), redacted_log(log)
    content = spec.canonical_json + "".join(encode(event)[1] for event in redacted)
    assert [text for text in told.texts if text in content] == []
    assert [decode(*encode(event)) for event in redacted] == [*redacted]
    assert to_bytes(Incident(spec, redacted))
    before, after = replay(State(run.spec, run.spec.name), log), replay(State(spec, "incident"), redacted)
    names = dict(zip(sorted(peers_in(log)), sorted(after.peers), strict=True))
    for peer, name in names.items():
        one, other = before.peers[peer], after.peers[name]
        assert (one.role, one.lifecycle, one.arrival) == (other.role, other.lifecycle, other.arrival)
    assert [type(each) for each in before.decisions.values()] == [
        type(each) for each in after.decisions.values()
    ]
    plans = ([(p.epoch, [r.weight for r in p.replicas]) for p in state.plans] for state in (before, after))
    assert next(plans) == next(plans)


def test_a_change_of_data_stays_one_that_a_run_can_have() -> None:
    secret = '[{"name":"zq","source":"text:/home/zq"}]'
    told = RunChange(3, (f"data.source={secret}", 'data.validation="text:/zq"', "inner.steps=7"), "zq", 96)
    (found,) = redacted_log([events.RunChanged(1.0, told)])
    assert isinstance(found, events.RunChanged)
    assert not any("zq" in text for text in texts_in(found))
    spec = changed(redacted_spec(spec_of()), [found.change])
    assert (spec.data.source, spec.data.validation, spec.inner.steps) == ("builtin", "", 7)


def test_equal_texts_stay_equal_and_a_hostile_one_is_a_label() -> None:
    @dataclass(frozen=True)
    class Said:
        device: str
        texts: tuple[str, ...]

    said = ("\x1b[2Jgone", "refused by 10.1.2.3", "\x1b[2Jgone")
    record: Any = Said("cuda:1", said)
    (found,) = redacted_log([record])
    assert found == Said("cuda:1", ("text-1", "text-2 (refused)", "text-1"))
    assert all(phrase.isascii() for phrase in PHRASES)
