"""A node for each of several devices: what ``hetnode join --role stage --device 0,1`` runs.

Each is a ``hetnode join`` of its own, as if a person had started it beside the others: it has an identity, a
folder and ports of its own, and fails alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from node import command_runner
from node.cli.consent import can_answer
from node.command_runner import LEAVE, LIFELINE, TerminalConsole, bad_option
from node.ipc.modules import COMMAND, COMMAND_MODULES
from node.ipc.ranks import parse_devices
from node.ipc.template import ForkedProcess, own_template
from node.measure.hardware import available_threads
from protocol.errors import ExitCode

_OWN = ("folder", "identity", "dht_port", "metrics")
"""Options that two nodes cannot share."""
_LONGEST_LINE = 1 << 20


def join_each(options: Mapping[str, Any]) -> int:
    """Run a node for each device until all have ended; 0, or the first other exit status.

    `options` are those of ``hetnode join`` by name, from the command line of this process. The nodes divide
    the processor and the limits of the line. What they log is told behind their devices. SIGINT and SIGTERM
    act as on one node.

    Raises HetnodeError BAD_OPTION, and command_runner.Interrupted where they had to leave at once.
    """
    names = parse_devices(options["device"]).names
    _check(options, names)
    divided = {
        "--threads": f"{max(1, (options['threads'] or available_threads()) // len(names))}",
        "--upload-limit": f"{options['upload_limit'] / len(names):g}",
        "--download-limit": f"{options['download_limit'] / len(names):g}",
    }
    shared = [*sys.argv[1:], *(text for each in divided.items() for text in each)]
    commands = {
        name if len({*names}) > 1 else f"{name} {index}": [*shared, "--device", name]
        for index, name in enumerate(names)
    }
    nodes: list[ForkedProcess] = []

    def ask_to_leave() -> None:
        for node in nodes:
            node.send_signal(LEAVE)  # it ends a node that is only starting, which would not hear SIGINT

    message = (
        f"asked to end: the nodes finish their round first, in at most {options['drain_seconds']:g} s; "
        "asked again, they leave at once"
    )
    drain = command_runner.Draining(ask_to_leave, options["drain_seconds"], message)
    statuses = command_runner.run(_run(commands, nodes), drain)
    return next((each if each > 0 else ExitCode.INTERRUPTED for each in statuses if each), 0)


def _check(options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises BAD_OPTION for what the nodes cannot share."""
    if not names:
        raise bad_option("A node for each GPU needs their numbers.", "Give --device 0,1 in place of all.")
    given = [f"--{name.replace('_', '-')}" for name in _OWN if options[name]]
    if options["listen"] != "none" and not options["listen"].endswith(":0"):
        given.append("--listen with a port")
    if str(options["invite_file"]) == "-":
        given.append("--invite-file -")
    if given:
        raise bad_option(
            f"Several nodes cannot share {given[0]}.",
            "Leave the option out; or start each node by itself, one with --device 0, one with --device 1.",
        )
    if not options["yes"] and can_answer():
        raise bad_option(
            "Nodes for several devices ask no question.",
            "Look with one --device what the run would do on this machine; then give --yes.",
        )


async def _run(commands: Mapping[str, Sequence[str]], nodes: list[ForkedProcess]) -> Sequence[int]:
    """Run ``hetnode`` with the arguments of each name. When this is cancelled, they leave at once."""
    with ExitStack() as lifeline:
        # Each node watches the read end, which tells it of the end of this process, even by SIGKILL.
        read, write = os.pipe()
        lifeline.callback(os.close, write)
        shown = []
        for name, arguments in commands.items():
            output, own = os.pipe()
            nodes.append(
                own_template(COMMAND_MODULES).fork(
                    COMMAND,
                    arguments,
                    environment={**os.environ, LIFELINE: str(read)},
                    descriptors=[read],
                    stdout=own,
                    stderr=own,
                    with_template=True,
                )
            )
            os.close(own)
            shown.append(_show(name, output))
        os.close(read)
        ended = asyncio.gather(*(node.wait_async() for node in nodes), *shown)
        try:
            return (await asyncio.shield(ended))[: len(nodes)]
        except asyncio.CancelledError:
            lifeline.close()
            await ended
            raise


async def _show(name: str, output: int) -> int:
    """Tell each line that arrives at the descriptor `output`, which is closed at its end."""
    console = TerminalConsole(stderr=True, highlight=False, soft_wrap=True)
    reader = asyncio.StreamReader(_LONGEST_LINE)
    make = partial(asyncio.StreamReaderProtocol, reader)
    source = os.fdopen(output, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(make, source)
    try:
        while line := await reader.readline():
            console.print(f"{name} | {line.decode(errors='replace').rstrip()}", markup=False)
    finally:
        transport.close()
    return 0
