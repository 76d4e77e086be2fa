"""What ``hetnode doctor`` says of how others reach this machine: ports, router, NAT and relays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from coordinator.status.cause_text import cause_text
from node.cli.doctor_checks import CheckResult, NodeSettings, ok, problem, warning
from node.home.router.port_mapping import NO_OFFER, Mapped, map_ports, offered
from node.net.address_trial import AddressTrial, Place, try_addresses
from node.net.joining import local_address_towards
from node.net.link_server import LinkServer
from node.net.peer_address import round_trip
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import CauseCode, PeerStatus, RunStatus
from protocol.trust.host_port import host_port
from protocol.trust.reachability import Addresses, Reached
from protocol.types import Lifecycle, PeerId, Reachability, Role

_FORWARD = (
    "Forward two fixed ports in the router and firewall to this machine, and give --listen '[::]:PORT', "
    "--dht-port PORT and --advertise with the public name or address; or leave it to a relay."
)


class Nat(StrEnum):
    """What lies between this machine and the coordinator."""

    NONE = "none"
    KEEPS_PORTS = "port-preserving"
    CHANGES_PORTS = "another port for every connection"
    UNKNOWN = "unknown"


def nat_between(trials: Sequence[AddressTrial]) -> Nat:
    """The kind of NAT, by where two or more connections come from here and there."""
    ends: list[tuple[Place, Place]] = [(each.local, each.seen) for each in trials]
    if len(ends) < 2 or not all(port for end in ends for _, port in end):
        return Nat.UNKNOWN
    if all(here == there for here, there in ends):
        return Nat.NONE
    same_ports = all(here[1] == there[1] for here, there in ends)
    return Nat.KEEPS_PORTS if same_ports else Nat.CHANGES_PORTS


@dataclass(frozen=True)
class Reach:
    """How others reach this machine.

    Attributes:
        claimed: the addresses that were tried.
        seen: this machine's address, as the coordinator sees it.
        relays: ``host:port`` of each, with the seconds there and back; infinite without an answer.
    """

    claimed: Addresses
    reached: Reached
    mapped: Mapped
    nat: Nat
    seen: str
    relays: tuple[tuple[str, float], ...]

    @property
    def is_open(self) -> bool:
        return self.reached.reachability is Reachability.OPEN


def reach_findings(reach: Reach) -> list[CheckResult]:
    """In sentences, with one remedy each."""
    found, claimed = reach.reached, reach.claimed
    return [
        _endpoint_finding("links", claimed.endpoint, found.endpoint_problem, _FORWARD),
        _endpoint_finding("payloads", claimed.dht, found.dht_problem, "As for links."),
        nat_finding(reach.nat, reach.seen),
        router_finding(reach.mapped, reach.is_open),
        relay_finding(reach.relays, is_needed=not reach.is_open),
    ]


def _endpoint_finding(subject: str, address: str, obstacle: str, remedy: str) -> CheckResult:
    if not obstacle:
        return ok(subject, f"reachable: the coordinator connects to this machine at {address}")
    return warning(subject, f"not reachable from the coordinator at {address}: {obstacle}", remedy)


def nat_finding(nat: Nat, seen: str) -> CheckResult:
    match nat:
        case Nat.NONE:
            return ok("NAT", f"none: the coordinator sees this machine at its own address {seen}")
        case Nat.KEEPS_PORTS:
            return ok("NAT", f"connections leave as {seen} and keep their port (port-preserving)")
        case Nat.CHANGES_PORTS:
            return ok(
                "NAT",
                f"connections leave as {seen}, each with another port (as with symmetric NAT)",
                "Nothing: forwarded ports and relays work with it.",
            )
    return ok("NAT", "not known: the coordinator does not tell from where it is called")


def router_finding(mapped: Mapped, is_open: bool) -> CheckResult:
    """What it offers. That it offers nothing matters only to a machine that is not `is_open`."""
    if mapped.problem:
        remedy = (
            "Ask the provider for a public IPv4 address, or let this machine forward ports in the router's "
            "settings; or leave it to a relay."
        )
        return warning("router", f"{mapped.found}, but {mapped.problem}", remedy)
    if mapped.mapping is not None:
        return ok("router", f"{mapped.found}, as for a node that joins")
    if not mapped.found:
        return ok("router", "not asked to forward ports: none stands between here and the coordinator")
    if is_open or mapped.found != NO_OFFER:
        return ok("router", mapped.found)
    return warning("router", mapped.found, "Switch UPnP or NAT-PMP on in the router's settings.")


def relay_finding(relays: Sequence[tuple[str, float]], is_needed: bool) -> CheckResult:
    """Through which relay a node would go; all that were measured, the nearest first."""
    nearest_first = sorted(relays, key=lambda each: each[1])
    named = [
        f"{name}, {seconds * 1000:.1f} ms there and back" if seconds < inf else f"{name}, without an answer"
        for name, seconds in nearest_first
    ]
    listed = "; ".join(named)
    if not is_needed:
        return ok("relay", f"not needed; the run has {listed or 'none'}")
    if nearest_first and nearest_first[0][1] < inf:
        others = f" (others: {'; '.join(named[1:])})" if named[1:] else ""
        return ok("relay", f"a node here goes through {named[0]}{others}")
    if relays:
        return warning(
            "relay", f"none answers: {listed}", "Let this machine connect to one of these addresses."
        )
    return warning(
        "relay",
        "the run has none, so a node here only dials",
        "Ask the operator for one: 'hetnode relay', or a coordinator without '--relay none'.",
    )


def running_finding(status: RunStatus, node: PeerStatus) -> CheckResult:
    """Of a node that runs with this machine's identity: how others reach it by now."""
    replicas = status.plan.replicas if status.plan is not None else ()
    places = [each for replica in replicas for each in replica.members if each.peer == node.peer]
    where = next((f" at {each.endpoint}" for each in places if each.endpoint), "")
    is_cut_off = node.cause is not None and node.cause.code is CauseCode.LINK_CLOSED
    trouble = cause_text(node.cause) if node.cause and is_cut_off else node.problem
    match node.reachability:
        case Reachability.OPEN:
            found = f"runs ({node.role}); others reach it{where}"
        case Reachability.RELAYED:
            found = f"runs ({node.role}); others reach it through a relay{where}"
        case _:
            why = f": {trouble}" if trouble else ""
            return warning("node", f"runs ({node.role}); others do not reach it{why}", _FORWARD)
    if trouble:
        return warning(
            "node", f"{found}; {trouble}", "See the node's log; the run goes on without that link."
        )
    return ok("node", found)


def operator_finding(status: RunStatus) -> CheckResult:
    """How the nodes of the run are reached, and why this machine is not tried with operator's credentials."""
    live = [each for each in status.peers if each.lifecycle is not Lifecycle.GONE]
    by_kind = Counter(each.reachability for each in live if each.role is not Role.RELAY)
    return ok(
        "reachability",
        f"of the run's nodes {by_kind[Reachability.OPEN]} are open, {by_kind[Reachability.RELAYED]} relayed, "
        f"{by_kind[Reachability.DIAL_ONLY]} only dial; this machine is not tried, because the operator's "
        "credentials belong to no node, and the coordinator dials back nodes alone",
        "To examine this machine: 'hetnode join' an invite here, then 'hetnode doctor' with the run's name.",
    )


async def check_reach(
    coordinator: str, tls: Credentials, me: PeerId, status: RunStatus, settings: NodeSettings
) -> list[CheckResult]:
    """Whether others reach this machine at the ports of `settings`, and what else would carry connections.

    Opens these ports for some seconds, and asks the router to forward them, unless a node with the identity
    `me` runs: then the coordinator knows.
    """
    node = next(
        (each for each in status.peers if each.peer == me and each.lifecycle is not Lifecycle.GONE), None
    )
    try:
        if node is None:
            return reach_findings(await _examine(coordinator, tls, me, settings))
        trials = [await try_addresses(coordinator, tls, me, Addresses()) for _ in range(2)]
        is_needed = node.reachability is not Reachability.OPEN
        return [
            running_finding(status, node),
            nat_finding(nat_between(trials), trials[0].seen[0]),
            relay_finding(await _measured(trials[0]), is_needed),
        ]
    except HetnodeError as error:
        if error.code is ErrorCode.PORT_IN_USE:
            return [problem("listening", error)]
        return [warning("reachability", error.cause, error.remedy)]


async def check_router(coordinator: str) -> list[CheckResult]:
    """What the router would do for a machine that is in no run yet. Nothing is forwarded."""
    try:
        mapped = await offered(await local_address_towards(coordinator), coordinator)
    except HetnodeError:
        return []  # the coordinator cannot be reached, which another row says
    return [router_finding(mapped, is_open=False)]


async def _examine(coordinator: str, tls: Credentials, me: PeerId, settings: NodeSettings) -> Reach:
    async with AsyncExitStack() as stack:
        local = await local_address_towards(coordinator)
        ports = []
        for wanted in (settings.port, settings.dht_port):
            server = LinkServer(lambda: tls)
            ports.append(await server.start(settings.host, wanted))
            stack.push_async_callback(server.close)
        endpoint, dht = (host_port(settings.advertise or local, port) for port in ports)
        claimed = Addresses(endpoint, dht)
        mapped = Mapped()
        if settings.advertise is None:
            mapped = await map_ports(claimed, local, coordinator)
        if mapped.mapping is not None:
            stack.push_async_callback(mapped.mapping.release)
            claimed = mapped.mapping.public(claimed)
        trial = await try_addresses(coordinator, tls, me, claimed)
        trials = [trial, await try_addresses(coordinator, tls, me, Addresses())]
        nat, (seen, _) = nat_between(trials), trial.seen
        return Reach(claimed, trial.reached, mapped, nat, seen, await _measured(trial))


async def _measured(trial: AddressTrial) -> tuple[tuple[str, float], ...]:
    seconds = await asyncio.gather(
        *(round_trip(each.endpoint, f"the relay {each.peer}") for each in trial.relays)
    )
    return tuple(zip((each.endpoint for each in trial.relays), seconds, strict=True))
