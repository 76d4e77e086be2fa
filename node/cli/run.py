"""The operator's commands for a whole run: ``hetnode run`` and ``hetnode rollback``."""

from __future__ import annotations

from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from node import command_runner
from node.cli.known_runs import operator_of
from node.cli.options import option
from protocol.wire import operator_calls as calls
from protocol.wire.typed_calls import Request

Answer = TypeVar("Answer")

run_app = typer.Typer(help="A whole run, by its operator: pause it, and let it go on.", no_args_is_help=True)

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|FOLDER",
        help="The run, or the folder of its coordinator or of 'hetnode swarm up'. Default: the only run "
        "whose coordinator is here.",
    ),
]


@run_app.command("pause")
def run_pause(
    run: Run = None,
    reason: Annotated[str, option("Shown to everybody who takes part.")] = "",
) -> None:
    """Let the open round end, and begin no other until 'hetnode run resume'.

    Nodes stay connected and keep all that they have learned. They may join, leave and catch up during the
    pause. It outlives restarts of the coordinator. A paused run stays as it is.
    """
    reply = asking(run, calls.HoldRun(reason))
    # The words of the operator are text, whatever is in them.
    pause, console = reply.pause, Console(highlight=False, soft_wrap=True)
    assert pause is not None, "the run is paused"
    if not reply.changed:
        why = f": {pause.reason}" if pause.reason else ""
        console.print(f"the run was paused already, by the {pause.by}{why}", markup=False)
    waits = f"round {reply.round_number} still ends, then it waits" if reply.round_number else "it waits"
    console.print(
        f"{waits} before round {pause.from_round}; 'hetnode run resume' ends the pause", markup=False
    )


@run_app.command("resume")
def run_resume(run: Run = None) -> None:
    """Let a paused run go on."""
    changed = asking(run, calls.GoOn())
    Console(highlight=False).print("the run goes on" if changed else "the run was not paused")


def rollback(
    run: Run = None,
    restore_round: Annotated[
        int | None,
        option(
            "The round to go back to; 0 is the model before round 1. Default: list them.",
            "--to",
            metavar="ROUND",
            min=0,
        ),
    ] = None,
    reason: Annotated[str, option("Shown to everybody who takes part.")] = "",
    yes: Annotated[bool, option("Do not ask before the rollback.", "--yes")] = False,
    resume: Annotated[bool, option("Do not stay paused after the rollback.", "--resume")] = False,
) -> None:
    """Let a run go back to the model after a former round. It is paused then, until 'hetnode run resume'.

    The rollback is the decision of the next round: all nodes load the anchors and the momentum after ROUND,
    also those that are away now, when they come back. Without --to, this lists the rounds to go back to.
    """
    found = asking(run, calls.ListRollbacks())
    console = Console(highlight=False, soft_wrap=True)
    undone = {each.round_number: max(0, found.round_number - 1 - each.round_number) for each in found.rounds}
    if restore_round is None:
        table = Table("go back to round", "rounds undone", "tokens undone", "possible")
        for each in found.rounds:
            table.add_row(
                str(each.round_number),
                str(undone[each.round_number]),
                f"{each.tokens:,}",
                each.problem or "yes",
            )
        Console(highlight=False).print(table)
        return
    if not yes:
        tokens = {each.round_number: f" ({each.tokens:,} tokens)" for each in found.rounds}.get(
            restore_round, ""
        )
        rounds = undone.get(restore_round, max(0, found.round_number - 1 - restore_round))
        console.print(
            f"This undoes {rounds} round{'s' * (rounds != 1)}{tokens} for everybody who takes part. Their "
            "samples are not trained again, and what nodes have learned and not sent yet is lost.",
            markup=False,
        )
        typer.confirm(f"Go back to round {restore_round}?", abort=True)
    number = asking(run, calls.RestoreRound(restore_round, reason))
    console.print(f"round {number} is a rollback to round {restore_round}", markup=False)
    if resume:
        asking(run, calls.GoOn())
        console.print("the run goes on")
    else:
        console.print("the run is paused; 'hetnode run resume' lets it go on", markup=False)


def asking(run: str | None, request: Request[Answer]) -> Answer:
    """The answer to `request` of the operator of `run`."""
    from node.net.admin_client import AdminClient  # noqa: PLC0415

    address, operator = operator_of(run)

    async def call() -> Answer:
        async with AdminClient(address, operator) as client:
            return await client.ask(request)

    return command_runner.run(call())
