"""Questions of readers: in threads, each at most once at a time, and not too many at once.

Those for an explanation are asked as ``hetnode explain`` does.
"""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

from coordinator.api.run_records import Explain
from coordinator.status import document
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.host_port import split_host_port

Record = dict[str, Any]
Query = Callable[[Mapping[str, str]], Record]

_MOST_KEPT, _MOST_WAITING = 64, 32
_MOST_OPTIONS = 4
MOST_LETTERS = 400
"""Of a text of peers, which may be of any length and hold any characters."""


def shown(text: str, most: int = MOST_LETTERS) -> str:
    """`text` with at most `most` letters. Control characters, and those that turn the direction of writing,
    become spaces. Nothing is escaped: that is for those who make HTML of it.
    """
    cut = text[: most + 1]
    clean = "".join(letter if letter.isprintable() else " " for letter in cut)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


_WORD = re.compile(r"[^\s,;()'\"=<>]+")
_NOT_HOSTS = ("cpu", "cuda", "mps", "xpu")


def without_addresses(value: Any) -> Any:
    """`value`, a record as JSON, in which "(an address)" stands for each address of a machine."""
    match value:
        case str():
            return _WORD.sub(_hidden, value) if ":" in value or "." in value else value
        case dict():
            return {key: without_addresses(each) for key, each in value.items()}
        case list() | tuple():
            return [without_addresses(each) for each in value]
    return value


def _hidden(found: re.Match[str]) -> str:
    word = found[0]
    core = end if _is_address(end := word.rstrip(".:!?")) else word
    return f"(an address){word[len(core) :]}" if _is_address(core) else word


def _is_address(word: str) -> bool:
    """Whether it is the address of a machine or a host with its port, perhaps in a URL or a multiaddress."""
    if word.startswith(("/ip4/", "/ip6/", "/dns", "ipv4:", "ipv6:", "dns:")):
        return True
    place = re.sub(r"^\w+://|^[^@]*@", "", word).partition("/")[0]
    with suppress(ValueError):
        host, port = split_host_port(place)
        return port > 9 and host not in _NOT_HOSTS and not host.isdigit()
    with suppress(ValueError):
        return bool(ipaddress.ip_address(place.strip("[]").partition("%")[0]))
    return False


class Queries:
    """Answers for all readers. An answer serves everybody who asks the same within `kept_seconds`."""

    def __init__(self, threads: Executor, kept_seconds: float = 2.0) -> None:
        self._threads, self._kept_seconds = threads, kept_seconds
        self._kept: OrderedDict[object, tuple[float, asyncio.Future[bytes]]] = OrderedDict()
        self._waiting = 0

    async def answer(self, query: Query, options: Mapping[str, str]) -> bytes:
        """JSON, compressed. Raises HetnodeError: that of the query; RATE_LIMITED if too many wait."""
        given = {key[:MOST_LETTERS]: options[key][:MOST_LETTERS] for key in [*options][:_MOST_OPTIONS]}
        key = (query, tuple(sorted(given.items())))
        made_at, future = self._kept.get(key, (0.0, None))
        if future is None or (future.done() and time.monotonic() - made_at > self._kept_seconds):
            if self._waiting >= _MOST_WAITING:
                raise HetnodeError(
                    ErrorCode.RATE_LIMITED, "Too many pages ask for the history.", "Try again."
                )
            self._waiting += 1
            future = asyncio.ensure_future(self._ask(query, given))
            self._kept[key] = time.monotonic(), future
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        # A reader that leaves must not take the answer from the others.
        return await asyncio.shield(future)

    async def _ask(self, query: Query, options: Mapping[str, str]) -> bytes:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _packed, query, options)
        finally:
            self._waiting -= 1


def _packed(query: Query, options: Mapping[str, str]) -> bytes:
    return gzip.compress(json.dumps(query(options), allow_nan=False, separators=(",", ":")).encode(), 4)


KEPT_SECONDS = 10.0
"""How long an answer serves all readers: the coordinator answers few questions at a time."""
_WAIT_SECONDS = 30.0
_MOST_QUESTION, _MOST_ANSWER = 128, 1000
_CALLER = "the dashboard"
"""All readers together, with the same bounds as one peer."""


class Explanations:
    """Asks for explanations of the run on the coordinator's event loop.

    Args:
        loop: that of the coordinator.
    """

    def __init__(self, explain: Explain, loop: asyncio.AbstractEventLoop) -> None:
        self._explain, self._loop = explain, loop

    def explain(self, options: Mapping[str, str]) -> Record:
        """The answer to `question`: "now", the number of a round, or a peer. Waits; not for an event loop.

        Raises HetnodeError: as the explanation itself; RATE_LIMITED if the coordinator has no time for it.
        """
        question = options.get("question", "now")[:_MOST_QUESTION]
        asked = asyncio.run_coroutine_threadsafe(self._explain(_CALLER, question), self._loop)
        try:
            found = asked.result(_WAIT_SECONDS)
        except TimeoutError:
            asked.cancel()
            raise HetnodeError(
                ErrorCode.RATE_LIMITED, "The coordinator has no time for an explanation.", "Try again."
            ) from None
        return document.plain(found, lambda text: shown(text, _MOST_ANSWER))  # type: ignore[no-any-return]
