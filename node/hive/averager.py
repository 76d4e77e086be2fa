"""The averager process of one stage: hivemind's averager, with an all-gather in place of the all-reduce.

hivemind brings the peer-to-peer layer, matchmaking and the step. Stock all-reduce cannot be used: peers would
disagree after a partial failure, and sparse payloads cannot be summed in parts. So the members of a group
gather each other's payload bytes, checked against what their owners signed, and later serve them to whoever
asks; what is applied is decided elsewhere.

The process has two sides: :func:`node.ipc.channel.serve` answers the host's calls in threads, and hivemind's
event loop does the work.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2P, PeerID
from hivemind.utils import get_dht_time

from node.hive.allow_list import AllowList, Gated
from node.hive.lifetime import end_with_parent
from node.hive.matchmaking import WINDOW_SECONDS, RoundMatchmaking, RoundStep
from node.hive.payload_exchange import PayloadPeer, stage_prefix
from node.ipc.channel import Buffer, Connection, Reply, serve
from node.transport.payload_store import PayloadStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.envelope import is_authentic, misfit
from protocol.types import ExchangeGroup, PayloadDescriptor
from protocol.wire.convert.payloads import group_from_pb, state_from_pb
from protocol.wire.records import descriptor_from_bytes, descriptor_to_bytes

log = logging.getLogger(__name__)
T = TypeVar("T")

_CALL_THREADS = 64
_REQUEST_SECONDS = 1.5  # to answer a request to join a group; must be below the matchmaking window


_Gathered = tuple[list[PayloadDescriptor], dict[PayloadDescriptor, str]]
"""What is held at the end of a round, and what was refused, with the reason."""


@dataclass(frozen=True)
class Storage:
    """What the averager of a stage keeps.

    `capacity` is the largest payload in bytes: peers that announce a larger one are left out. Payloads of
    `keep_rounds` rounds stay in the folder `payloads`; `checkpoints` is that of this node's checkpoints.
    """

    capacity: int
    payloads: Path
    keep_rounds: int
    checkpoints: Path


class SparseAverager(DecentralizedAverager):
    """Gathers, holds and serves the payloads of one stage.

    Args:
        roster: the peers that may call this one, until told otherwise.
        sockets: folder that is removed when this process finds its parent dead.
    """

    # hivemind caches a class's remote calls in these; inherited, they would bear the other class's name.
    _rpc_handlers = _stub_type = None

    def __init__(
        self, dht: DHT, run: str, stage: int, storage: Storage, allow_list: Sequence[str], sockets: Path
    ) -> None:
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
        self._run_id, self._stage, self._storage, self._sockets = run, stage, storage, sockets
        self._allow_list = AllowList(allow_list)
        self._host_end, self._own_end = socket.socketpair()
        self._opened = threading.Event()

    # In the host process

    def launch(self) -> None:
        """Fork the averager process; wait for it with `wait_until_ready`."""
        self.start()
        self._own_end.close()
        self.calls = Connection(self._host_end, f"averager of stage {self._stage}", ErrorCode.HIVEMIND_DIED)

    # In the averager process: the host's calls, in threads of their own

    def run(self) -> None:
        end_with_parent(self._parent_pid, self._sockets)
        self._host_end.close()
        threading.Thread(target=self._run_or_end, name="hivemind", daemon=True).start()
        # hivemind runs what comes through its control pipe on its event loop, once that is ready.
        self._outer_pipe.send(("_open", [], {}))
        handlers = {
            "exchange": self._on_exchange,
            "fetch": self._on_fetch,
            "fetch_state": self._on_fetch_state,
            "admit": self._on_admit,
        }
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
        group = group_from_pb(pb.MatchReply.FromString(matched[0])) if matched else None
        held, refused = self._in_loop(
            self._exchange(payload, descriptor_from_bytes(own), group, body["expected"], body["deadline"])
        )
        return Reply({"refused": list(refused.values())}, [*map(descriptor_to_bytes, (*held, *refused))])

    def _on_fetch(self, body: Mapping[str, Any], blobs: Sequence[Buffer]) -> Reply:
        async def fetch() -> bytes:
            descriptor = descriptor_from_bytes(bytes(blobs[0]))
            return await self._payloads.fetch(descriptor, body["holders"], body["deadline"])

        return Reply({}, [self._in_loop(fetch())])

    def _on_fetch_state(self, body: Mapping[str, Any], blobs: Sequence[Buffer]) -> Reply:
        async def fetch() -> None:
            record = state_from_pb(pb.StateRecord.FromString(bytes(blobs[0])))
            await self._payloads.fetch_state(
                record, body["donors"], body["nbytes"], body["header"], Path(body["into"]), body["deadline"]
            )

        self._in_loop(fetch())
        return Reply({})

    def _on_admit(self, body: Mapping[str, Any], _: Sequence[Buffer]) -> Reply:
        self._allow_list.admit(body["peers"])
        return Reply({})

    # In the averager process: on the event loop

    async def add_p2p_handlers(self, p2p: P2P, wrapper: object = None, **options: Any) -> None:
        """hivemind's hook, called by its event loop: nobody but the roster may call."""
        await super().add_p2p_handlers(p2p, Gated(self, self._allow_list), **options)

    async def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._one_round = asyncio.Lock()  # over the two fields below
        self._own: PayloadDescriptor
        self._ends: float  # of the exchange, on the event loop's clock
        storage = self._storage
        store = PayloadStore(storage.payloads, storage.keep_rounds)
        self._payloads = PayloadPeer(
            self._p2p, self._run_id, self._stage, storage.capacity, store, storage.checkpoints
        )
        if not self.client_mode:
            await self._payloads.serve(self._allow_list)
        self._matchmaking = RoundMatchmaking(
            self._p2p, self.schema_hash, self.dht, client_mode=self.client_mode, **self.matchmaking_kwargs
        )
        self._opened.set()

    async def _exchange(
        self,
        payload: bytes,
        own: PayloadDescriptor,
        group: ExchangeGroup | None,
        expected: int,
        seconds: float,
    ) -> _Gathered:
        """One averaging step of hivemind."""
        ends = self._loop.time() + seconds
        # An earlier round that is still waiting for payloads has no reader any more.
        self._payloads.break_off()
        async with self._one_round:
            self._own, self._ends = own, ends
            with self._payloads.exchange(own.round_number):
                await self._payloads.hold(own, payload)
                if group is None and expected < 2:
                    return [own], {}
                return await self._step_with(group, expected, seconds)

    async def _step_with(self, group: ExchangeGroup | None, expected: int, seconds: float) -> _Gathered:
        own = self._own
        self._matchmaking.prepare(own.round_number, expected, None if group is None else _group_info(group))
        step = RoundStep(
            scheduled_time=get_dht_time() + WINDOW_SECONDS,
            deadline=get_dht_time() + seconds / 2,  # of matchmaking; the other half is for the payloads
            allow_retries=False,
            weight=own.weight,
            data_for_gather=descriptor_to_bytes(own),
        )
        await self._step(step=step, future_for_init=self._loop.create_future())
        problem = step.exception()
        if problem is not None:
            log.info("stage %d, round %d: nothing was exchanged: %s", self._stage, own.round_number, problem)
            return [own], {}
        gathered: _Gathered = step.result()
        return gathered

    async def _aggregate_with_group(self, group_info: GroupInfo, **_: object) -> _Gathered:
        """hivemind's hook, called by its step with the group: gather until all is held or time is up."""
        own = self._own
        announced = {own.owner: own}
        refused = {}
        for peer, gathered in zip(group_info.peer_ids, group_info.gathered, strict=True):
            try:
                descriptor = descriptor_from_bytes(gathered)
                problem = _problem(descriptor, peer.to_base58(), own, self._storage.capacity)
                if peer.to_base58() not in self._allow_list:
                    problem = "it is not in the plan"
            except HetnodeError as error:
                problem = error.cause
            if problem:
                log.warning("left %s out of round %d: %s", peer, own.round_number, problem)
            elif misfits := misfit(descriptor, own):
                log.warning("left %s out of round %d: %s", peer, own.round_number, misfits)
                refused[descriptor] = misfits
            else:
                announced.setdefault(descriptor.owner, descriptor)
        others = [descriptor for owner, descriptor in announced.items() if owner != own.owner]
        remaining = max(0.0, self._ends - self._loop.time())
        faults = await self._payloads.gather(own, others, remaining, push=self.client_mode)
        refused |= {announced[owner]: why for owner, why in faults.items()}
        store = self._payloads.store
        held = [each for each in announced.values() if store.has(each.round_number, each.sha256)]
        return held, refused

    @contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        """There is no all-reduce to register: hivemind then refuses every request for one."""
        self._pending_groups_registered.set()
        yield


def _problem(descriptor: PayloadDescriptor, peer: str, own: PayloadDescriptor, capacity: int) -> str | None:
    """Why what a groupmate announced cannot be part of the round of `own`; None if it can."""
    if descriptor.owner != peer:
        return "it announced the payload of another peer"
    if (descriptor.run, descriptor.stage, descriptor.round_number) != (own.run, own.stage, own.round_number):
        return "it announced a payload of another run, stage or round"
    if descriptor.nbytes > capacity:
        return (
            f"it announced {descriptor.nbytes} bytes, more than the {capacity} of any payload of this stage"
        )
    if not is_authentic(descriptor):
        return "the signature of what it announced is not valid"
    return None


def _group_info(group: ExchangeGroup) -> GroupInfo:
    """The coordinator's group in the form in which hivemind's matchmaking would have found it."""
    # The owner of a descriptor that is not authentic need not even be a peer id.
    authentic = tuple(filter(is_authentic, group.descriptors))
    if len(authentic) < len(group.descriptors):
        log.warning("left those out of group %s whose signature is not valid", group.group_id)
    return GroupInfo(
        group.group_id.encode(),
        tuple(PeerID.from_base58(descriptor.owner) for descriptor in authentic),
        tuple(map(descriptor_to_bytes, authentic)),
    )
