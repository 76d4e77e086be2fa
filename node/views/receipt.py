"""A receipt in sentences: what it says, and what it proves."""

from __future__ import annotations

import time

from node.views.text import plain
from protocol.trust.public_name import shown_peer
from protocol.trust.receipt import Receipt


def receipt_text(receipt: Receipt) -> str:
    """What the receipt says."""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(receipt.time, 2**35)))
    rounds = f"rounds {receipt.first_round} to {receipt.last_round}"
    return "\n".join(
        (
            f"peer           {receipt.peer}",
            *((f"public name    {shown_peer(receipt.peer, receipt.name)}",) if receipt.name else ()),
            f"run            {plain(receipt.run)}",
            f"specification  {receipt.spec_hash}",
            f"stage tokens   {receipt.stage_tokens:,}",
            f"stage rounds   {receipt.stage_rounds:,} committed, in {rounds}",
            f"payload bytes  {receipt.payload_bytes:,}",
            f"counted up to  row {receipt.log_row} of the event log, hash {receipt.log_hash[:16]}",
            f"signed         {at}, as the coordinator's clock had it",
            f"coordinator    {receipt.coordinator}",
        )
    )


def proof_text(receipt: Receipt, is_known: bool) -> str:
    """What a valid signature proves and what it does not. `is_known`: the coordinator is the one meant."""
    if is_known:
        meant = "That is the coordinator which you meant."
    else:
        meant = (
            "Whether that is the coordinator of the run which you mean, the file cannot tell: compare the id "
            "with one that you have from its operator, or give it with --coordinator."
        )
    return (
        "\nvalid: the holder of the coordinator's key above has signed all of this, and nothing was changed. "
        f"{meant}\n\nNot proved: that the coordinator has counted honestly, which '--log' compares "
        "with a copy of the event log; who is behind the peer or its name; what was earned since."
    )
