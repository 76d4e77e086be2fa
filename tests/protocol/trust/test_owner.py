"""Owners' keys: phrases that people write down, and bindings that both sides sign for one run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.trust.owner import OwnerKey, is_bound, is_released
from tests.builders import keyed

KEY = OwnerKey(bytes(range(16)))
A, B = keyed(0), keyed(1)


def test_a_phrase_gives_the_same_key_in_every_implementation() -> None:
    assert KEY.phrase == "AAAQ-EAYE-AUDA-OCAJ-BIFQ-YDIO-B5OF-FYZ2"
    assert KEY.owner == "12D3KooWME3sV9bj3qu2MtWsjhnQZgaMXbNW6EKjYyKWZxmhTKBS"


@given(st.binary(min_size=16, max_size=16), st.sampled_from(["-", " ", "", "\n", " - "]), st.booleans())
def test_a_phrase_is_read_as_people_type_it(secret: bytes, between: str, is_lower: bool) -> None:
    key = OwnerKey(secret)
    text = key.phrase.replace("-", between).replace("O", "0").replace("I", "1")
    assert OwnerKey.read(text.lower() if is_lower else text).owner == key.owner


@given(st.integers(0, 38), st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
def test_a_wrong_letter_is_found(at: int, letter: str) -> None:
    text = KEY.phrase[:at] + letter + KEY.phrase[at + 1 :]
    if text != KEY.phrase and KEY.phrase[at] != "-":
        with pytest.raises(ValueError, match="one of these is wrong"):
            OwnerKey.read(text)


@given(st.text() | st.text("ABCDEFG234567-", max_size=60))
def test_other_text_is_no_phrase(text: str) -> None:
    if text != KEY.phrase:
        with pytest.raises(ValueError, match="8 groups"):
            OwnerKey.read(text)


def test_a_binding_is_of_its_run_its_node_and_its_owner_alone() -> None:
    binding = KEY.bind("run", A.peer, A.sign)
    assert is_bound(binding, "run")
    other = OwnerKey(bytes(16))
    assert not is_bound(binding, "another run"), "a replay"
    assert not is_bound(replace(binding, peer=B.peer), "run"), "the node of another"
    assert not is_bound(replace(binding, owner=other.owner), "run"), "the credit of another's node"
    assert not is_bound(KEY.bind("run", A.peer, B.sign), "run"), "the node has not agreed"
    forged = replace(binding, owner_signature=other.bind("run", A.peer, A.sign).owner_signature)
    assert not is_bound(forged, "run"), "the owner has not agreed"
    for signature in (b"", b"x" * 10**4):
        assert not is_bound(replace(binding, owner_signature=signature), "run")
        assert not is_bound(replace(binding, peer_signature=signature), "run")


def test_only_the_former_owner_lets_a_node_go_and_only_to_the_one_that_it_names() -> None:
    new, third = OwnerKey(bytes(16)), OwnerKey(bytes([1] * 16))
    binding = new.bind("run", A.peer, A.sign, former=KEY)
    assert is_released(binding, "run", KEY.owner)
    assert not is_released(binding, "another run", KEY.owner)
    assert not is_released(binding, "run", third.owner)
    assert not is_released(replace(binding, owner=third.owner), "run", KEY.owner)
    assert not is_released(replace(binding, release=binding.owner_signature), "run", KEY.owner)
    assert not is_released(new.bind("run", A.peer, A.sign), "run", KEY.owner)
