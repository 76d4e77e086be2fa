"""The store as one more source of payloads: it saves uplinks, and its faults cost nothing but time."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ops.objects.s3_store import S3Store
from node.checkpoint.download import TransferError, WrongBytes
from node.exchange.arrivals import Arrival
from node.exchange.object_client import ObjectClient, is_allowed
from node.exchange.object_exchange import seconds_to_wait
from node.exchange.object_source import LentPayloads
from node.exchange.payload_exchange import PayloadExchange
from node.exchange.payload_store import PayloadStore
from node.exchange.transfer import NotHeld
from protocol.types import ExchangeGroup, ManifestEntry, MemberLine, PayloadDescriptor
from protocol.wire.object_calls import PayloadUrls
from tests.builders import keyed, spec_of
from tests.support.object_store import LOCATION, object_store, wrong_store

HERE, NBYTES, BRIEF, PATIENT = 2, 30_000, 4.0, 60.0
SECRET = "X-Amz-Signature=secret"


@pytest.fixture(scope="module")
def store() -> Iterator[S3Store]:
    with object_store():
        yield S3Store.at(LOCATION, 600)


class Peers:
    """Members of one exchange, which call each other within this process."""

    def __init__(self, count: int, folder: Path, round_number: int) -> None:
        self.payloads = [os.urandom(NBYTES) for _ in range(count)]
        self.members = [
            replace(
                keyed(at).payload(spec_of(), 0, round_number),
                nbytes=NBYTES,
                sha256=hashlib.sha256(payload).hexdigest(),
            )
            for at, payload in enumerate(self.payloads)
        ]
        self.calls, self.are_away = 0, False
        calls: Any = self
        self.exchanges = {
            own.owner: PayloadExchange(own.owner, 0, NBYTES, PayloadStore(folder / str(at), 9), calls)
            for at, own in enumerate(self.members)
        }

    async def fetch(
        self,
        holder: str,
        descriptor: PayloadDescriptor,
        when_asked: Callable[[], None],
        arrival: Arrival | None = None,
    ) -> bytes:
        self.calls += 1
        when_asked()
        found = self.exchanges[holder].store.get(descriptor.round_number, descriptor.sha256)
        if self.are_away or found is None:
            raise NotHeld("not here")
        return found

    async def push(self, listener: str, own: PayloadDescriptor, payload: bytes) -> None:
        raise AssertionError("all members can be dialled")

    async def gather(
        self, put: Callable[[PayloadDescriptor], str], get: Callable[[str], str], seconds: float = BRIEF
    ) -> bool:
        """Whether all members hold all payloads after an exchange with such URLs."""

        async def one(own: PayloadDescriptor, payload: bytes) -> bool:
            exchange = self.exchanges[own.owner]
            others = [each for each in self.members if each != own]
            sha256s = tuple(each.sha256 for each in others)
            lent = LentPayloads(sha256s, PayloadUrls(put(own), tuple(map(get, sha256s))), HERE)
            with exchange.exchange(own.round_number):
                await exchange.hold(own, payload)
                assert not await exchange.gather(own, others, seconds, push=False, lent=lent)
            return all(map(exchange.holds, self.members))

        return all(await asyncio.gather(*map(one, self.members, self.payloads)))


def place(sha256: str) -> str:
    return f"run/round-000001/{sha256}"


async def test_a_payload_is_uploaded_once_and_read_by_all(store: S3Store, tmp_path: Path) -> None:
    peers = Peers(4, tmp_path, 1)
    peers.are_away = True  # nothing but the store connects the members
    put = [store.signed_put(place(each.sha256), NBYTES, each.sha256) for each in peers.members]
    urls = dict(zip(peers.members, put, strict=True))
    assert await peers.gather(urls.__getitem__, lambda sha256: store.signed_get(place(sha256)), PATIENT)
    assert peers.calls == 0
    assert sorted(store.objects("run/")) == sorted((place(each.sha256), NBYTES) for each in peers.members)
    # A member that was away finds a committed payload there when no holder sends it.
    late = PayloadExchange("late", 0, NBYTES, PayloadStore(tmp_path / "late", 9), peers)  # type: ignore[arg-type]
    wanted = peers.members[0]
    lent = LentPayloads((wanted.sha256,), PayloadUrls("", (store.signed_get(place(wanted.sha256)),)), HERE)
    found = await late.fetch(ManifestEntry(wanted, (wanted.owner,)), 30.0, lent)
    assert found.read(NBYTES) == peers.payloads[0]


@pytest.mark.parametrize(
    "kind", ["silent", "lying", "truncating", "endless", "redirecting", "dripping", "empty", "full", "broken"]
)
async def test_what_a_store_does_wrong_loses_no_payload_and_no_secret(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    peers = Peers(3, tmp_path, 1)
    async with wrong_store(kind, NBYTES) as (endpoint, requests):
        secret = f"{endpoint}/bucket/key?{SECRET}"
        assert await peers.gather(lambda _: secret, lambda _: secret)
    assert peers.calls >= 6
    assert requests
    assert not any("/inside" in each for each in requests), "a redirect was followed"
    assert "secret" not in caplog.text


async def test_an_owner_that_was_not_there_in_time_is_not_waited_for_again(tmp_path: Path) -> None:
    peers = Peers(3, tmp_path, 1)
    async with wrong_store("empty", NBYTES) as (endpoint, _), asyncio.timeout(PATIENT):
        assert await peers.gather(lambda _: endpoint, lambda _: endpoint)
        peers.members = [replace(each, round_number=2) for each in peers.members]
        assert await peers.gather(lambda _: endpoint, lambda _: endpoint, 1000 * PATIENT)


@pytest.mark.parametrize(
    ("address", "nearest"),
    [
        ("93.184.216.34", 0),
        ("2606:2800:220:1::1", 0),
        ("192.168.1.1", 1),
        ("10.0.0.1", 1),
        ("100.64.0.1", 1),
        ("fd00::1", 1),
        ("::ffff:10.0.0.1", 1),
        ("127.0.0.1", 2),
        ("::1", 2),
        ("::ffff:127.0.0.1", 2),
        ("169.254.169.254", 3),
        ("fe80::1%eth0", 3),
        ("0.0.0.0", 3),
        ("224.0.0.1", 3),
    ],
)
def test_a_url_leads_to_nothing_that_is_nearer_than_the_coordinator(address: str, nearest: int) -> None:
    assert [is_allowed(address, each) for each in range(3)] == [each >= nearest for each in range(3)]


async def test_a_url_of_another_kind_or_place_is_not_used() -> None:
    client = ObjectClient()
    async with wrong_store("lying", 10) as (endpoint, requests):
        port = endpoint.rpartition(":")[2]
        for url in (
            "file:///etc/passwd",
            "ftp://127.0.0.1/",
            "http://",
            "http://[",
            f"http://localhost:{port}/",
        ):
            with pytest.raises(TransferError):
                await client.get(url, 10, 1)
        with pytest.raises(WrongBytes):
            await client.get(endpoint, 9, HERE)
        assert len(requests) == 1
    with pytest.raises(TransferError, match="cannot be reached"):
        await client.get(endpoint, 9, HERE)


def group_of(lines: Sequence[MemberLine]) -> ExchangeGroup:
    members = (replace(keyed(at).payload(spec_of(), 0, 1), nbytes=1000) for at in range(len(lines)))
    return ExchangeGroup("group", tuple(members), lines=tuple(lines))


@given(
    st.lists(st.builds(MemberLine, st.integers(0, 10**6), st.integers(0, 10**6), st.booleans()), min_size=2),
    st.floats(0.1, 1000),
)
def test_the_wait_for_the_store_leaves_most_of_the_time_to_peers(
    lines: list[MemberLine], seconds: float
) -> None:
    group = group_of(lines[:12])
    own, other = group.descriptors[:2]
    wait = seconds_to_wait(own, other.owner, group, seconds)
    assert 0 < wait <= seconds / 4
    assert wait <= seconds_to_wait(own, other.owner, None, seconds) == seconds / 4


def test_a_slow_owner_is_waited_for_longer() -> None:
    group = group_of(
        [MemberLine(1000, 10_000, True), MemberLine(100, 10_000, True), MemberLine(10**6, 0, True)]
    )
    own, slow, fast = group.descriptors
    assert seconds_to_wait(own, fast.owner, group, 1000.0) == 3.0
    assert seconds_to_wait(own, slow.owner, group, 1000.0) == pytest.approx(3 * (10 + 0.2))
