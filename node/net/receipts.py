"""The receipts of a node: it asks its coordinator for one, verifies it, and keeps the newest."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from node.net.coordinator_channel import CoordinatorChannel, fetch_status
from node.security.credentials import RunCredentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import RunStatus
from protocol.trust.names import wrong_authority
from protocol.trust.private_file import write_private
from protocol.trust.receipt import Receipt, open_receipt, read_bounded
from protocol.wire.operator_calls import AskRank, AskReceipt, Rank

log = logging.getLogger(__name__)

_KEEP_SECONDS = 3.0
"""How long a node that leaves waits for its receipt."""


async def fetch_receipt(credentials: RunCredentials, seconds: float = 10.0) -> tuple[Receipt, bytes]:
    """The receipt of the peer to which `credentials` belong, and its file.

    Raises HetnodeError: COORDINATOR_UNREACHABLE; NO_CREDIT or another refusal; RECEIPT_UNREADABLE or
    RECEIPT_FORGED; WRONG_AUTHORITY if the receipt is of another coordinator or run.
    """
    async with CoordinatorChannel(credentials.api, credentials.tls) as channel:
        data = (await channel.ask(AskReceipt(), seconds)).encode()
    receipt = open_receipt(data)
    if (receipt.coordinator, receipt.run) != (credentials.coordinator, credentials.run):
        raise wrong_authority("The coordinator sent a receipt of another coordinator or run.")
    return receipt, data


async def keep_receipt(credentials: RunCredentials, folder: Path) -> None:
    """Fetch the receipt of a node that is about to leave, and keep it in ``receipts/RUN.json`` of `folder`.

    One that counts further stays: the operator may have restored an older log. Waits a short time at most and
    never raises: a node must be able to leave.
    """
    path = folder / "receipts" / f"{credentials.run}.json"
    try:
        async with asyncio.timeout(_KEEP_SECONDS):
            receipt, data = await fetch_receipt(credentials, _KEEP_SECONDS)
        with suppress(OSError, HetnodeError):
            if open_receipt(read_bounded(path)).log_row > receipt.log_row:
                return
        path.parent.mkdir(exist_ok=True)
        await asyncio.to_thread(write_private, path, data)
    except HetnodeError as error:
        if error.code is not ErrorCode.NO_CREDIT:
            log.warning("this node has got no receipt: %s", error)
    except (TimeoutError, OSError) as error:
        log.warning("this node has got no receipt (%s): 'hetnode receipt' asks again", error)
    else:
        log.info("a receipt for %d stage tokens is in %s", receipt.stage_tokens, path)
        with suppress(TimeoutError, HetnodeError):
            async with (
                asyncio.timeout(_KEEP_SECONDS),
                CoordinatorChannel(credentials.api, credentials.tls) as channel,
            ):
                rank = await channel.ask(AskRank(), _KEEP_SECONDS)
                status = await fetch_status(credentials.api, credentials.tls, _KEEP_SECONDS)
            log.info("%s", thanks(receipt, rank, status))


def thanks(receipt: Receipt, rank: Rank, status: RunStatus) -> str:
    """What the node of `receipt` has done for the run of `status`, and what that has reached."""
    done, spec = receipt.stage_tokens, status.spec
    share = done / max(1, done, status.tokens_committed * spec.swarm.stages)
    loss = "" if status.validation_loss is None else f", validation loss {status.validation_loss:.4f}"
    whose = " for its owner" if receipt.owner else ""
    return (
        f"thank you: {share:.1%} of what {spec.name} has trained is this node's, rank {rank.place:,} of "
        f"{rank.peers:,}{whose}: {done:,} stage tokens in {receipt.stage_rounds:,} stage rounds; "
        f"{status.rounds_decided} of {spec.rounds} rounds are done, {len(status.peers)} peers took part{loss}"
    )
