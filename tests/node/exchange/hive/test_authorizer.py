"""A signed call of the DHT is of use to its receiver alone, and an answer to its caller alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hivemind.proto import dht_pb2

from node.exchange.hive.authorizer import CALLER, CertificateAuthorizer
from tests.builders import Keyed, keyed
from tests.support.certificates import credentials

RUN, OTHER_RUN = "nano-1-a", "nano-1-b"


@dataclass(frozen=True)
class Member:
    """A peer with a certificate of the one authority; `other_run` is the same peer in another run."""

    who: Keyed
    authorizer: CertificateAuthorizer
    other_run: CertificateAuthorizer

    @property
    def peer(self) -> str:
        return self.who.peer


def member(folder: Path, number: int) -> Member:
    who = keyed(number)
    tls = credentials(who.peer)
    certificate, authority = folder / f"{number}.pem", folder / "authority.pem"
    certificate.write_bytes(tls.certificate)
    authority.write_bytes(tls.authority)
    made = [CertificateAuthorizer(run, who.sign, certificate, authority) for run in (RUN, OTHER_RUN)]
    return Member(who, *made)


@pytest.fixture
def members(tmp_path: Path) -> tuple[Member, Member, Member]:
    return member(tmp_path, 1), member(tmp_path, 2), member(tmp_path, 3)


@pytest.fixture(autouse=True)
def caller() -> Iterator[None]:
    """Reset who calls, which libp2p proves."""
    token = CALLER.set("")
    yield
    CALLER.reset(token)


async def signed_request(sender: Member, receiver: Member) -> dht_pb2.FindRequest:
    request = dht_pb2.FindRequest(keys=[b"key"])
    await sender.authorizer.sign_request(request, receiver.peer)
    CALLER.set(sender.peer)
    return request


async def test_a_call_in_flight_is_refused_by_every_peer_but_its_receiver(
    members: tuple[Member, Member, Member],
) -> None:
    alice, bob, carol = members
    request = await signed_request(alice, bob)
    assert not await carol.authorizer.validate_request(request)
    # A peer that repeats the call cannot change its receiver.
    renamed = dht_pb2.FindRequest.FromString(request.SerializeToString())
    renamed.auth.service_public_key = carol.peer.encode()
    assert not await carol.authorizer.validate_request(renamed)
    assert await bob.authorizer.validate_request(request)


async def test_a_call_of_one_run_is_refused_in_another(members: tuple[Member, Member, Member]) -> None:
    alice, bob, _ = members
    request = await signed_request(alice, bob)
    assert not await bob.other_run.validate_request(request)


async def test_an_answer_counts_from_the_called_peer_to_its_caller_alone(
    members: tuple[Member, Member, Member],
) -> None:
    alice, bob, carol = members
    request = await signed_request(alice, bob)
    answer = dht_pb2.FindResponse()
    await bob.authorizer.sign_response(answer, request)
    assert await alice.authorizer.validate_response(answer, request)
    # The same answer, shown to another peer that asked with the same nonce.
    copied = dht_pb2.FindRequest.FromString(request.SerializeToString())
    assert not await carol.authorizer.validate_response(answer, copied)
    # The answer of another member of the run, in the place of that of the called one.
    stranger = dht_pb2.FindResponse()
    await carol.authorizer.sign_response(stranger, request)
    assert not await alice.authorizer.validate_response(stranger, request)
