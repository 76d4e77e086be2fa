"""Invites come back as they were made, and no other text passes for one."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.invite import PREFIX, Invite, decode, is_invite

hosts = st.sampled_from(["127.0.0.1", "[::1]", "coordinator.example.org", "münchen.example"])
addresses = st.tuples(hosts, st.integers(0, 65535)).map(lambda pair: f"{pair[0]}:{pair[1]}")
invites = st.builds(
    Invite,
    api=addresses,
    enrollment=addresses,
    pin=st.binary(min_size=32, max_size=32),
    id=st.binary(min_size=6, max_size=6).map(bytes.hex),
    secret=st.binary(min_size=16, max_size=16),
)
INVITE = Invite("127.0.0.1:7700", "127.0.0.1:7701", bytes(range(32)), "0123456789ab", b"sixteen bytes ok")


@given(invites)
def test_an_invite_is_read_as_it_was_made_and_white_space_around_it_does_not_matter(invite: Invite) -> None:
    assert decode(invite.encode()) == invite
    assert decode(f" {invite.encode()}\r\n") == invite
    assert is_invite(f"\n{invite.encode()}")
    marked = f"\ufeff{invite.encode()}\n"  # as some editors save a file
    assert is_invite(marked)
    assert decode(marked) == invite


def test_an_invite_in_other_letters_or_of_a_later_version_is_still_taken_for_one() -> None:
    """Else a message about an unknown run would quote the secret."""
    for text in (INVITE.encode().upper(), INVITE.encode().replace("hetnode1", "hetnode2")):
        assert is_invite(text)
        with pytest.raises(HetnodeError) as error:
            decode(text)
        assert text[20:60] not in str(error.value)
    assert not is_invite("hetnode2-accede8698e6-3ef8338073c03548f5367fc4b89c77e3")


@given(st.text() | st.text().map(lambda text: PREFIX + text))
def test_any_other_text_is_refused_as_a_bad_invite(text: str) -> None:
    with pytest.raises(HetnodeError) as error:
        decode(text)
    assert error.value.code is ErrorCode.BAD_INVITE


@given(st.binary(max_size=400))
def test_any_bytes_under_the_prefix_are_refused_as_a_bad_invite(data: bytes) -> None:
    with pytest.raises(HetnodeError) as error:
        decode(PREFIX + base64.urlsafe_b64encode(data).decode())
    assert error.value.code is ErrorCode.BAD_INVITE


@given(invites, st.data())
def test_a_changed_letter_is_noticed(invite: Invite, data: st.DataObject) -> None:
    text = invite.encode()
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from("ABCxyz019-_").filter(lambda letter: letter != text[at]))
    with pytest.raises(HetnodeError) as error:
        decode(text[:at] + letter + text[at + 1 :])
    assert error.value.code is ErrorCode.BAD_INVITE


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_an_invite_that_was_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(HetnodeError) as error:
        decode(INVITE.encode()[:-cut])
    assert error.value.code is ErrorCode.BAD_INVITE


def test_neither_a_refusal_nor_a_printed_invite_gives_the_secret_away() -> None:
    text = INVITE.encode()
    with pytest.raises(HetnodeError) as error:
        decode(text[:-1])
    assert text[len(PREFIX) : -1] not in str(error.value)
    assert "sixteen" not in repr(INVITE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pin": b"short"},
        {"secret": b""},
        {"id": "00"},
        {"id": "not hexadecimal"},
        {"api": "no-port"},
        {"api": "host:70000"},
        {"enrollment": "x" * 300 + ":1"},
    ],
)
def test_an_invite_of_wrong_parts_cannot_be_made(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Invite(**{**INVITE.__dict__, **wrong}).encode()
