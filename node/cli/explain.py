"""``hetnode explain``: why something in a run is as it is."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from node import command_runner
from node.cli import known_runs
from node.cli.options import option
from node.cli.status import AWAY, stored_run
from protocol.errors import HetnodeError
from protocol.status import Explanation

What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="now|ROUND|PEER|event N...",
        help="'now': what the run waits for and what would make it faster. The number of a round: why it "
        "took so long, or was aborted. The end of a peer's id, as 'hetnode status' shows it: why that peer "
        "does not train. 'event' and numbers: what these events of the log say. Default: now.",
    ),
]


def explain(
    what: What = None,
    run: Annotated[
        str | None,
        option(
            "A run that this machine is or was in, or the folder of its coordinator or of 'swarm up'. "
            "Default: the only coordinator here.",
            "--run",
            metavar="RUN|FOLDER",
        ),
    ] = None,
    as_json: Annotated[bool, option("Print one JSON object, for programs.", "--json")] = False,
) -> None:
    """Say why a round was slow, why a peer does not train, or what would be faster.

    The answer comes from the coordinator's event log. The numbers at the end of a sentence are those of the
    events from which it follows; 'hetnode explain event N...' shows them. Predictions come from the cost
    model, and say so. While the coordinator does not run, this reads its folder, if that is on this machine.
    """
    from node.views.explanation import ExplanationView  # noqa: PLC0415

    answer = _answer(run, " ".join(what or ["now"]))
    if as_json:
        typer.echo(json.dumps(asdict(answer)))
    else:
        Console(highlight=False).print(ExplanationView(answer))


def _answer(run: str | None, question: str) -> Explanation:
    """From the coordinator, or from its folder if that is on this machine and no coordinator answers."""
    from node.net.coordinator_channel import fetch_explanation  # noqa: PLC0415

    try:
        address, credentials = known_runs.operator_or_member(run)
        return command_runner.run(fetch_explanation(address, credentials, question))
    except HetnodeError as error:
        folder = stored_run(run) if error.code in AWAY else None
        if folder is None:
            raise
    from coordinator.ops.explain.offline import last_explanation  # noqa: PLC0415

    return last_explanation(folder, question)
