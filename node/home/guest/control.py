"""How a command of this machine reaches the node of a folder: a socket there, for the owner only.

One request and one answer per connection, each a line of JSON. The folder's lock says which node may listen,
so a socket that a killed node has left is simply replaced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, chdir, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from node.home.guest.guest import Guest
from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)

_SOCKET = "control"  # a relative path from the folder, since the path of a socket has at most 104 bytes
_MOST_BYTES, _MOST_ANSWER_BYTES = 4096, 1 << 20
_SECONDS = 5.0
_PATIENCE_AT_ONCE = 1.0  # enough to tell the coordinator, so that it is no failure of this node


class Ask(StrEnum):
    """What a command may ask of a node."""

    PAUSE = "pause"
    PAUSE_AT_ONCE = "pause at once"
    RESUME = "resume"
    STATE = "state"
    REPORT = "report"
    LOG = "log"


@dataclass(frozen=True)
class GuestState:
    """What a command learns of a node.

    Attributes:
        is_here: the node takes part.
        reason: why it has to rest, as the end of a sentence, or "".
        has_joined: the coordinator has let it in since it began to take part.
        silent_seconds: for how long the coordinator has not answered it, beyond what is usual.
        round_number: the open round; 0 before the first, and where it is not known.
    """

    is_here: bool
    reason: str
    has_joined: bool = False
    silent_seconds: float = 0.0
    round_number: int = 0


@dataclass(frozen=True)
class Contact:
    """The part of :class:`GuestState` that is about the coordinator."""

    has_joined: bool = False
    silent_seconds: float = 0.0
    round_number: int = 0


Answers = Mapping[Ask, Callable[[], Any]]
"""What else a node tells: for a question, a function that returns plain data for JSON."""


@asynccontextmanager
async def answer_commands(
    folder: Path,
    guest: Guest,
    contact: Callable[[], Contact] = Contact,
    answers: Answers = MappingProxyType({}),
) -> AsyncIterator[None]:
    """Answer commands inside the block. The caller holds the lock of `folder`.

    `contact` tells how the node stands with its coordinator. `answers` are those to further questions.
    """
    try:
        listening = _listen(folder)
    except OSError as error:  # such as a network file system
        log.warning("'hetnode pause' cannot reach this node: no socket in %s: %s", folder, error)
        yield
        return
    server = await asyncio.start_unix_server(
        partial(_answer, guest, contact, answers), sock=listening, limit=_MOST_BYTES
    )
    try:
        yield
    finally:
        server.close()
        with suppress(OSError):
            (folder / _SOCKET).unlink()


def ask(folder: Path, question: Ask) -> GuestState:
    """The state of the node in `folder` after it has done what it was asked. Raises as :func:`ask_for`."""
    return GuestState(**ask_for(folder, question))


def ask_for(folder: Path, question: Ask) -> Any:
    """The answer of the node in `folder`, as plain data.

    Raises HetnodeError: NODE_NOT_RUNNING; BAD_OPTION if it is another user's; the node's own refusal.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection, chdir(folder):
            connection.settimeout(_SECONDS)
            connection.connect(_SOCKET)
            connection.sendall(json.dumps(question.value).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer = json.loads(stream.readline(_MOST_ANSWER_BYTES))
    except PermissionError:
        cause = f"The node that keeps {folder} is another user's."
        raise HetnodeError(ErrorCode.BAD_OPTION, cause, "Ask as that user.") from None
    except (OSError, ValueError):
        raise HetnodeError(
            ErrorCode.NODE_NOT_RUNNING,
            f"No node answers in {folder}.",
            "Start it with 'hetnode join', or name another with its folder.",
        ) from None
    if isinstance(answer, dict) and "refusal" in answer:
        code, cause, remedy = answer["refusal"]
        raise HetnodeError(ErrorCode.from_label(code), cause, remedy)
    return answer


async def _answer(
    guest: Guest,
    contact: Callable[[], Contact],
    answers: Answers,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    try:
        async with asyncio.timeout(_SECONDS):
            question = Ask(json.loads(await reader.readline()))
            found = answers[question]() if question in answers else _reply(guest, contact, question)
            writer.write(json.dumps(found).encode() + b"\n")
            await writer.drain()
    except (OSError, ValueError, TimeoutError) as error:
        log.debug("a command was not understood: %r", error)
    finally:
        writer.close()


def _reply(guest: Guest, contact: Callable[[], Contact], question: Ask) -> dict[str, object]:
    try:
        match question:
            case Ask.PAUSE:
                guest.pause()
            case Ask.PAUSE_AT_ONCE:
                guest.pause(_PATIENCE_AT_ONCE)
            case Ask.RESUME:
                guest.resume()
            case _:
                pass
    except HetnodeError as error:
        return {"refusal": (error.code.label, error.cause, error.remedy)}
    reason = "" if guest.rest is None else guest.rest.reason
    return asdict(GuestState(guest.is_here, reason, **asdict(contact())))


def _listen(folder: Path) -> socket.socket:
    """The socket in `folder`. Raises OSError."""
    (folder / _SOCKET).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    try:
        with chdir(folder):
            listening.bind(_SOCKET)
        (folder / _SOCKET).chmod(0o600)  # before `listen`: until then no process can connect
        listening.listen()
        return listening
    except OSError:
        listening.close()
        raise
