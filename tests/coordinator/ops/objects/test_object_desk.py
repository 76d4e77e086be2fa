"""What a real coordinator lends of its store, to whom, and what it removes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import grpc
import pytest

from coordinator.ops.objects.keys import oldest_round, payload_key, round_of
from coordinator.ops.objects.object_desk import may_upload, remove_old
from coordinator.ops.objects.s3_store import S3Store, StoreFailed
from node.exchange.object_client import ObjectClient
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.envelope import sign_descriptor
from protocol.wire.object_calls import LendPayloads, PayloadUrls
from protocol.wire.rpc_errors import error_from_rpc
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import Running, refusal_of, running
from tests.support.coordinator_run import offer, started
from tests.support.object_store import LOCATION, credentials, object_store

A, B, C = (keyed(at) for at in range(3))
SPEC = spec_of(stages=1, replicas=2, rounds=40)
HASHES = tuple(hashlib.sha256(bytes([at])).hexdigest() for at in range(2))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with object_store() as store:
        yield store.endpoint


async def lent(run: Running, call: LendPayloads, **asks: object) -> PayloadUrls:
    found = await run.ask(call, **asks)  # type: ignore[arg-type]
    assert found is not None
    return found


async def test_members_get_urls_for_their_own_payload_and_those_of_others(
    endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    call = LendPayloads(0, 1, HASHES)
    async with running(SPEC, tmp_path, objects=LOCATION) as run:
        await run.join(A)
        assert await lent(run, call, peer=A) == PayloadUrls()
        await run.join(B)
        first = await lent(run, call, peer=A)
        assert (first.put, len(first.gets)) == ("", 2), "no group has closed"
        await asyncio.gather(run.match(A, 0, 1), run.match(B, 0, 1))
        urls = {peer: await lent(run, call, peer=peer) for peer in (A, B)}
        assert urls[A].put != urls[B].put
        assert urls[A].gets == urls[B].gets
        await run.join(C)
        assert not (await lent(run, call, peer=C)).put, "it is not in the group"
        for peer, found in urls.items():
            own = peer.payload(SPEC, 0, 1, run=run.run)
            put, query = urlsplit(found.put), parse_qs(urlsplit(found.put).query)
            assert found.put.startswith(f"{endpoint}/")
            assert put.path.endswith(f"pre/fix/{payload_key(run.run, 0, 1, own.sha256)}")
            signed = query["X-Amz-SignedHeaders"][0].split(";")
            assert signed == ["content-length", "content-type", "host", "x-amz-checksum-sha256"]
            assert 120 <= int(query["X-Amz-Expires"][0]) <= 3600
        await asyncio.gather(*(run.report(peer, 0, 1, A, B) for peer in (A, B)))
        assert not (await lent(run, call, peer=A)).put, "the round is decided"
        many = LendPayloads(0, 1, HASHES * 2049)
        for place in ((1, 1), (-1, 1), (0, 0), (0, 9)):
            assert await lent(run, LendPayloads(*place, HASHES), peer=A) == PayloadUrls()
        for wrong in (LendPayloads(0, 1, ("../secret",)), many):
            assert (await refusal_of(run.ask(wrong, A))).code is ErrorCode.BAD_REQUEST
        await run.stub(B).Leave(pb.LeaveRequest(peer=B.peer, reason="r"))
        for caller, code in ((B, ErrorCode.UNKNOWN_PEER), (None, ErrorCode.CERTIFICATE_REFUSED)):
            assert (await refusal_of(run.ask(call, caller))).code is code
        # At once: one after the other, a slow machine asks no faster than is allowed.
        asked = await asyncio.gather(*(run.ask(call, A) for _ in range(600)), return_exceptions=True)
        refused = [error_from_rpc(each) for each in asked if isinstance(each, grpc.aio.AioRpcError)]
        assert ErrorCode.RATE_LIMITED in {each.code for each in refused if each is not None}
    for secret in ("X-Amz-Signature", *credentials(endpoint).values()):
        assert secret in ("us-east-1", endpoint) or secret not in caplog.text
    assert "X-Amz" not in repr(urls)


async def test_a_run_without_a_store_lends_nothing(tmp_path: Path) -> None:
    async with running(SPEC, tmp_path) as run:
        await run.join(A)
        assert await run.ask(LendPayloads(0, 1, HASHES), A) is None


async def test_only_objects_of_old_rounds_of_this_run_are_removed(endpoint: str) -> None:
    store, state = S3Store.at(LOCATION, 600), replace(started(stages=1).state, run="of-ours")
    state = replace(state, current_round=100)
    oldest = oldest_round(state.spec, 100)
    rounds = [oldest - 2, oldest - 1, oldest, 100]
    keys = [payload_key(run, 0, each, HASHES[0]) for run in ("of-ours", "of-others") for each in rounds]
    for key in (*keys, "of-ours/notes"):
        await ObjectClient().put(store.signed_put(key, 1, HASHES[0]), b"\0", HASHES[0], 2)
    await asyncio.to_thread(remove_old, store, state)
    left = sorted(key for below in ("of-ours/", "of-others/") for key, _ in store.objects(below))
    assert left == sorted([*keys[2:], "of-ours/notes"])
    # A store that is away is an error of one kind, without a secret.
    elsewhere = S3Store.at("s3://no-such-bucket", 600)
    with pytest.raises(StoreFailed, match="NoSuchBucket"):
        await asyncio.to_thread(remove_old, elsewhere, state)


def test_a_payload_that_is_longer_than_those_of_most_is_not_taken() -> None:
    run = started(replicas=3, stages=1)
    for at, nbytes in enumerate((100, 100, 10_000)):
        peer = keyed(at)
        unsigned = replace(peer.payload(run.spec, 0, 1), nbytes=nbytes)
        offer(run, peer, sign_descriptor(unsigned, peer.sign))
    group = run.state.round_of(0, 1).group
    assert group is not None
    found = [may_upload(run.state, keyed(at).peer, 0, 1) is not None for at in range(3)]
    assert found == [True, True, False]
    assert may_upload(run.state, keyed(9).peer, 0, 1) is None
    assert may_upload(run.state, keyed(0).peer, 0, 2) is None


@pytest.mark.parametrize("key", ["run/round-1/x", "run/round-000001", "other/round-000001/x", "run/x", ""])
def test_what_is_no_object_of_a_round_is_nobodys(key: str) -> None:
    assert round_of("run", key) is None
    assert round_of("run", payload_key("run", 3, 1_234_567, HASHES[0])) == 1_234_567


@pytest.mark.parametrize("location", ["", "bucket", "s3://", "s3://b", "http://bucket/x", "s3://bucket/a b"])
def test_what_names_no_bucket_is_refused(location: str) -> None:
    with pytest.raises(HetnodeError) as error:
        S3Store.at(location, 600)
    assert error.value.code is ErrorCode.BAD_OPTION


def test_a_store_without_credentials_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in credentials(""):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(HetnodeError) as error:
        S3Store.at("s3://bucket", 600)
    assert error.value.code is ErrorCode.BAD_OPTION
