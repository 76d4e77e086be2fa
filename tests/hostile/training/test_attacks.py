"""Certified peers that break the rules: the honest members of the run go on, and no process grows.

One swarm of real nodes serves all tests of this folder. Each attack ends with two more rounds of its members.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import grpc
import pytest

from tests.hostile.link import Link
from tests.hostile.peer import Peer, Refused
from tests.hostile.training.swarm import HONEST, attacked
from tests.hostile.wire import COORDINATOR, message, method, methods, tls_name
from tests.support.processes import ProcessSwarm

pytestmark = pytest.mark.hostile

STAGES = (0, 1)
GARBAGE_CALLS = 100
_SEED = 7


async def refusal_of(call: Any) -> str:
    with pytest.raises(Refused) as refused:
        await call
    return refused.value.code


async def test_claims_of_another_identity_are_refused(swarm: ProcessSwarm, attacker: Peer) -> None:
    victim = swarm.peer("one")
    with attacked(swarm):
        for name in methods("Coordinator"):
            _, request, _, *streams = method("Coordinator", name)
            if "peer" not in request.DESCRIPTOR.fields_by_name or any(streams):
                continue
            assert await refusal_of(attacker.call(name, peer=victim)) == "certificate-refused", name
        for name, asked in (("ListPeers", {}), ("BanPeer", {"peer": victim})):
            call = message("OperatorCall")(method=name, body=json.dumps(asked).encode())
            asking = attacker.raw("Ask", call.SerializeToString(), "Operator")
            assert await refusal_of(asking) == "certificate-refused", name
        stranger = Peer()
        assert await refusal_of(stranger.enroll(swarm.invite(), peer=victim)) == "bad-request"


def garbage(chance: random.Random, request: Any) -> bytes:
    """Random bytes; or a message with one random field, cut anywhere."""
    if chance.random() < 0.5:
        return chance.randbytes(chance.choice((0, 1, 7, 100, 5000)))
    made = request(**({"peer": "x" * 100} if "peer" in request.DESCRIPTOR.fields_by_name else {}))
    whole = made.SerializeToString() + chance.randbytes(chance.randrange(20))
    return bytes(whole[: chance.randrange(len(whole) + 1)])


async def test_garbage_at_every_call_is_refused(swarm: ProcessSwarm, attacker: Peer) -> None:
    chance, answers = random.Random(_SEED), set()
    with attacked(swarm):
        for service in ("Coordinator", "Operator"):
            for name in methods(service):
                _, request, _, *streams = method(service, name)
                if any(streams):
                    continue
                for _ in range(GARBAGE_CALLS):
                    try:
                        await attacker.raw(name, garbage(chance, request), service)
                    except Refused as refused:
                        answers.add((refused.status.name, refused.code))
    # Status takes no arguments: unknown fields are no error there.
    codes = {code or status for status, code in answers}
    # A connection with too many refused calls is closed.
    assert codes <= {"bad-request", "certificate-refused", "rate-limited", "UNAVAILABLE"}, codes


async def test_garbage_at_enrollment_is_refused(swarm: ProcessSwarm, attacker: Peer) -> None:
    chance = random.Random(_SEED)
    path, request, *_ = method("Enrollment", "Enroll")
    answers = set()
    with attacked(swarm):
        async with attacker.open(attacker.invite.enrollment, COORDINATOR) as channel:
            for _ in range(GARBAGE_CALLS):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await channel.unary_unary(path)(garbage(chance, request))
                answers |= {value for key, value in error.value.trailing_metadata() if key == "hetnode-code"}
    # Bytes of no field leave the version at 0.
    assert answers <= {"bad-request", "version-mismatch", "rate-limited"}


@pytest.mark.parametrize("name", ["Watch", "Probe"])
async def test_garbage_in_streams_ends_them(swarm: ProcessSwarm, attacker: Peer, name: str) -> None:
    chance = random.Random(_SEED)
    path, request, *_ = method("Coordinator", name)

    async def one() -> None:
        data = garbage(chance, request)
        stream = (
            attacker.channel.stream_stream(path)([data])
            if name == "Probe"
            else (attacker.channel.unary_stream(path)(data))
        )
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stream:
                pass
        assert error.value.code() is not grpc.StatusCode.UNAVAILABLE

    with attacked(swarm):
        for _ in range(GARBAGE_CALLS):
            await one()


async def test_unknown_names_and_huge_fields_are_refused(swarm: ProcessSwarm, attacker: Peer) -> None:
    huge = "x" * (1 << 20)
    capacity = message("Capacity")
    other = Peer()
    await other.enroll(swarm.invite())
    with attacked(swarm):
        for changes in (
            {"role": "no role"},
            {"role": huge},
            {"endpoint": huge},
            {"endpoint": "host:99999"},
            {"capacity": capacity(device=huge)},
            {"capacity": capacity(flops=float("nan"))},
            {"capacity": capacity(uplink=float("inf"))},
            {"capacity": capacity(memory_bytes=2**64 - 1)},
        ):
            assert await refusal_of(other.join(**changes)) == "bad-request", changes
        links = [message("LinkEstimate")(peer=f"peer {i}", bandwidth=1.0) for i in range(1000)]
        many = message("Estimates")(capacity=capacity(threads=1), links=links)
        assert await refusal_of(attacker.call("Heartbeat", estimates=many)) == "bad-request"
        own = attacker.descriptor(0, swarm.round_number)
        for name, value in (
            ("codec", huge),
            ("sha256", huge),
            ("weight", float("nan")),
            ("stage", 2**32 - 1),
        ):
            changed = message("PayloadDescriptor")()
            changed.CopyFrom(own)
            setattr(changed, name, value)
            assert await refusal_of(attacker.call("Match", descriptor=changed)) == "bad-request", name
        assert await refusal_of(attacker.attest(0, 1, huge)) == "bad-request"
        assert await refusal_of(attacker.attest(0, 1, part="no part")) == "bad-request"
        with pytest.raises(Refused) as refused:
            await attacker.raw("Heartbeat", bytes(5 << 20))
        assert refused.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        await other.close()


async def test_replays_do_not_count(swarm: ProcessSwarm, attacker: Peer) -> None:
    with attacked(swarm):
        decided = swarm.round_number
        decision = await attacker.call("AwaitDecision", stage=0, round=decided)
        old = [entry.descriptor for entry in decision.entries]
        assert old
        for descriptor in old:
            assert await refusal_of(attacker.call("Match", descriptor=descriptor)) == "bad-request"
        ahead = {"stage": 0, "round": decided + 1, "held": old}
        # While that round is open this is refused; after it, the answer is what was decided without them.
        (later,) = await asyncio.gather(attacker.call("Report", **ahead), return_exceptions=True)
        if isinstance(later, Refused):
            assert later.code == "bad-request"
        else:
            assert later.round == decided + 1
            counted = {entry.descriptor.sha256 for entry in later.entries}
            assert counted.isdisjoint(descriptor.sha256 for descriptor in old)
        # The proof of one enrollment says nothing about another key.
        stranger = Peer()
        await stranger.enroll(swarm.invite())
        proof = stranger.identity.key.sign(b"hetnode enrolment 1\n" + stranger.invite.pin)
        replayed = {"tls_public_key": stranger.tls.public, "proof": proof}
        assert await refusal_of(stranger.call("Renew", **replayed)) == "bad-request"
        await stranger.close()


async def test_four_thousand_attestations_of_one_round_are_bounded(
    swarm: ProcessSwarm, attacker: Peer
) -> None:
    with attacked(swarm):
        reserved = await reservation_of(attacker)
        stage, round_number = reserved.stages.first, swarm.round_number
        answers = []
        for start in range(0, 4000, 25):
            some = (attacker.attest(stage, round_number, f"digest {start + i}") for i in range(25))
            answers += await asyncio.gather(*some, return_exceptions=True)
        refused = {(each.status.name, each.code) for each in answers if isinstance(each, Refused)}
        # A connection with too many refused calls is closed.
        assert refused <= {("INVALID_ARGUMENT", "bad-request"), ("UNAVAILABLE", "")}
        # Each stored digest is a divergence, and a line. Digests of old rounds are answered and not stored.
        lines = [line for line in swarm.events("diverged") if line["peer"] == attacker.id]
        assert 0 < len(lines) <= 1 + 8


async def reservation_of(peer: Peer) -> Any:
    """The place that the coordinator keeps for a peer that has just joined."""
    async for update, _ in peer.updates():
        for place in update.followers:
            if place.peer == peer.id:
                return place
    raise AssertionError("the run has ended")


async def test_a_member_lies_about_its_place(swarm: ProcessSwarm, attacker: Peer, scout: Peer) -> None:
    """Its measurements must not count as those of an honest replica."""
    with attacked(swarm):
        plan = await assigned(swarm, attacker, scout)
        mine = next(r for r in plan.replicas if r.members[0].peer == attacker.id).index
        theirs = next(r for r in plan.replicas if r.members[0].peer != attacker.id).index
        number = plan.from_round
        for stage in STAGES:
            await attacker.call("AwaitDecision", stage=stage, round=number - 1)
        await attacker.call("Measure", round=number, replica=mine, position=0)
        for replica, position in ((theirs, 0), (mine, 1), (2**32 - 1, 2**32 - 1)):
            lie = {"round": number, "replica": replica, "position": position, "complete": True}
            assert await refusal_of(attacker.call("Measure", **lie)) == "bad-request"


async def honest_digest(scout: Peer, stage: int, round_number: int) -> str:
    """The coordinator tells the right digest to a peer that attests a wrong one."""
    await scout.call("AwaitDecision", stage=stage, round=round_number)
    while True:
        answer = await scout.attest(stage, round_number, "unknown")
        if not answer.agrees:
            return str(answer.expected)
        await asyncio.sleep(0.1)  # no honest member has attested yet


async def assigned(swarm: ProcessSwarm, peer: Peer, scout: Peer) -> Any:
    """Pretend to follow until a plan assigns the peer. Returns the plan."""
    plans = asyncio.create_task(plan_with(peer))
    while not plans.done():
        decided = swarm.round_number
        for stage in STAGES:
            await peer.attest(stage, decided, await honest_digest(scout, stage, decided))
        await asyncio.sleep(0.2)
    return plans.result()


async def plan_with(peer: Peer) -> Any:
    async for _, plan in peer.updates():
        if plan is not None and any(r.members[0].peer == peer.id for r in plan.replicas):
            return plan
    raise AssertionError("the run has ended")


async def test_a_member_of_the_group_offers_what_no_peer_can_fetch(
    swarm: ProcessSwarm, attacker: Peer, scout: Peer
) -> None:
    """It also rejects the payloads of all others, and says that it holds its own alone: it gets strikes."""
    with attacked(swarm) as watch:
        plan = await assigned(swarm, attacker, scout)
        rounds = range(plan.from_round, plan.from_round + 5)
        assert await refusal_of(offer_unavailable_payloads(attacker, scout, rounds)) == "quarantined"
    honest = {swarm.peer(name) for name in HONEST}
    assert all(set(each["owners"]) <= honest for each in watch.decisions)
    struck = [line["peer"] for line in swarm.events("peer") if line["change"] == "strike"]
    assert struck == 3 * [attacker.id]


async def offer_unavailable_payloads(attacker: Peer, scout: Peer, rounds: range) -> None:
    for number in rounds:
        await asyncio.gather(*(offer_unavailable_payload(attacker, scout, stage, number) for stage in STAGES))


async def offer_unavailable_payload(attacker: Peer, scout: Peer, stage: int, round_number: int) -> None:
    """One stage of a round."""
    anchor = await honest_digest(scout, stage, round_number - 1)
    await attacker.attest(stage, round_number - 1, anchor)
    own = attacker.descriptor(stage, round_number, anchor_digest=anchor)
    group = await attacker.offer(own)
    others = [each for each in group.descriptors if each.owner != attacker.id]
    rejected = [{"descriptor": each, "reason": "because"} for each in others]
    await attacker.call("Report", stage=stage, round=round_number, held=[own], rejected=rejected)


async def test_garbage_at_the_link_servers_of_nodes(swarm: ProcessSwarm, attacker: Peer) -> None:
    chance = random.Random(_SEED)
    plan = await attacker.first_plan()
    victims = [member for replica in plan.replicas for member in replica.members if member.endpoint]
    assert victims
    with attacked(swarm):
        for victim in victims:
            where = (victim.endpoint, victim.peer, plan.epoch, 2**32 - 1)
            with pytest.raises(Refused):
                await Link.dial(attacker, *where, replica=0, position=0)
            path, request, *_ = method("StageLink", "Exchange")
            channel = attacker.open(victim.endpoint, tls_name(victim.peer))
            for _ in range(GARBAGE_CALLS):
                stream = channel.stream_stream(path)([garbage(chance, request)])
                with pytest.raises(grpc.aio.AioRpcError):
                    async for _ in stream:
                        pass
            await channel.close()
