"""How a node enters a run and leaves it: credentials, joining, and the announcement that it leaves."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from node.data.own import location_of
from node.extras import can_read_all_data, require_for_data
from node.folder import agreed_spec, remember_agreed
from node.net.addresses import ClaimedPorts
from node.net.coordinator_channel import fetch_status
from node.net.coordinator_client import Admission, CoordinatorClient
from node.net.enrollment import clock_error, enroll, is_unknown_name, unknown_address
from node.net.membership import Membership, jittered
from node.net.waiting import CoordinatorWait
from node.security.channels import WrongClock
from node.security.credentials import RunCredentials, check_in_date, folder_of, load, of_authority, stamp
from node.security.identity import Identity
from protocol.errors import ErrorCode, HetnodeError, first_error
from protocol.roles import POLICIES, RoleWish
from protocol.server.clock import off_text
from protocol.spec.change import changed, restored
from protocol.spec.run import RunSpec
from protocol.status import RunStatus
from protocol.trust.host_port import split_host_port
from protocol.trust.invite import OPEN_INVITE, Invite
from protocol.trust.reachability import Addresses
from protocol.trust.run_id import check_run_id
from protocol.types import Capacity, PeerId, Role, RunChange

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_FORMER_SECONDS = 30.0  # until the coordinator takes a former process of this node for lost
_MOST_PAUSE = 8.0


async def obtain_credentials(
    invite: Invite | None, run: str, identity: Identity, wait: CoordinatorWait, relays: bool = False
) -> RunCredentials:
    """Trade `invite` for credentials; without one, load those for `run` that lie next to the identity.

    An invite is not used where the identity holds credentials in date for its run: of a relay if `relays`,
    else of a node.
    """
    if invite is None:
        credentials = load(folder_of(identity.path, run))
        await wait.answer(partial(_in_date, credentials, time.time))
        return await _located(credentials, (), wait)
    known = of_authority(identity.path, invite.pin)
    if known is not None and known.is_of_relay is relays and time.time() < known.tls.expires:
        log.info("already in run %s: the credentials in %s are used, not the invite", known.run, known.folder)
        return await _located(known, (invite.api,), wait)
    credentials = await wait.turn(
        lambda: wait.answer(lambda seconds: enroll(invite, identity, seconds)),
    )
    log.info("enrolled in run %s; its credentials are in %s", credentials.run, credentials.folder)
    if invite.id == OPEN_INVITE:
        log.info(
            "this node has no invite: its payloads count for nothing until they have agreed with those of "
            "the others for some rounds"
        )
    return credentials if known is None else replace(credentials, name=known.name)


async def _located(known: RunCredentials, more: Sequence[str], wait: CoordinatorWait) -> RunCredentials:
    """`known` with the address at which its coordinator answers; `more` are addresses to try, too."""
    addresses = tuple(dict.fromkeys((known.api, *known.others, *more)))
    if len(addresses) == 1:
        return known
    api = await wait.answer(partial(answering_address, known, addresses))
    return known if api == known.api else known.moved(api)


async def _in_date(credentials: RunCredentials, clock: Callable[[], float], seconds: float) -> None:
    """Check the node's own certificate by `clock`; where it has expired, also by what the coordinator shows.

    Raises HetnodeError CERTIFICATE_REFUSED; COORDINATOR_UNREACHABLE for a clock that is off.
    """
    try:
        check_in_date(credentials, clock())
    except HetnodeError as expired:
        more = f"; it ends at {stamp(credentials.tls.expires)}"
        raise (
            await clock_error(credentials, "This node's certificate has expired", seconds, more) or expired
        ) from None


async def answering_address(known: RunCredentials, addresses: Sequence[str], seconds: float) -> str:
    """The first of `addresses` at which the coordinator of the run answers.

    The coordinator may have moved, and neither address tells when it was valid. The authority proves who
    answers. Raises HetnodeError COORDINATOR_UNREACHABLE; WRONG_AUTHORITY if others answer at all of them.
    """
    failures = []
    for address in addresses:
        try:
            await fetch_status(address, known.tls, seconds / len(addresses))
        except HetnodeError as error:
            if error.code not in (ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.WRONG_AUTHORITY):
                return address  # a refusal is an answer, which the join repeats
            failures.append(error)
        else:
            return address
    raise next((each for each in failures if each.code is ErrorCode.COORDINATOR_UNREACHABLE), failures[0])


def wanted_role(chosen: RoleWish | None, credentials: RunCredentials) -> Role | None:
    """The role that binds: `chosen`, else the last one or the invite's; None if the coordinator chooses.

    Raises BAD_OPTION for a relay.
    """
    role = credentials.role if chosen is None else chosen.role
    if role is not None and not POLICIES[role].trains:
        remedy = "Type 'hetnode relay', or ask the operator for another invite."
        raise HetnodeError(ErrorCode.BAD_OPTION, "This invite is for a relay, which does not train.", remedy)
    return role


def wanted_name(chosen: str | None, credentials: RunCredentials) -> str:
    """The public name of this peer, or "": `chosen`, else the last one."""
    return credentials.name if chosen is None else chosen


@dataclass(frozen=True)
class RunOffer:
    """What this machine's owner is told of a run before the node takes part.

    Attributes:
        role: the one that binds, or None.
        address, pin: of the operator's coordinator, and of the authority.
        round_seconds: of its last rounds; None before there are any.
    """

    run: str
    spec: RunSpec
    role: Role | None
    capacity: Capacity
    address: str
    pin: bytes
    round_seconds: float | None


Ask = Callable[[RunOffer], Awaitable[None]]
"""Shows an offer. Raises an error if the owner does not want it."""


@dataclass(frozen=True)
class Agreement:
    """That this machine's owner has been told of a run, once for each specification; kept in `folder`.

    `ask` None: who starts the node knows the run.
    """

    folder: Path
    ask: Ask | None
    role: Role | None
    capacity: Capacity
    wait: CoordinatorWait

    async def before_join(
        self, credentials: RunCredentials, own_data: Sequence[str], tokenizer: str | None
    ) -> RunSpec | None:
        """Tell of a run that is new here, after a check (:func:`require_libraries`). Returns what was told.

        Raises as the answer to the question does.
        """
        await require_libraries(credentials, own_data, tokenizer, self.wait)
        if self.ask is None or agreed_spec(self.folder, credentials.run):
            return None
        if (status := await _shown_status(credentials, self.wait)) is None:
            return None
        await self.on(credentials, status.spec, seconds=status.expected_round_seconds)
        return status.spec

    async def on(
        self,
        credentials: RunCredentials,
        spec: RunSpec,
        told: RunSpec | None = None,
        seconds: float | None = None,
    ) -> None:
        """Tell of `spec`, unless it was agreed on, or `told` is what changes have made of it."""
        if self.ask is None or agreed_spec(self.folder, credentials.run) == spec.hash:
            return
        if told is None or not _is_changed(told, spec):
            address, pin = credentials.api, credentials.tls.pin
            await self.ask(RunOffer(credentials.run, spec, self.role, self.capacity, address, pin, seconds))
        remember_agreed(self.folder, credentials.run, spec.hash)


def _is_changed(spec: RunSpec, first: RunSpec) -> bool:
    """Whether `spec` differs from `first` only in settings that a run may change."""
    same = changed(first, [RunChange(1, restored(first, spec), "")])
    data = same.data.model_copy(update={"past": spec.data.past})
    return same.model_copy(update={"rounds": spec.rounds, "data": data}) == spec


async def _shown_status(credentials: RunCredentials, wait: CoordinatorWait) -> RunStatus | None:
    """The status of the run; None of a coordinator of another version, which says so at the join."""
    try:
        status = await wait.answer(lambda seconds: fetch_status(credentials.api, credentials.tls, seconds))
    except HetnodeError as error:
        if error.code not in (ErrorCode.BAD_SPEC, ErrorCode.BAD_REQUEST):
            raise
        return None
    check_run_id(credentials.run, status.spec, credentials.tls.pin)
    return status


async def require_libraries(
    credentials: RunCredentials, own_data: Sequence[str], tokenizer: str | None, wait: CoordinatorWait
) -> None:
    """Raise MISSING_EXTRA if this machine lacks a library that reads the data of the run.

    The node has not joined yet, so no other node counts on it. The coordinator is asked only where a library
    is missing.
    """
    if can_read_all_data():
        return
    if (status := await _shown_status(credentials, wait)) is not None:
        data = status.spec.data
        sources = [location_of(each, data, own_data, is_own_run=False)[0] for each in data.all_sources]
        require_for_data(data, sources, tokenizer)


async def join_run(
    coordinator: CoordinatorClient,
    role: Role | None,
    capacity: Capacity,
    addresses: Addresses,
    spec_hash: str,
    join_seconds: float,
    name: str = "",
) -> Admission:
    """Join. Waits while the coordinator still believes that a former process of this node is alive.

    Raises as :meth:`CoordinatorClient.join`; CERTIFICATE_REFUSED if the node's certificate has expired.
    """
    waited = 0.0
    while True:
        # This may be called again and again, for days.
        await _in_date(coordinator.credentials, coordinator.now, join_seconds)
        try:
            return await coordinator.join(role, capacity, addresses, spec_hash, join_seconds, name)
        except asyncio.CancelledError:
            await leave_run(coordinator, "stopped before the end")  # it may be admitted, with no answer yet
            raise
        except WrongClock as error:
            known = coordinator.credentials
            raise await clock_error(known, error.what, join_seconds, error.more) or error from None
        except HetnodeError as error:
            if error.code is not ErrorCode.ALREADY_ACTIVE or waited > _FORMER_SECONDS:
                raise
            log.info("%s", error.cause)
        pause = jittered(min(max(1.0, waited), _MOST_PAUSE))  # a few: the coordinator limits how many
        await asyncio.sleep(pause)
        waited += pause


def log_admission(admission: Admission, run: str, peer: PeerId, ports: ClaimedPorts, ahead: float) -> None:
    """Tell the volunteer the role of this node, who reaches it, and whether its clock is wrong."""
    log.info("joined run %s, peer %s, spec %s", run, peer, admission.spec.hash)
    policy, why = POLICIES[admission.role], admission.role_reason
    log.info("this node is a %s: %s%s", policy.noun, policy.summary, why and f"; {why}")
    ports.note_reached(admission.reached)
    if off := off_text(ahead):
        log.warning("set the clock of this machine%s", off)


async def announce_leaving(
    leaving: asyncio.Event, coordinator: CoordinatorClient, membership: Membership
) -> None:
    """Tell the coordinator as soon as `leaving` is set, so that its next plan does not count on this node.

    Runs until it is cancelled: the coordinator forgets the announcement when the node joins again.
    """
    await leaving.wait()
    while True:
        session = membership.run_view.session
        try:
            await coordinator.drain("asked to leave")
        except HetnodeError as error:
            log.warning("the coordinator could not be told that this node is about to leave: %s", error)
            if error.code is ErrorCode.COORDINATOR_UNREACHABLE:
                await asyncio.sleep(jittered(_RETRY_SECONDS))
                continue
        await membership.joined_after(session)


async def leave_run(coordinator: CoordinatorClient, reason: str) -> None:
    """Tell the coordinator that this node has left. May be called again."""
    # The coordinator may have ended, or have forgotten this peer after an earlier call.
    with suppress(HetnodeError):
        await coordinator.leave(reason)


async def leave_after(
    coordinator: CoordinatorClient, _: object, failure: BaseException | None, __: object
) -> None:
    """As :func:`leave_run`, at the end of a context. The reason names the failure that ends it, if any."""
    first = failure and first_error(failure)
    code = f": {first.code.label}" if isinstance(first, HetnodeError) else ""
    await leave_run(coordinator, f"stopped before the end{code}")


async def local_address_towards(coordinator: str) -> str:
    """The local address from which this machine reaches `coordinator`. Sends nothing.

    Raises HetnodeError: BAD_ADDRESS; COORDINATOR_UNREACHABLE while this machine has no network.
    """
    loop = asyncio.get_running_loop()
    try:
        host, port = split_host_port(coordinator)
        family, kind, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM))[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or is_unknown_name(error):
            raise unknown_address(coordinator, str(error)) from None
        raise HetnodeError(
            ErrorCode.COORDINATOR_UNREACHABLE,
            f"This machine has no way to the coordinator at {coordinator}: {error}.",
            "Check the network of this machine.",
        ) from None
