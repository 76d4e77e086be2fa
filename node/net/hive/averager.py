"""The averager process of one stage: hivemind's averager, with an all-gather in place of the all-reduce.

hivemind brings the peer-to-peer layer, matchmaking and the step. Stock all-reduce cannot be used: peers would
disagree after a partial failure, and sparse payloads cannot be summed in parts. So the members of a group
gather each other's payload bytes, checked against what their owners signed, and later serve them to whoever
asks; what is applied is decided elsewhere.

The process has two sides: :func:`node.net.ipc.serve` answers the host's calls in threads, and hivemind's
event loop does the work.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, AsyncIterator, TypeVar  # noqa: UP035 - hivemind knows only typing's in rpc signatures

from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2PContext, PeerID
from hivemind.utils import get_dht_time

from node.net.hive.lifetime import end_with_parent
from node.net.hive.matchmaking import WINDOW_SECONDS, RoundMatchmaking, RoundStep
from node.net.hive.store import PayloadStore
from node.net.hive.transfer import TransferError, chunks, receive
from node.net.ipc import Buffer, Connection, Reply, serve
from protocol.convert import descriptor_from_pb, descriptor_to_pb, group_from_pb
from protocol.envelope import is_authentic
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb.hetnode_pb2 import MatchReply
from protocol.pb.hetnode_pb2 import PayloadDescriptor as DescriptorMessage
from protocol.pb.payload_pb2 import PayloadChunk, PushReply
from protocol.records import descriptor_from_bytes, descriptor_to_bytes
from protocol.types import Group, PayloadDescriptor

log = logging.getLogger(__name__)
T = TypeVar("T")

KEEP_ROUNDS = 4
_CALL_THREADS = 64
_REQUEST_SECONDS = 1.5  # to answer a request to join a group; must be below the matchmaking window
_DIAL_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
_PUSHES = 2


def stage_prefix(run: str, stage: int) -> str:
    """Names the averagers of `stage` on the wire and in the DHT."""
    return f"{run}-stage-{stage}"


@dataclass
class _Round:
    """The round that this averager is exchanging: its own descriptor and what its group announced."""

    own: PayloadDescriptor
    ends: float  # on the event loop's clock
    announced: dict[str, PayloadDescriptor] = field(default_factory=dict)  # by owner


class SparseAverager(DecentralizedAverager):
    """Gathers, holds and serves the payloads of one stage.

    Args:
        capacity: the largest payload, in bytes; peers that announce a larger one are left out.
        folder: removed when this process finds its parent dead.
    """

    # hivemind caches a class's rpcs in these; inherited, they would hide the rpcs added here.
    _rpc_handlers = _stub_type = None

    def __init__(self, dht: DHT, run: str, stage: int, capacity: int, folder: Path) -> None:
        super().__init__(
            (),
            dht,
            start=False,
            prefix=stage_prefix(run, stage),
            min_matchmaking_time=WINDOW_SECONDS,
            request_timeout=_REQUEST_SECONDS,
            allow_state_sharing=False,
        )
        # The run names the hash of its spec, and with it model and codec: members of other runs are refused.
        self.schema_hash = hashlib.sha256(self.prefix.encode()).digest()
        self._run_id, self._stage, self._capacity, self._folder = run, stage, capacity, folder
        self._host_end, self._own_end = socket.socketpair()
        self._store = PayloadStore(KEEP_ROUNDS)
        self._opened = threading.Event()

    # In the host process

    def launch(self) -> None:
        """Fork the averager process; wait for it with `wait_until_ready`."""
        self.start()
        self._own_end.close()
        self.calls = Connection(self._host_end, f"averager of stage {self._stage}", ErrorCode.HIVEMIND_DIED)

    # In the averager process: the host's calls, in threads of their own

    def run(self) -> None:
        end_with_parent(self._parent_pid, self._folder)
        self._host_end.close()
        threading.Thread(target=self._run_or_end, name="hivemind", daemon=True).start()
        # hivemind runs what comes through its control pipe on its event loop, once that is ready.
        self._outer_pipe.send(("_open", [], {}))
        handlers = {"exchange": self._on_exchange, "fetch": self._on_fetch, "forget": self._on_forget}
        serve(self._own_end.detach(), handlers, threads=_CALL_THREADS)

    def _run_or_end(self) -> None:
        try:
            self._run_internal()
        finally:
            os._exit(1)  # an averager without its event loop is dead; the host must see it

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        self._opened.wait()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _on_exchange(self, body: Mapping[str, Any], blobs: Sequence[Buffer]) -> Reply:
        payload, own, *matched = map(bytes, blobs)
        group = group_from_pb(MatchReply.FromString(matched[0])) if matched else None
        held = self._in_loop(
            self._exchange(payload, descriptor_from_bytes(own), group, body["expected"], body["deadline"])
        )
        return Reply({}, [descriptor_to_bytes(descriptor) for descriptor in held])

    def _on_fetch(self, body: Mapping[str, Any], blobs: Sequence[Buffer]) -> Reply:
        descriptor = descriptor_from_bytes(bytes(blobs[0]))
        return Reply({}, [self._in_loop(self._fetch(descriptor, body["holders"], body["deadline"]))])

    def _on_forget(self, body: Mapping[str, Any], _: Sequence[Buffer]) -> Reply:
        async def forget() -> None:
            self._store.forget(body["before_round"])

        self._in_loop(forget())
        return Reply({})

    # In the averager process: on the event loop

    async def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._round: _Round | None = None
        self._one_round = asyncio.Lock()
        self._transfers: set[tuple[PeerID, str]] = set()  # that others have opened
        self._matchmaking = RoundMatchmaking(
            self._p2p, self.schema_hash, self.dht, client_mode=self.client_mode, **self.matchmaking_kwargs
        )
        self._opened.set()

    async def _exchange(
        self,
        payload: bytes,
        own: PayloadDescriptor,
        group: Group | None,
        expected: int,
        seconds: float,
    ) -> Iterable[PayloadDescriptor]:
        """One averaging step; what is held of the group's payloads at its end."""
        ends = asyncio.get_running_loop().time() + seconds
        async with self._one_round:
            self._store.put(own.round, own.sha256, payload)
            self._round = current = _Round(own, ends, {own.owner: own})
            if group is None and expected < 2:
                return [own]
            self._matchmaking.prepare(own.round, expected, None if group is None else _group_info(group))
            step = RoundStep(
                scheduled_time=get_dht_time() + WINDOW_SECONDS,
                deadline=get_dht_time() + seconds / 2,  # for matchmaking; the other half is for the payloads
                allow_retries=False,
                weight=own.weight,
                data_for_gather=descriptor_to_bytes(own),
            )
            await self._step(step=step, future_for_init=asyncio.get_running_loop().create_future())
            if step.exception() is not None:
                log.info("stage %d, round %d: no exchange: %s", self._stage, own.round, step.exception())
            return [
                descriptor
                for descriptor in current.announced.values()
                if self._store.get(descriptor.round, descriptor.sha256) is not None
            ]

    @contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        """There is no all-reduce to register: hivemind then refuses every request for one."""
        self._pending_groups_registered.set()
        yield

    async def _aggregate_with_group(self, group_info: GroupInfo, **_: object) -> None:
        """hivemind's hook, called by its step with the group: gather until all is held or time is up."""
        current = self._round
        assert current is not None, "a step runs within an exchange"
        for peer, gathered in zip(group_info.peer_ids, group_info.gathered, strict=True):
            self._admit(current, peer, gathered)
        others = sorted(set(current.announced) - {current.own.owner})
        work: list[Coroutine[Any, Any, object]] = [
            self._obtain(descriptor, [owner, *self._spread(set(others) - {owner})])
            for owner, descriptor in current.announced.items()
            if owner != current.own.owner
        ]
        if self.client_mode and others:
            work.append(self._push_own(current.own, self._spread(others)))
        if not work:
            return
        tasks = [asyncio.create_task(each) for each in work]
        remaining = current.ends - asyncio.get_running_loop().time()
        try:
            await asyncio.wait(tasks, timeout=max(0.0, remaining))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _admit(self, current: _Round, peer: PeerID, gathered: bytes) -> None:
        """Take note of what a groupmate announced, if it is its own and fits this round."""
        own = current.own
        try:
            descriptor = descriptor_from_bytes(gathered)
        except HetnodeError as error:
            log.warning("left %s out of round %d: %s", peer, own.round, error)
            return
        same_round = (descriptor.run, descriptor.stage, descriptor.round) == (own.run, own.stage, own.round)
        if descriptor.owner != peer.to_base58() or not same_round:
            problem = "it announced a payload of another peer, run, stage or round"
        elif descriptor.nbytes > self._capacity:
            problem = f"it announced {descriptor.nbytes} bytes, more than a payload can have"
        elif not is_authentic(descriptor):
            problem = "its signature is not valid"
        else:
            current.announced.setdefault(descriptor.owner, descriptor)
            return
        log.warning("left %s out of round %d: %s", peer, own.round, problem)

    def _spread(self, holders: Iterable[str]) -> list[str]:
        """The holders in an order of this peer's own, so that not everybody asks the same one first."""
        own = self.peer_id.to_base58()
        return sorted(holders, key=lambda holder: hashlib.sha256(f"{own}{holder}".encode()).digest())

    async def _fetch(self, descriptor: PayloadDescriptor, holders: Sequence[str], seconds: float) -> bytes:
        if descriptor.stage == self._stage and descriptor.nbytes > self._capacity:
            raise HetnodeError(
                ErrorCode.PAYLOAD_CORRUPT,
                f"The payload {descriptor.sha256[:16]} of {descriptor.owner} has {descriptor.nbytes} bytes, "
                f"more than the {self._capacity} that a payload of stage {descriptor.stage} can have.",
                "The coordinator committed what no peer may apply: tell its operator.",
            )
        reasons: dict[str, str] = {}
        try:
            async with asyncio.timeout(seconds):
                return await self._obtain(descriptor, self._spread(holders), reasons)
        except TimeoutError:
            tried = "; ".join(f"{holder}: {why}" for holder, why in reasons.items()) or "no answer in time"
            raise HetnodeError(
                ErrorCode.PAYLOAD_UNAVAILABLE,
                f"The payload {descriptor.sha256[:16]} of {descriptor.owner} (stage {descriptor.stage}, "
                f"round {descriptor.round}) could not be had from its {len(holders)} holders: {tried}.",
                "Wait for a holder to come back; without this payload the round cannot be applied.",
            ) from None

    async def _obtain(
        self,
        descriptor: PayloadDescriptor,
        holders: Sequence[str],
        reasons: dict[str, str] | None = None,
    ) -> bytes:
        """Ask one holder after the other until the payload is held; runs until cancelled if need be.

        Args:
            reasons: takes note of why each holder did not send it.
        """
        own_stage = descriptor.stage == self._stage
        pause = _FIRST_PAUSE
        while True:
            for holder in holders:
                held = self._store.get(descriptor.round, descriptor.sha256) if own_stage else None
                if held is not None:
                    return held
                if holder == self.peer_id.to_base58():
                    continue
                try:
                    payload = await self._fetch_from(holder, descriptor)
                except Exception as error:  # hivemind and libp2p raise anything here
                    log.debug("no payload from %s: %r", holder, error)
                    if reasons is not None:
                        reasons[holder] = str(error) or type(error).__name__
                    continue
                if own_stage:
                    self._store.put(descriptor.round, descriptor.sha256, payload)
                return payload
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _fetch_from(self, holder: str, descriptor: PayloadDescriptor) -> bytes:
        stub = self._stub(holder, descriptor.stage)
        stream = await asyncio.wait_for(stub.rpc_fetch(descriptor_to_pb(descriptor)), _DIAL_SECONDS)
        async with aclosing(stream):
            return await receive(stream, descriptor)

    def _stub(self, peer: str, stage: int) -> Any:
        namespace = stage_prefix(self._run_id, stage)
        return self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=namespace)

    async def rpc_fetch(self, request: DescriptorMessage, context: P2PContext) -> AsyncIterator[PayloadChunk]:
        """Send a held payload to any peer, in this group or not; one at a time per peer and payload."""
        payload = self._store.get(request.round, request.sha256)
        if payload is None:
            yield PayloadChunk(refusal="this peer does not hold that payload")
            return
        with self._transfer(context.remote_id, request.sha256) as alone:
            if not alone:
                yield PayloadChunk(refusal="that payload is being sent to you already")
                return
            for chunk in chunks(payload):
                yield chunk

    async def _push_own(self, own: PayloadDescriptor, listeners: Sequence[str]) -> None:
        """Nobody can dial this peer: hand its payload to a few groupmates, from whom the others get it."""
        payload = self._store.get(own.round, own.sha256)
        assert payload is not None, "the own payload is held since the exchange began"
        pause = _FIRST_PAUSE
        holders = 0
        while not holders:
            for listener in listeners:
                try:
                    await self._push_to(listener, own, payload)
                except Exception as error:  # hivemind and libp2p raise anything here
                    log.debug("%s did not take the payload: %r", listener, error)
                    continue
                holders += 1
                if holders == _PUSHES:
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _push_to(self, listener: str, own: PayloadDescriptor, payload: bytes) -> None:
        async def parts() -> AsyncIterator[PayloadChunk]:
            yield PayloadChunk(announced=descriptor_to_pb(own))
            for chunk in chunks(payload):
                yield chunk

        reply = await self._stub(listener, own.stage).rpc_push(parts())
        if reply.refusal:
            raise TransferError(f"refused: {reply.refusal[:200]}")

    async def rpc_push(self, stream: AsyncIterator[PayloadChunk], context: P2PContext) -> PushReply:
        """Take the payload that a peer of this round's group cannot be asked for."""
        first = await asyncio.wait_for(anext(stream), _DIAL_SECONDS)
        try:
            descriptor = descriptor_from_pb(first.announced)
        except HetnodeError as error:
            return PushReply(refusal=error.cause)
        announced = self._round.announced.get(context.remote_id.to_base58()) if self._round else None
        if announced != descriptor:
            return PushReply(refusal="this peer awaits no such payload from you now")
        if self._store.get(descriptor.round, descriptor.sha256) is not None:
            return PushReply()
        with self._transfer(context.remote_id, descriptor.sha256) as alone:
            if not alone:
                return PushReply(refusal="you are sending that payload already")
            try:
                payload = await receive(stream, descriptor)
            except (TransferError, TimeoutError) as error:
                return PushReply(refusal=str(error) or "too slow")
        self._store.put(descriptor.round, descriptor.sha256, payload)
        return PushReply()

    @contextmanager
    def _transfer(self, peer: PeerID, sha256: str) -> Iterator[bool]:
        """Whether this is the only transfer of that payload which `peer` has opened: more waste memory."""
        transfer = (peer, sha256)
        alone = transfer not in self._transfers
        self._transfers.add(transfer)
        try:
            yield alone
        finally:
            if alone:
                self._transfers.discard(transfer)


def _group_info(group: Group) -> GroupInfo:
    """The coordinator's group in the form in which hivemind's matchmaking would have found it."""
    # The owner of a descriptor that is not authentic need not even be a peer id.
    authentic = tuple(filter(is_authentic, group.descriptors))
    return GroupInfo(
        group.group_id.encode(),
        tuple(PeerID.from_base58(descriptor.owner) for descriptor in authentic),
        tuple(map(descriptor_to_bytes, authentic)),
    )
