"""Lends members URLs of the object store, and removes what is old."""

from __future__ import annotations

import asyncio
import logging
import re

from coordinator.api.access import AccessControl, certificate_refused
from coordinator.membership.validation import bad_request, live_peer
from coordinator.ops.objects.keys import oldest_round, payload_key, round_of
from coordinator.ops.objects.s3_store import S3Store, StoreFailed
from coordinator.run.command_loop import CommandLoop
from coordinator.run.state.state import State
from protocol.server.calls import Context, rate_limited
from protocol.spec.run import RunSpec
from protocol.trust.names import identity_of, peer_of
from protocol.trust.rate_limit import RateLimit
from protocol.types import PayloadDescriptor, PeerId
from protocol.wire.object_calls import MOST_ASKED, LendPayloads, PayloadUrls

log = logging.getLogger(__name__)

_AT_ONCE, _PER_SECOND = 256, 20.0
"""Calls of one peer: one a round and stage, and one for each payload of a round that it has missed."""
_LEAST_LIFE, _MOST_LIFE = 120, 3600
_CLEAN_SECONDS = 30.0
_HASH = re.compile(r"[0-9a-f]{64}")


async def open_objects(location: str, spec: RunSpec) -> S3Store | None:
    """The store at `location`; None for "". Raises HetnodeError BAD_OPTION."""
    if not location:
        return None
    # A URL is for one exchange, which takes `fetch` at most.
    life = min(_MOST_LIFE, max(_LEAST_LIFE, int(2 * spec.timing.fetch) + 60))
    store = await asyncio.to_thread(S3Store.at, location, life)
    log.info("payloads are also in the object store %s", location)
    return store


class ObjectDesk:
    """Answers :class:`LendPayloads`. `store` None is that of a run without one."""

    def __init__(self, access: AccessControl, command_loop: CommandLoop, store: S3Store | None) -> None:
        self._access, self._command_loop, self._store = access, command_loop, store
        self._rate = RateLimit(_AT_ONCE, _PER_SECOND)

    async def lend(self, call: LendPayloads, context: Context) -> PayloadUrls | None:
        """Raises HetnodeError: BAD_REQUEST, RATE_LIMITED; UNKNOWN_PEER for a peer that is not live."""
        peer = self._caller(context)
        if self._store is None:
            return None
        if len(call.sha256s) > MOST_ASKED or not all(map(_HASH.fullmatch, call.sha256s)):
            raise bad_request(f"{peer} asks for payloads by what are no hashes, or too many")
        own = may_upload(self._command_loop.state, peer, call.stage, call.round_number)
        return await asyncio.to_thread(self._urls, self._store, call, own)

    def _urls(self, store: S3Store, call: LendPayloads, own: PayloadDescriptor | None) -> PayloadUrls:
        run = self._command_loop.state.run

        def key(sha256: str) -> str:
            return payload_key(run, call.stage, call.round_number, sha256)

        put = "" if own is None else store.signed_put(key(own.sha256), own.nbytes, own.sha256)
        return PayloadUrls(put, tuple(store.signed_get(key(each)) for each in call.sha256s))

    def _caller(self, context: Context) -> PeerId:
        if (peer := peer_of(identity_of(context))) is None:
            raise certificate_refused("An object was asked for with the certificate of no peer")
        if not self._rate.allows(peer, self._command_loop.now()):
            raise rate_limited(f"Peer {peer} asks for objects too often")
        live_peer(self._command_loop.state, peer)
        return peer

    async def keep_clean(self) -> None:
        """Remove the objects of old rounds, again and again. A store that fails is asked again later."""
        if self._store is None:
            return
        done, works = 0, True
        while True:
            state = self._command_loop.state
            try:
                if state.current_round > done:
                    await asyncio.to_thread(remove_old, self._store, state)
                    done, works = state.current_round, True
            except StoreFailed as error:
                log.log(logging.WARNING if works else logging.DEBUG, "%s; rounds go on without it", error)
                works = False
            await asyncio.sleep(_CLEAN_SECONDS)


def may_upload(state: State, peer: PeerId, stage: int, round_number: int) -> PayloadDescriptor | None:
    """The payload that `peer` may upload for a (stage, round): that of its group, until the decision.

    A payload that is longer than those of most members is none, whatever its owner has signed.
    """
    group = state.round_of(stage, round_number).group
    if group is None or state.is_decided(stage, round_number):
        return None
    own = next((each for each in group.descriptors if each.owner == peer), None)
    lengths = sorted(each.nbytes for each in group.descriptors)
    return own if own is not None and own.nbytes <= lengths[len(lengths) // 2] else None


def remove_old(store: S3Store, state: State) -> None:
    """Remove the objects of rounds that no peer goes on from. Raises StoreFailed."""
    oldest = oldest_round(state.spec, state.current_round)
    found = ((key, round_of(state.run, key)) for key, _ in store.objects(f"{state.run}/"))
    old = [key for key, its_round in found if its_round is not None and its_round < oldest]
    store.remove(old)
    if old:
        log.info("removed %d old objects from the store", len(old))
