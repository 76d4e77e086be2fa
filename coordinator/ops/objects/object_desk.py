"""Lends members URLs of the object store, and removes what is old."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from math import inf

from coordinator.api.access import AccessControl, certificate_refused
from coordinator.membership.validation import bad_request, live_peer, max_payload_bytes
from coordinator.ops.objects.keys import oldest_round, payload_key, round_of
from coordinator.ops.objects.s3_store import S3Store, StoreFailed
from coordinator.ops.objects.uploads import newest_parts, segment_key, uploader, whole_parts
from coordinator.run.command_loop import CommandLoop
from coordinator.run.state.state import State
from protocol.server.calls import Context, rate_limited
from protocol.spec.run import RunSpec
from protocol.trust.names import identity_of, peer_of
from protocol.trust.rate_limit import RateLimit
from protocol.types import PayloadDescriptor, PeerId
from protocol.wire.object_calls import (
    MOST_ASKED,
    SEGMENT_BYTES,
    AskUploads,
    LendPart,
    LendPayloads,
    LendSegment,
    PayloadUrls,
    WantedUpload,
)

log = logging.getLogger(__name__)

_AT_ONCE, _PER_SECOND = 256, 20.0
"""Calls of one peer: one a round and stage, and one for each payload of a round that it has missed."""
_LEAST_LIFE, _MOST_LIFE = 120, 3600
_LOOK_SECONDS, _LEAST_SECONDS, _COMPUTED_SECONDS = 30.0, 5.0, 2.0
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
    """Answers the calls of :mod:`protocol.wire.object_calls`. `store` None is that of a run without one."""

    def __init__(self, access: AccessControl, command_loop: CommandLoop, store: S3Store | None) -> None:
        self._access, self._command_loop, self._store = access, command_loop, store
        self._rate = RateLimit(_AT_ONCE, _PER_SECOND)
        self._whole: dict[WantedUpload, list[str]] = {}  # what the store had when it was looked at
        self._wanted: dict[WantedUpload, tuple[float, tuple[PeerId, ...]]] = {}  # since when, and who has it
        self._computed_at = self._looked_at = -inf

    async def lend(self, call: LendPayloads, context: Context) -> PayloadUrls | None:
        """Raises HetnodeError: BAD_REQUEST, RATE_LIMITED; UNKNOWN_PEER for a peer that is not live."""
        peer, state = self._caller(context), self._command_loop.state
        if self._store is None:
            return None
        is_known = 0 <= call.stage < state.stages and 0 < call.round_number <= state.current_round
        if len(call.sha256s) > MOST_ASKED or not all(map(_HASH.fullmatch, call.sha256s)):
            raise bad_request(f"{peer} asks for payloads by what are no hashes, or too many")
        if not is_known:
            return PayloadUrls()
        own = may_upload(state, peer, call.stage, call.round_number)
        return await asyncio.to_thread(self._urls, self._store, call, own)

    def _urls(self, store: S3Store, call: LendPayloads, own: PayloadDescriptor | None) -> PayloadUrls:
        run = self._command_loop.state.run

        def key(sha256: str) -> str:
            return payload_key(run, call.stage, call.round_number, sha256)

        put = "" if own is None else store.signed_put(key(own.sha256), own.nbytes, own.sha256)
        return PayloadUrls(put, tuple(store.signed_get(key(each)) for each in call.sha256s))

    async def uploads(self, _: AskUploads, context: Context) -> tuple[WantedUpload, ...] | None:
        """Raises as :meth:`lend`."""
        peer = self._caller(context)
        return None if self._store is None else self._uploads_of(peer)

    async def lend_segment(self, call: LendSegment, context: Context) -> str | None:
        """Raises as :meth:`lend`."""
        peer, state = self._caller(context), self._command_loop.state
        if self._store is None:
            return None
        most = max_payload_bytes(state.spec) // SEGMENT_BYTES + 2  # values and momentum, as a value and index
        is_sized = 0 < call.nbytes <= SEGMENT_BYTES and 0 <= call.index < call.count <= most
        if not is_sized or not _HASH.fullmatch(call.sha256):
            raise bad_request(f"{peer} offers a segment of a part that cannot be one")
        if call.wanted not in self._uploads_of(peer):
            return ""
        key = segment_key(state.run, call.wanted, peer, call.index, call.count)
        return await asyncio.to_thread(self._store.signed_put, key, call.nbytes, call.sha256)

    async def lend_part(self, call: LendPart, context: Context) -> tuple[str, ...] | None:
        """Raises as :meth:`lend`."""
        self._caller(context)
        if (store := self._store) is None:
            return None
        if call.wanted not in self._whole and self._command_loop.now() - self._looked_at > _LEAST_SECONDS:
            with suppress(StoreFailed):  # it may have come since; peers are donors, too
                await self._look(store)
        keys = self._whole.get(call.wanted, ())
        return await asyncio.to_thread(lambda: tuple(map(store.signed_get, keys)))

    def _uploads_of(self, peer: PeerId) -> tuple[WantedUpload, ...]:
        now = self._command_loop.now()
        if now - self._computed_at > _COMPUTED_SECONDS:  # all members ask
            found = newest_parts(self._command_loop.state, self._whole)
            self._wanted = {each: (self._wanted.get(each, (now,))[0], found[each]) for each in found}
            self._computed_at = now
        return tuple(
            each for each, wanted in self._wanted.items() if uploader(wanted[1], wanted[0], now) == peer
        )

    def _caller(self, context: Context) -> PeerId:
        if (peer := peer_of(identity_of(context))) is None:
            raise certificate_refused("An object was asked for with the certificate of no peer")
        if not self._rate.allows(peer, self._command_loop.now()):
            raise rate_limited(f"Peer {peer} asks for objects too often")
        live_peer(self._command_loop.state, peer)
        return peer

    async def keep_clean(self) -> None:
        """Remove old objects and note what there is, again and again, also while the store fails."""
        if self._store is None:
            return
        works = True
        while True:
            try:
                await self._look(self._store)
                works = True
            except StoreFailed as error:
                log.log(logging.WARNING if works else logging.DEBUG, "%s; rounds go on without it", error)
                works = False
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self, store: S3Store) -> None:
        state, self._looked_at = self._command_loop.state, self._command_loop.now()
        left = await asyncio.to_thread(remove_old, store, state)
        self._whole = whole_parts(state.run, left)


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


def remove_old(store: S3Store, state: State) -> list[str]:
    """Remove the objects of rounds that no peer goes on from; the keys of the others. Raises StoreFailed."""
    oldest = oldest_round(state.spec, state.current_round)
    rounds = {key: round_of(state.run, key) for key, _ in store.objects(f"{state.run}/")}
    old = {key for key, its_round in rounds.items() if its_round is not None and its_round < oldest}
    store.remove(sorted(old))
    if old:
        log.info("removed %d old objects from the store", len(old))
    return [key for key in rounds if key not in old]
