"""``hetnode plan``: predicts what a swarm would do, before any peer joins it."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from coordinator.ops.forecast.forecast import forecast, proposed
from coordinator.run.state.records import Peer
from coordinator.status.cause_text import cause_text
from node.cli.options import option, panel, records_as_options
from node.cli.output import say
from node.cli.spec import SpecOptions
from node.command_runner import TerminalConsole, bad_option
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec
from protocol.status import Cause
from protocol.types import Capacity, Lifecycle, PeerId, Role

_LEAST = {
    "uplink_mbps": 1e-3,
    "downlink_mbps": 1e-3,
    "round_trip_ms": 0.0,
    "memory_gib": 1e-3,
    "tflops": 1e-6,
}
_MOST = 1e9
COLUMNS = ("name", *_LEAST, "endpoint")
"""Of the file of peers, which may have one more:"""
_MAIN, _MAIN_GIB = "main_gib", 32.0
"""Free main memory, which homes are taken to have where nothing is said."""
_REMEDY = f"Give a CSV file with the header {','.join(COLUMNS)} and a line for every peer."

_MOST_PEERS = 10_000

Hosts = dict[PeerId, tuple[Capacity, str]]
"""Peers with the capacity and the endpoint of each."""

_peers = panel("Peers")
Mbps = Annotated[float, _peers("Their uplink and downlink, Mb/s.", min=1e-3)]
PeerTflops = Annotated[float, _peers("What they achieve in training, TFLOP/s.", min=1e-6)]


@dataclass(frozen=True)
class PeerOptions:
    """Which peers there are to plan with, in the units of the options."""

    peers: Annotated[
        Path | None,
        _peers(
            f"CSV file of stage peers with the header {','.join(COLUMNS)}; a peer with an empty endpoint "
            f"accepts no connections. A column {_MAIN} has their free main memory, else 32."
        ),
    ] = None
    stage_peers: Annotated[int, _peers("Number of equal stage peers.", min=0, max=_MOST_PEERS)] = 0
    bandwidth: Mbps = 100.0
    latency: Annotated[float, _peers("Between any two, one way, ms.", min=0)] = 20.0
    memory: Annotated[float, _peers("Free on their device, GiB.", min=1e-3)] = 24.0
    tflops: PeerTflops = 40.0
    pipelines: Annotated[
        int | None,
        _peers(
            "Pipelines to form of the stage peers. Default: one for every S of them, at least one.", min=1
        ),
    ] = None
    replicas: Annotated[int, _peers("Number of full replicas.", min=0, max=_MOST_PEERS)] = 0
    replica_bandwidth: Mbps = 1000.0
    replica_tflops: PeerTflops = 400.0

    def stage_hosts(self) -> Hosts:
        """Raises BAD_OPTION, also where there are no peers at all."""
        if self.peers is not None and self.stage_peers:
            raise bad_option("--peers and --stage-peers both say which peers there are.", "Give one of them.")
        if self.peers is not None:
            return read_peers(self.peers)
        if not self.stage_peers and not self.replicas:
            raise bad_option(
                "There are no peers to plan with.", "Give --peers FILE, --stage-peers N or --replicas N."
            )
        equal = capacity(self.bandwidth, self.bandwidth, 2 * self.latency, self.memory, self.tflops)
        return {PeerId(f"peer-{i}"): (equal, "listens") for i in range(self.stage_peers)}

    def replica_hosts(self) -> Hosts:
        bandwidth = self.replica_bandwidth
        able = capacity(bandwidth, bandwidth, 2 * self.latency, math.inf, self.replica_tflops)
        return {PeerId(f"full-{i}"): (able, "listens") for i in range(self.replicas)}


@records_as_options(spec_options=("data", "rounds", "inner_steps", "replicas", "pipelines", "stages"))
def plan(
    spec_options: SpecOptions,
    peer_options: PeerOptions,
    as_json: Annotated[bool, option("Print JSON instead of tables.", "--json")] = False,
) -> None:
    """What a swarm would do before any peer joins: pipelines, tokens per second, traffic, bottleneck.

    The pipelines are those that the coordinator would form of these peers. Give --peers FILE or --stage-peers
    N, and --replicas N for machines that hold the whole model. Nothing is started and no peer is asked: all
    figures follow from the cost model, and docs/operate.md says what it leaves out.
    """
    homes = peer_options.stage_hosts()
    chain = spec_options.spec().swarm.chain_length
    pipelines = (peer_options.pipelines or max(1, len(homes) // chain)) if homes else 0
    shape = {"swarm.replicas": peer_options.replicas, "swarm.pipelines": pipelines}
    if 2 * pipelines <= len(homes) < pipelines * chain:
        shape["swarm.members"] = len(homes) // pipelines  # strong peers may host several stages
    spec = spec_options.spec(**shape)
    _print_plan(spec, {Role.REPLICA: peer_options.replica_hosts(), Role.STAGE: homes}, as_json)


def _print_plan(spec: RunSpec, peers: Mapping[Role, Hosts], as_json: bool) -> None:
    by_arrival = [(peer, role, *known) for role, of_role in peers.items() for peer, known in of_role.items()]
    proposal = proposed(
        spec,
        [
            Peer(peer, role, able, endpoint, arrival, Lifecycle.READY)
            for arrival, (peer, role, able, endpoint) in enumerate(by_arrival, 1)
        ],
    )
    if isinstance(proposal, Cause):
        raise bad_option(
            f"These peers cannot train this run: {cause_text(proposal)}.",
            "Plan with more or other peers, or with fewer --pipelines.",
        )
    from node.views.plan import payload_bytes, plan_json, plan_view  # noqa: PLC0415  tables

    found = forecast(spec, proposal.survey, proposal.replicas, payload_bytes(spec))
    if as_json:
        say(json.dumps(plan_json(spec, proposal, found), indent=2))
    else:
        TerminalConsole().print(plan_view(spec, proposal, found))


def capacity(
    uplink_mbps: float, downlink_mbps: float, round_trip_ms: float, memory_gib: float, tflops: float
) -> Capacity:
    """A capacity in bytes, FLOP and seconds from the units of the options, with a home's main memory."""
    return Capacity(
        device="",
        memory_bytes=2**62 if math.isinf(memory_gib) else round(memory_gib * 2**30),
        threads=0,
        flops=1e12 * tflops,
        uplink=1e6 / 8 * uplink_mbps,
        downlink=1e6 / 8 * downlink_mbps,
        round_trip=round_trip_ms / 1000,
        main_bytes=round(_MAIN_GIB * 2**30),
    )


def read_peers(file: Path) -> Hosts:
    """Capacity and endpoint of every peer in a CSV file with COLUMNS, and maybe _MAIN, in any order.

    Raises HetnodeError BAD_OPTION, which names the line and the column.
    """
    peers: Hosts = {}
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            for line, row in _rows(file, text):
                name = PeerId(row["name"].strip())
                if not name or name in peers:
                    raise _bad_cell(file, line, "name", row["name"], "a name that no other line has")
                numbers = {column: _number(file, line, column, row[column]) for column in _LEAST}
                main = _number(file, line, _MAIN, row.get(_MAIN, str(_MAIN_GIB)))
                able = capacity(*(numbers[column] for column in _LEAST))
                peers[name] = (replace(able, main_bytes=round(main * 2**30)), row["endpoint"].strip())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise bad_option(f"--peers {file} cannot be read: {error}.", _REMEDY) from None
    if not peers:
        raise bad_option(f"--peers {file} names no peer.", _REMEDY)
    return peers


def _rows(file: Path, text: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Each row with the number of its line."""
    reader = csv.DictReader(text, skipinitialspace=True, restkey="", strict=True)
    header = [name.strip() for name in reader.fieldnames or ()]
    if sorted(set(header) - {_MAIN}) != sorted(COLUMNS) or len(set(header)) < len(header):
        raise bad_option(f"Line 1 of --peers {file} is not its header: {','.join(header)!r:.200}.", _REMEDY)
    reader.fieldnames = header
    for row in reader:
        if "" in row or None in row.values():
            raise bad_option(
                f"Line {reader.line_num} of --peers {file} does not have {len(header)} columns.", _REMEDY
            )
        yield reader.line_num, row


def _number(file: Path, line: int, column: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    least, most = _LEAST.get(column, 0.0), _MOST
    if not least <= value <= most:
        raise _bad_cell(file, line, column, cell, f"a number from {least:g} to {most:g}")
    return value


def _bad_cell(file: Path, line: int, column: str, cell: str, wanted: str) -> HetnodeError:
    return bad_option(
        f"Line {line} of --peers {file}, column {column}: {cell!r:.80} is not {wanted}.", _REMEDY
    )
