"""The averager process of one stage: hivemind's averager, whose step exchanges payloads instead of tensors.

hivemind provides the peer-to-peer layer, matchmaking and the step. In its own all-reduce peers would disagree
after a partial failure. So the members of a group gather each other's payload bytes, verify them against the
signed descriptors, and serve them to other peers afterwards; or they agree on one result
(:func:`node.exchange.transport.member_exchange`). The coordinator decides what is applied.

:func:`node.ipc.channel.serve` takes the host's calls in threads; hivemind's event loop does the work.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2P, PeerID
from hivemind.utils import get_dht_time

from node.exchange.allow_list import AllowList
from node.exchange.hive.calls import Admit, EndRound, Exchange, FetchCheckpoint, FetchPayload
from node.exchange.hive.lifetime import end_with_parent
from node.exchange.hive.matchmaking import RoundMatchmaking, RoundStep, SearchTimes
from node.exchange.hive.payload_peer import PayloadPeer
from node.exchange.hive.records import stage_prefix
from node.exchange.hive.stream_calls import AllowedCalls, GuardedStreams
from node.exchange.object_source import LentPayloads
from node.exchange.payload_service import checkpoint_server
from node.exchange.payload_store import PayloadStore
from node.exchange.transport import ExchangeResult, MemberExchange, ServedStages, member_exchange
from node.ipc.channel import Connection, serve
from node.ipc.stored_payload import StoredPayload
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.line import Line
from protocol.trust.envelope import Signer, is_authentic
from protocol.types import ExchangeGroup, PayloadDescriptor
from protocol.wire.records import descriptor_from_bytes, descriptor_to_bytes
from protocol.wire.typed_calls import handler

log = logging.getLogger(__name__)
R = TypeVar("R")
T = TypeVar("T")

_CALL_THREADS = 64


class SparseAverager(DecentralizedAverager):  # type: ignore[misc]  # hivemind has no type information
    """Exchanges, keeps and serves the payloads of one stage.

    hivemind derives the names of remote calls from this class name: renaming it changes the wire.

    Args:
        allow_list: the peers that may call this one at first.
        sign: with the key of this peer.
        sockets: a folder that is removed when the parent of this process has died.
    """

    # hivemind caches the remote calls here. An inherited cache would give them the name of the base class.
    _rpc_handlers = _stub_type = None

    def __init__(
        self,
        dht: DHT,
        run: str,
        stage: int,
        hosted: ServedStages,
        allow_list: Sequence[str],
        sign: Signer,
        sockets: Path,
    ) -> None:
        super().__init__(
            (),
            dht,
            start=False,
            prefix=stage_prefix(run, stage),
            allow_state_sharing=False,
        )
        # The run id contains the hash of the spec, thus of model and codec: peers of other runs are refused.
        self.schema_hash = hashlib.sha256(self.prefix.encode()).digest()
        self._run_id, self._stage, self._hosted, self._sockets = run, stage, hosted, sockets
        self._allow_list, self._sign = AllowList(allow_list), sign
        self._host_end, self._own_end = socket.socketpair()
        self._opened = threading.Event()

    # The host process runs these.

    def launch(self) -> None:
        """Fork the averager process; wait for it with `wait_until_ready`."""
        self.start()
        self._own_end.close()  # the child has its copy; an open one here would hide the child's death
        self.calls = Connection(self._host_end, f"averager of stage {self._stage}", ErrorCode.TRANSPORT_DIED)

    # The averager process runs these in threads, one for each call of the host.

    def run(self) -> None:
        end_with_parent(self._parent_pid, self._sockets)
        self._host_end.close()
        # hivemind's loop leaves the main thread to `serve`, which ends the process with the host's socket.
        threading.Thread(target=self._run_or_end, name="hivemind", daemon=True).start()
        # hivemind runs calls from its control pipe on its event loop once that is ready.
        self._outer_pipe.send(("_open", [], {}))
        handlers = {
            **handler(Exchange, self._in_loop(self._exchange)),
            **handler(EndRound, self._in_loop(self._end_round)),
            **handler(FetchPayload, self._in_loop(self._fetch_payload)),
            **handler(FetchCheckpoint, self._in_loop(self._fetch_checkpoint)),
            **handler(Admit, lambda request: self._allow_list.admit(request.peers)),
        }
        serve(self._own_end.detach(), handlers, threads=_CALL_THREADS)

    def _run_or_end(self) -> None:
        try:
            self._run_internal()
        finally:
            os._exit(1)  # an averager without its event loop is useless; its end tells the host

    def _in_loop(self, work: Callable[[R], Coroutine[Any, Any, T]]) -> Callable[[R], T]:
        def answer(request: R) -> T:
            self._opened.wait()  # `work` uses objects that `_open` makes
            return asyncio.run_coroutine_threadsafe(work(request), self._loop).result()

        return answer

    # The averager process runs these on the event loop.

    async def add_p2p_handlers(self, p2p: P2P, wrapper: object = None, **options: Any) -> None:
        """Restrict hivemind's remote calls to peers of the allow list. hivemind calls this at its start."""
        streams = GuardedStreams(p2p, self._allow_list)
        await super().add_p2p_handlers(streams, AllowedCalls(self, self._allow_list), **options)

    async def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._one_exchange = asyncio.Lock()  # protects the five fields below, and the reducers
        self._own: PayloadDescriptor
        self._payload: bytes
        self._ends: float  # end of the exchange on the event loop's clock
        self._group: ExchangeGroup | None  # of the coordinator
        self._lent: LentPayloads | None
        hosted = self._hosted
        store = PayloadStore(hosted.folder_of(self._stage), hosted.keep_rounds)
        line = Line.from_environment()
        self._peer = PayloadPeer(
            self._p2p,
            self._run_id,
            self._stage,
            hosted.capacities[self._stage],
            store,
            checkpoint_server(hosted),
            line,
        )
        self._payloads = self._peer.service.payloads
        await self._peer.serve(self._allow_list)  # a node that only dials is asked over its own connections
        self._reduction: MemberExchange | None = None
        if (members := member_exchange(hosted.spec)) is not None:
            own = self._p2p, self._run_id, self._stage, hosted.spec, store, self._sign, line
            self._reduction = members(*own)
            await self._reduction.serve(self._allow_list)
        self._matchmaking = RoundMatchmaking(
            self._p2p, self.schema_hash, self.dht, client_mode=self.client_mode, **self.matchmaking_kwargs
        )
        self._opened.set()

    def _break_off(self) -> None:
        self._payloads.break_off()
        if self._reduction is not None:
            self._reduction.break_off()

    async def _end_round(self, request: EndRound) -> None:
        self._break_off()  # the round is over
        async with self._one_exchange:
            if self._reduction is not None:
                await self._reduction.end_round(request.ended)

    async def _fetch_payload(self, request: FetchPayload) -> StoredPayload:
        return await self._payloads.fetch(request.entry, request.deadline, request.lent)

    async def _fetch_checkpoint(self, request: FetchCheckpoint) -> None:
        await self._peer.service.fetch_checkpoint(request.download, request.deadline, request.lent)

    async def _exchange(self, request: Exchange) -> ExchangeResult:
        """One averaging step of hivemind."""
        own, ends = request.descriptor, self._loop.time() + request.deadline
        # The caller of an earlier exchange that still waits for payloads has given up.
        self._break_off()
        async with self._one_exchange:
            self._own, self._payload, self._ends, self._group = own, request.payload, ends, request.group
            self._lent = request.lent
            with self._payloads.exchange(own.round_number):
                # Stored before the group is known: members may ask for it as soon as they have matched.
                await self._payloads.hold(own, request.payload)
                # A group that this peer finds by itself is not the one in which others reduce.
                if request.group is None and (request.expected < 2 or self._reduction is not None):
                    return ExchangeResult((own,))
                return await self._step_with(request)

    async def _step_with(self, request: Exchange) -> ExchangeResult:
        own, group = request.descriptor, request.group
        matched = None if group is None else _group_info(group, own.run)
        times = SearchTimes.of_exchange(request.deadline)
        self._matchmaking.prepare(own.round_number, request.expected, matched, times)
        step = RoundStep(
            scheduled_time=get_dht_time() + times.window,
            deadline=get_dht_time() + times.search,
            allow_retries=False,  # a second group in the same round could hold other members
            weight=own.weight,
            data_for_gather=descriptor_to_bytes(own),
        )
        await self._step(step=step, future_for_init=self._loop.create_future())
        problem = step.exception()
        if problem is not None:
            log.info("stage %d, round %d: nothing was exchanged: %s", self._stage, own.round_number, problem)
            return ExchangeResult((own,))
        result: ExchangeResult = step.result()
        return result

    async def _aggregate_with_group(self, group_info: GroupInfo, **_: object) -> ExchangeResult:
        """Exchange the group's payloads until all have arrived or time is up. hivemind's step calls this."""
        remaining = max(0.0, self._ends - self._loop.time())
        if self._reduction is not None and self._group is not None:
            return await self._reduction.reduce(self._own, self._payload, self._group, remaining)
        return await self._gather(group_info, remaining)

    async def _gather(self, group_info: GroupInfo, seconds: float) -> ExchangeResult:
        announced = []
        for peer_id, gathered in zip(group_info.peer_ids, group_info.gathered, strict=True):
            try:
                descriptor = descriptor_from_bytes(gathered)
            except HetnodeError as error:
                log.warning("left %s out: %s", peer_id, error.cause)
                continue
            if descriptor.owner == peer_id.to_base58():
                announced.append(descriptor)
            else:
                log.warning("left %s out: it announced the payload of another peer", peer_id)
        return await self._peer.service.exchange(
            self._own,
            announced,
            seconds,
            allow_list=self._allow_list,
            push=self.client_mode,
            group=self._group,
            lent=self._lent,
        )

    @contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        """Register no all-reduce, so that hivemind refuses each request for one."""
        self._pending_groups_registered.set()
        yield


def _group_info(group: ExchangeGroup, run: str) -> GroupInfo:
    """The coordinator's group in the form in which hivemind's matchmaking would have found it."""
    # Without a valid signature the owner may be any text, and PeerID.from_base58 would raise.
    authentic = tuple(each for each in group.descriptors if is_authentic(each, run))
    if len(authentic) < len(group.descriptors):
        log.warning("left descriptors without a valid signature out of group %s", group.group_id)
    return GroupInfo(
        group.group_id.encode(),
        tuple(PeerID.from_base58(descriptor.owner) for descriptor in authentic),
        tuple(map(descriptor_to_bytes, authentic)),
    )
