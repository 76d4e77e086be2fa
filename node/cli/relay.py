"""``hetnode relay``: carries connections to nodes that others cannot dial."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node import command_runner
from node.cli.options import (
    MEGABIT,
    PublicName,
    RelayPortRange,
    chosen_name,
    network,
    option,
    port_range,
)
from node.cli.output import open_log_of_service
from node.command_runner import TerminalConsole
from node.here import known_runs


def relay(
    run: Annotated[
        str | None,
        typer.Argument(
            help="An invite for the role relay, the file that holds it, or '-' for standard input; or the "
            "name of a run that this relay was in before.",
            metavar="INVITE|FILE|RUN",
        ),
    ] = None,
    identity: Annotated[
        Path | None, option("Key file of this relay. Default: the first that no live node uses.")
    ] = None,
    listen: Annotated[str, network("HOST:PORT of the relay. Most homes reach port 443.")] = "[::]:7800",
    advertise: Annotated[
        str | None,
        network("Host that nodes are told. Default: this machine's address towards the coordinator."),
    ] = None,
    relay_ports: RelayPortRange = None,
    node_limit: Annotated[
        float, network("Mb/s that the relay carries for each node, both directions together.", min=0.1)
    ] = 100.0,
    name: PublicName = None,
) -> None:
    """Carry connections to nodes that others cannot dial, such as those in homes behind a router.

    Needs a public address and an invite for this role: 'hetnode invite create --role relay'. Nodes find the
    relay through the coordinator and take the nearest. All that passes is encrypted from end to end. Ends
    when the run is finished.
    """
    open_log_of_service()
    host, port = command_runner.split_address(listen, "--listen")
    advertise = command_runner.bare_host(advertise, "--advertise")
    ports = port_range(relay_ports)
    destination = known_runs.destination(run)
    key = known_runs.identity_for(destination, identity, relays=True)

    from node.cli import finished  # noqa: PLC0415

    if text := finished.text_for(destination, key.path):
        TerminalConsole(highlight=False, soft_wrap=True).print(text, markup=False)
        return
    from node.home.relay.member import RelayMemberOptions, run_relay, with_rate  # noqa: PLC0415
    from protocol.relay.server import RelayLimits  # noqa: PLC0415

    options = RelayMemberOptions(
        invite=destination.invite,
        run=destination.run,
        listen_host=host,
        listen_port=port,
        advertise=advertise,
        dht_ports=ports,
        limits=with_rate(RelayLimits(), node_limit * MEGABIT),
        name=chosen_name(name),
    )
    command_runner.run(run_relay(options, key))
