"""The first bytes of a connection to a relay, which say what it wants.

- A TLS ClientHello: a connection for the holder of the server name, the relay itself or a peer behind it.
- ``hetnode-relay-1\\n`` and a token of 32 bytes: the peer behind the relay dials back for one such
  connection. Every later byte belongs to that connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from protocol.relay.client_hello import NoClientHello, server_name_in

MAGIC = b"hetnode-relay-1\n"
TOKEN_BYTES = 32
GREETING_SECONDS = 10.0
"""A connection that has not said by then what it wants is closed."""


class BadGreeting(ValueError):
    """The first bytes of a connection that no peer sends."""


@dataclass(frozen=True)
class ForName:
    """The client of a TLS server with this name; "" for none."""

    name: str


@dataclass(frozen=True)
class ForToken:
    """The peer behind the relay answers the call that this token names."""

    token: bytes = field(repr=False)

    def __len__(self) -> int:
        """Bytes of the greeting."""
        return len(MAGIC) + TOKEN_BYTES


Greeting: TypeAlias = ForName | ForToken


def greeting_in(data: bytes) -> Greeting | None:
    """What the first bytes of a connection say; None while they are incomplete. Raises BadGreeting."""
    if data[:1] == MAGIC[:1]:
        if data[: len(MAGIC)] != MAGIC[: len(data)]:
            raise BadGreeting("another greeting")
        whole = len(MAGIC) + TOKEN_BYTES
        return ForToken(bytes(data[len(MAGIC) : whole])) if len(data) >= whole else None
    try:
        name = server_name_in(data)
    except NoClientHello as error:
        raise BadGreeting(str(error)) from None
    return None if name is None else ForName(name)


def dial_back(token: bytes) -> bytes:
    """The greeting of a :class:`ForToken`."""
    return MAGIC + token
