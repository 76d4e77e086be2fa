"""``hetnode receipt``, as it is typed: to get one, and to verify it offline."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from node.net.receipts import fetch_receipt, keep_receipt
from node.security.credentials import Credentials, RunCredentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.receipt import encode_receipt, open_receipt, sign_receipt
from tests.builders import keyed, spec_of
from tests.support import commands
from tests.support.coordinator_process import COORDINATOR, Running, certificate_of, running

A, B = keyed(0), keyed(1)


async def hetnode(*arguments: object) -> tuple[int, str, str]:
    result = await asyncio.to_thread(commands.hetnode, "receipt", *map(str, arguments))
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    """One round is committed. A is called José."""
    async with running(spec_of(stages=1), tmp_path / "run") as coordinator:
        await coordinator.join(A, name="José")
        await coordinator.join(B)
        await coordinator.settle(0, 1, A, B)
        yield coordinator


def credentials(run: Running, folder: Path) -> RunCredentials:
    key, certificate = certificate_of(run.authority, A)
    tls = Credentials(run.authority.pem, certificate, key)
    found = RunCredentials(folder, run.run, run.address, COORDINATOR.peer, None, tls)
    found.save()
    return found


async def test_a_receipt_from_its_making_to_the_check_by_others(run: Running, tmp_path: Path) -> None:
    folder, file = credentials(run, tmp_path / "credentials").folder, tmp_path / "receipt.json"
    status, out, errors = await hetnode(folder)
    assert (status, errors) == (0, "")
    assert out.splitlines()[:2] == ["{", '  "hetnode_receipt": 1,']
    file.write_text(out)
    await run.stop()
    status, out, errors = await hetnode(file)
    assert (status, errors) == (0, "")
    for part in (
        A.peer,
        COORDINATOR.peer,
        run.run,
        f"José (..{A.peer[-8:]})",
        "valid:",
        "Not proved",
        "--coordinator",
    ):
        assert part in out
    status, out, _ = await hetnode(file, "--coordinator", COORDINATOR.peer)
    assert status == 0
    assert "which you meant" in out


async def test_each_failure_of_a_receipt_has_its_code(run: Running, tmp_path: Path) -> None:
    receipt, data = await fetch_receipt(credentials(run, tmp_path / "credentials"))
    file = tmp_path / "receipt.json"
    changed = json.dumps(json.loads(data) | {"stage_tokens": receipt.stage_tokens + 1}).encode()
    for content, arguments, parts in (
        (changed, (), ("[receipt-forged]",)),
        (b"\x1b[31m" * 10**6, (), ("[receipt-unreadable]",)),
        (data, ("--coordinator", B.peer), ("[receipt-mismatch]",)),
    ):
        file.write_bytes(content)
        status, out, errors = await hetnode(file, *arguments)
        assert (status, out) == (3, "")
        assert all(part in errors for part in parts)
    assert "[no-credentials]" in (await hetnode(tmp_path))[2]


async def test_a_node_keeps_the_receipt_that_counts_furthest_when_it_leaves(
    run: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    held = credentials(run, tmp_path / "credentials")
    await keep_receipt(held, tmp_path)
    told = caplog.messages[-1]
    share = f"50.0% of what {run.spec.name} has trained is this node's"
    assert told.startswith(f"thank you: {share}, rank 1 of 2: ")
    assert f"1 of {run.spec.rounds} rounds are done, 2 peers took part" in told
    kept = tmp_path / "receipts" / f"{run.run}.json"
    first = open_receipt(kept.read_bytes())
    await run.settle(0, 2, A, B)
    await keep_receipt(held, tmp_path)
    second = open_receipt(kept.read_bytes())
    assert second.stage_tokens == 2 * first.stage_tokens
    # The operator has restored an older log.
    further = sign_receipt(replace(second, log_row=10**6), COORDINATOR.sign)
    kept.write_bytes(encode_receipt(further))
    await keep_receipt(held, tmp_path)
    assert open_receipt(kept.read_bytes()) == further


async def test_a_receipt_that_cannot_be_had_keeps_nobody_from_leaving(run: Running, tmp_path: Path) -> None:
    held = credentials(run, tmp_path / "credentials")
    (tmp_path / "receipts").write_text("not a folder")
    await keep_receipt(held, tmp_path)
    with pytest.raises(HetnodeError) as refused:
        await fetch_receipt(replace(held, coordinator=B.peer))
    assert refused.value.code is ErrorCode.WRONG_AUTHORITY
    await run.stop()
    await keep_receipt(held, tmp_path)
