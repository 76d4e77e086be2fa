"""The receipts of a node: it asks its coordinator for one, verifies it, and keeps the newest."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from node.net.coordinator_channel import CoordinatorChannel
from node.security.credentials import RunCredentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.names import wrong_authority
from protocol.trust.receipt import MAX_BYTES, Receipt, open_receipt
from protocol.types import PeerId
from protocol.wire.operator_calls import AskReceipt

log = logging.getLogger(__name__)

_FOLDER = "receipts"
_KEEP_SECONDS = 3.0
"""How long a node that leaves waits for its receipt."""


async def fetch_receipt(
    credentials: RunCredentials, peer: PeerId, seconds: float = 10.0
) -> tuple[Receipt, bytes]:
    """The receipt of `peer`, to which `credentials` belong, and its file.

    Raises HetnodeError: COORDINATOR_UNREACHABLE; NO_CREDIT or another refusal; RECEIPT_UNREADABLE or
    RECEIPT_FORGED; WRONG_AUTHORITY if the receipt is of another coordinator, run or peer.
    """
    async with CoordinatorChannel(credentials.api, credentials.tls) as channel:
        data = (await channel.ask(AskReceipt(peer), seconds)).encode()
    receipt = open_receipt(data)
    expected = credentials.coordinator, credentials.run, peer
    if (receipt.coordinator, receipt.run, receipt.peer) != expected:
        raise wrong_authority("The coordinator sent a receipt of another coordinator, run or peer.")
    return receipt, data


async def keep_receipt(credentials: RunCredentials, peer: PeerId, folder: Path) -> None:
    """Fetch the receipt of a node that is about to leave, and keep it below `folder`.

    Waits a short time at most and never raises: a node must be able to leave.
    """
    try:
        async with asyncio.timeout(_KEEP_SECONDS):
            receipt, data = await fetch_receipt(credentials, peer, _KEEP_SECONDS)
            path = await asyncio.to_thread(store_receipt, folder, receipt, data)
    except HetnodeError as error:
        if error.code is not ErrorCode.NO_CREDIT:
            log.warning("this node has got no receipt: %s", error)
    except (TimeoutError, OSError) as error:
        log.warning("this node has got no receipt (%s): 'hetnode receipt get' asks again", error)
    else:
        log.info("a receipt for %d stage tokens is in %s", receipt.stage_tokens, path)


def store_receipt(folder: Path, receipt: Receipt, data: bytes) -> Path:
    """Keep the file of `receipt` below `folder`, and return its path.

    It replaces the former receipt of its run. One that counts further stays under another name: the operator
    may have restored an older log. Raises OSError.
    """
    kept = folder / _FOLDER
    kept.mkdir(exist_ok=True)
    path = kept / f"{receipt.run}.json"
    former = _opened(path)
    if former is not None and former.log_row > receipt.log_row:
        path.rename(kept / f"{receipt.run}.row-{former.log_row}.json")
    new = path.with_suffix(".new")
    new.write_bytes(data)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(path)
    return path


def _opened(path: Path) -> Receipt | None:
    try:
        return open_receipt(read_bounded(path))
    except (OSError, HetnodeError):
        return None


def read_bounded(path: Path) -> bytes:
    """As much of the file as tells that it is too long for a receipt. Raises OSError."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
