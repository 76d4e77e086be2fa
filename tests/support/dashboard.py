"""Reads the dashboard of a coordinator as a browser does."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coordinator.api.dashboard import url_in


@dataclass(frozen=True)
class Answered:
    """The answer to one request, with its body as it was before it was packed."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


def address_of(folder: Path) -> tuple[str, int]:
    """Host and port of the dashboard of the run in `folder`."""
    url = url_in(folder)
    assert url is not None
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


async def ask(
    where: Path | tuple[str, int], path: str, method: str = "GET", body: str = "", **headers: str
) -> Answered:
    """One request to the dashboard of the run in a folder, or to one at an address.

    `headers` in words joined by "_".
    """
    address = address_of(where) if isinstance(where, Path) else where
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return await asyncio.to_thread(_ask, address, path, method, body, given)


def _ask(address: tuple[str, int], path: str, method: str, body: str, headers: dict[str, str]) -> Answered:
    connection = http.client.HTTPConnection(*address, timeout=30)
    try:
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        content = answer.read()
        packed = found.get("content-encoding") == "gzip"
        return Answered(answer.status, found, gzip.decompress(content) if packed else content)
    finally:
        connection.close()


class EventReader:
    """One open stream of events."""

    def __init__(self, address: tuple[str, int], headers: Mapping[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=30)
        self._connection.request("GET", "/events", headers=headers or {})
        self._answer = self._connection.getresponse()
        self.status = self._answer.status

    def next(self) -> tuple[str, dict[str, Any]] | None:
        """Name and data of the next event; None at the end of the stream."""
        name = ""
        while line := self._answer.readline():
            key, _, value = line.decode().strip().partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                return name, json.loads(value)
        return None

    def until(self, **fields: Any) -> dict[str, Any]:
        """The first record of the run in which `fields` have these values."""
        while (event := self.next()) is not None:
            name, data = event
            if name == "run" and all(data[key] == value for key, value in fields.items()):
                return data
        raise AssertionError("the stream has ended")

    def close(self) -> None:
        self._connection.close()


def open_socket(address: tuple[str, int], sent: bytes = b"") -> socket.socket:
    """A client that sends these bytes, and then neither reads nor writes."""
    client = socket.create_connection(address, timeout=30)
    if sent:
        client.sendall(sent)
    return client
