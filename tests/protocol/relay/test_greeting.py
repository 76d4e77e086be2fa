"""What a relay reads in the first bytes of a connection."""

from __future__ import annotations

import ssl
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.relay.client_hello import MAX_BYTES, NoClientHello, server_name_in
from protocol.relay.greeting import (
    MAGIC,
    TOKEN_BYTES,
    BadGreeting,
    ForName,
    ForToken,
    dial_back,
    greeting_in,
)
from protocol.trust.names import tls_name

NAME = tls_name("somebody")


def client_hello(name: str | None) -> bytes:
    """The first bytes of a real TLS client."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    sent = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


HELLO = client_hello(NAME)


def sized(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size) + data


def hello_of(*extensions: tuple[int, bytes]) -> bytes:
    """A ClientHello with these extensions, by the letter of RFC 8446."""
    body = bytes(34) + sized(1, bytes(32)) + sized(2, b"\x13\x01") + sized(1, b"\0")
    body += sized(2, b"".join(kind.to_bytes(2) + sized(2, each) for kind, each in extensions))
    return b"\x16\x03\x01" + sized(2, b"\x01" + sized(3, body))


def names(*entries: tuple[int, bytes]) -> tuple[int, bytes]:
    return 0, sized(2, b"".join(kind.to_bytes(1) + sized(2, each) for kind, each in entries))


def test_the_server_name_of_a_real_client() -> None:
    assert server_name_in(HELLO) == NAME
    assert server_name_in(client_hello(None)) == ""
    assert server_name_in(hello_of((10, b"x"), names((0, b"A.hetnode")), (11, b""))) == "a.hetnode"


def test_more_bytes_are_needed_until_the_record_is_complete() -> None:
    assert all(server_name_in(HELLO[:end]) is None for end in range(len(HELLO)))
    assert server_name_in(HELLO + b"what follows") == NAME


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x02",
        b"\x15\x03\x01\x00\x02\x01\x00",
        b"\x16\x03\x01" + (MAX_BYTES - 4).to_bytes(2),
        b"\x16\x03\x01" + sized(2, b"\x02" + sized(3, bytes(40))),
        b"\x16\x03\x01" + sized(2, b"\x01\x00\x40\x00" + bytes(20)),
        HELLO[:3] + sized(2, HELLO[5:] + b"\0"),
        hello_of(names((0, b"a")), names((0, b"b"))),
        hello_of(names((0, b"a"), (0, b"b"))),
        hello_of(names((1, b"a"))),
        hello_of(names((0, b""))),
        hello_of(names((0, b"a\nb"))),
        hello_of(names((0, b"\xff"))),
        hello_of(names((0, b"a" * 256))),
        hello_of((0, b"")),
    ],
)
def test_what_is_no_client_hello_is_refused(data: bytes) -> None:
    with pytest.raises(NoClientHello):
        server_name_in(data)


@given(st.binary(max_size=300))
@example(b"")
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    for start in (data, HELLO[:5] + data, HELLO[:60] + data):
        with suppress(BadGreeting):
            greeting_in(start)


@given(st.integers(0, len(HELLO) - 1), st.integers(0, 255), st.integers(0, len(HELLO)))
def test_changed_client_hellos_raise_nothing_else(at: int, value: int, end: int) -> None:
    changed = bytearray(HELLO)
    changed[at] = value
    for data in (bytes(changed), bytes(changed[:end])):
        with suppress(BadGreeting):
            greeting_in(data)


@given(st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES), st.binary(max_size=9))
def test_a_peer_that_dials_back(token: bytes, later: bytes) -> None:
    whole = dial_back(token)
    assert greeting_in(whole + later) == ForToken(token)
    assert all(greeting_in(whole[:end]) is None for end in range(len(whole)))


def test_greetings() -> None:
    assert greeting_in(HELLO) == ForName(NAME)
    assert "x" * 8 not in repr(ForToken(b"x" * TOKEN_BYTES))
    with pytest.raises(BadGreeting):
        greeting_in(MAGIC[:-1] + b"x")
