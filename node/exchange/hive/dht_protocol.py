"""The calls of the DHT, with bounds on what one caller can store, ask for, and put into routing tables."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any

import hivemind.dht.node
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.servicer import RPCHandler
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.auth import AuthRole, AuthRPCWrapper

from node.exchange.hive.authorizer import CALLER
from node.exchange.hive.records import owner_of
from node.exchange.hive.unary_calls import answer_calls, call_places

_MAX_KEYS = 16  # of one call; hivemind asks for as many at most
_KEY_BYTES = DHTID.HASH_NBYTES
_CALLS_PER_SECOND, _MOST_CALLS = 100.0, 500.0
_MAX_CALLERS = 4096


def node_id_of(peer: str) -> DHTID:
    """The place of `peer` in the DHT. It follows from the peer id, so that a peer cannot take several."""
    return DHTID.generate(source=peer)


class CallLimit:
    """Allows each caller `_MOST_CALLS` at once and `_CALLS_PER_SECOND` in the long run.

    It remembers the callers that called last; anyone can invent more peer ids.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # calls left, and when that was

    def allows(self, caller: str) -> bool:
        now = self._now()
        left, since = self._left.pop(caller, (_MOST_CALLS, now))
        left = min(_MOST_CALLS, left + (now - since) * _CALLS_PER_SECOND)
        self._left[caller] = (max(0.0, left - 1), now)
        if len(self._left) > _MAX_CALLERS:
            self._left.popitem(last=False)
        return left >= 1


class BoundedDHTProtocol(DHTProtocol):  # type: ignore[misc]  # hivemind has no type information
    """hivemind's DHT calls, of which each caller gets a bounded number.

    A caller can store entries of its own alone: no dictionaries, no caches, no entries of other peers. So
    the number of certificates bounds what this process holds. Answers are checked by the same rules.
    """

    # hivemind caches the remote calls here. An inherited cache would call the methods of the base class.
    _rpc_handlers: list[RPCHandler] | None = None
    _stub_type = None

    async def add_p2p_handlers(self, p2p: P2P, wrapper: Any = None, **_: Any) -> None:
        """As hivemind's, but this process decides how much of a call it reads."""
        self._collect_rpc_handlers()
        calls, places = _LimitedCalls(wrapper or self), call_places()
        for each in self._rpc_handlers or ():
            name = self._get_handle_name(None, each.method_name)
            await answer_calls(p2p, name, getattr(calls, each.method_name), each.request_type, places)

    async def remove_p2p_handlers(self, p2p: P2P, **_: Any) -> None:
        for each in self._rpc_handlers or ():
            await p2p.remove_binary_stream_handler(self._get_handle_name(None, each.method_name))

    def get_stub(self, peer: PeerID) -> AuthRPCWrapper:
        """As hivemind's, but the authorizer gets the peer id that the call is sent to."""
        stub = super(DHTProtocol, self).get_stub(self.p2p, peer)
        return AuthRPCWrapper(stub, AuthRole.CLIENT, self.authorizer, peer.to_base58())

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        caller = context.remote_id.to_base58()
        if request.peer.node_id:  # it does not only dial: into the routing table
            await self.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context)
        entries = list(
            zip(
                request.keys,
                request.subkeys,
                request.values,
                request.expiration_time,
                request.in_cache,
                strict=True,
            )
        )
        if len(entries) > _MAX_KEYS:
            raise ValueError(f"{len(entries)} entries in one call, more than {_MAX_KEYS}")
        stored = [
            not in_cache
            and owner_of(subkey) == caller
            and self._store(DHTRecord(key, subkey, value, expires))
            for key, subkey, value, expires, in_cache in entries
        ]
        return dht_pb2.StoreResponse(store_ok=stored, peer=self.node_info)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        keys = set(request.keys)
        if len(request.keys) > _MAX_KEYS or len(keys) < len(request.keys):
            raise ValueError(f"{len(request.keys)} keys in one call, more than {_MAX_KEYS} or some repeated")
        if any(len(key) != _KEY_BYTES for key in keys):
            raise ValueError("a key of another length")
        return await super().rpc_find(request, context)

    async def call_store(
        self, peer: PeerID, keys: Sequence[DHTID], values: Sequence[object], *arguments: Any, **options: Any
    ) -> list[bool] | None:
        """As hivemind's, but it sends no dictionaries: hivemind copies the entries of other peers so."""
        if any(isinstance(value, DictionaryDHTValue) for value in values):
            return [False] * len(keys)
        stored: list[bool] | None = await super().call_store(peer, keys, values, *arguments, **options)
        return stored

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> Any:
        """As hivemind's, without neighbours at places that are not theirs."""
        found = await super().call_find(peer, keys)
        if found is None:
            return None
        return {key: (value, self._rightly_placed(nearest)) for key, (value, nearest) in found.items()}

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        if node_id is None or node_id == node_id_of(peer_id.to_base58()):
            await super().update_routing_table(node_id, peer_id, responded)

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Drop what is not valid. hivemind would refuse all for one bad entry, which any member can write."""
        for subkey, (value, expires) in list(dictionary.items()):
            encoded = MSGPackSerializer.dumps(subkey)
            if not self.record_validator.validate(DHTRecord(key_bytes, encoded, value, expires)):
                del dictionary[subkey]
        return bool(dictionary)

    def _store(self, record: DHTRecord) -> bool:
        if len(record.key) != _KEY_BYTES or not self.record_validator.validate(record):
            return False
        key, subkey = DHTID.from_bytes(record.key), MSGPackSerializer.loads(record.subkey)
        held = self.storage.get(key)
        entry = held.value.get(subkey) if held is not None else None
        # hivemind remembers the expiration of every entry that it is given, also of those that it refuses.
        if entry is not None and record.expiration_time <= entry.expiration_time:
            return False
        return bool(self.storage.store_subkey(key, subkey, record.value, record.expiration_time))

    def _rightly_placed(self, nearest: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        some = list(nearest.items())[: self.bucket_size]
        return {place: peer for place, peer in some if place == node_id_of(peer.to_base58())}


# hivemind derives the names of remote calls from the class name.
BoundedDHTProtocol.__name__ = DHTProtocol.__name__


class _LimitedCalls:
    """Wraps the remote calls of `servicer`: a caller above its limit is refused before any work is done."""

    def __init__(self, servicer: Any) -> None:
        self._servicer, self._limit = servicer, CallLimit()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._servicer, name)

        @wraps(method)
        async def call(request: Any, context: P2PContext) -> Any:
            caller = context.remote_id.to_base58()
            if not self._limit.allows(caller):
                raise PermissionError("too many calls")
            CALLER.set(caller)  # the authorizer does not see the context
            return await method(request, context)

        return call


def use_bounded_protocol() -> None:
    """Let the DHTs of this process, and of those that it forks, answer with :class:`BoundedDHTProtocol`."""
    hivemind.dht.node.DHTProtocol = BoundedDHTProtocol
