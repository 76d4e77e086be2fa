"""The server name in the first message of a TLS client (RFC 8446 4.1.2, RFC 6066 3). Nothing is decrypted."""

from __future__ import annotations

import re

MAX_BYTES = 8192
"""Of the record: TLS permits 16 KiB, and clients send 0.3 to 2."""

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_RECORD_HEADER, _VERSION_AND_RANDOM = 5, 2 + 32
_NAME = re.compile(rb"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MAX_NAME = 255


class NoClientHello(ValueError):
    """Bytes that are not the beginning of a ClientHello in one record of at most MAX_BYTES."""


def server_name_in(data: bytes) -> str | None:
    """The server name, lower case; "" if the client gives none; None while the record is incomplete.

    Raises NoClientHello, and nothing else, whatever the bytes are.
    """
    if data[:1] and data[0] != _HANDSHAKE:
        raise NoClientHello("not a handshake of TLS")
    if data[1:2] and data[1] != 3:
        raise NoClientHello("not a version of TLS")
    if len(data) < _RECORD_HEADER:
        return None
    size = int.from_bytes(data[3:_RECORD_HEADER])
    if size > MAX_BYTES - _RECORD_HEADER:
        raise NoClientHello(f"a record of {size} bytes")
    if len(data) < _RECORD_HEADER + size:
        return None
    record = _Fields(data[_RECORD_HEADER : _RECORD_HEADER + size])
    if record.number(1) != _CLIENT_HELLO:
        raise NoClientHello("another message")
    hello = _Fields(record.sized(3))
    if record.left:
        raise NoClientHello("more than one message")
    hello.take(_VERSION_AND_RANDOM)
    hello.sized(1)  # session id
    hello.sized(2)  # cipher suites
    hello.sized(1)  # compression methods
    if not hello.left:
        return ""
    extensions = _Fields(hello.sized(2))
    names = []
    while extensions.left:
        kind, body = extensions.number(2), extensions.sized(2)
        if kind == _SERVER_NAME:
            names.append(_host_name(body))
    if len(names) > 1:
        raise NoClientHello("several server names")
    return names[0] if names else ""


def _host_name(extension: bytes) -> str:
    entries = _Fields(_Fields(extension).sized(2))
    if entries.number(1) != _HOST_NAME:
        raise NoClientHello("a server name of another kind")
    name = entries.sized(2)
    if entries.left or len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise NoClientHello("a server name that is none")
    return name.decode("ascii").lower()


class _Fields:
    """Takes fields from the front of `data`. Raises NoClientHello where they go beyond its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise NoClientHello("a field beyond the end")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def sized(self, size: int) -> bytes:
        """A field behind its length, which has `size` bytes."""
        return self.take(self.number(size))
