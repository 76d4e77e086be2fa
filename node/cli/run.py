"""The operator's commands for a whole run: ``hetnode run`` and ``rollback``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table

from node import command_runner
from node.cli.options import option, settings_of
from node.cli.output import say
from node.command_runner import TerminalConsole, bad_option
from node.folder import make_usable
from node.here.known_runs import coordinator_folder, no_coordinator, only_coordinator, operator_folder
from node.security.credentials import load_operator
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.change import changed, settings_text
from protocol.types import RunChange
from protocol.wire import operator_calls as calls
from protocol.wire.convert.fields import MAX_SETTING
from protocol.wire.typed_calls import Request

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

run_app = typer.Typer(
    help="A whole run, by its operator: pause it, let it go on, change it, copy it.", no_args_is_help=True
)

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|FOLDER",
        help="The run, or the folder of its coordinator or of 'hetnode swarm up'. Default: the only run "
        "whose coordinator is here.",
    ),
]
Reason = Annotated[str, option("Shown to everybody who takes part.")]

_LATER = (
    "The folder of this coordinator is an older copy, from round {}. What was decided and credited since is "
    "lost, and the model after round {} is what most of the nodes hold: they are trusted. Restore the newest "
    "copy instead if there is any."
)


@run_app.command("pause")
def run_pause(run: Run = None, reason: Reason = "") -> None:
    """Let the open round end, and begin no other until 'hetnode run resume'.

    Nodes stay connected and keep all that they have learned. They may join, leave and catch up during the
    pause. It outlives restarts of the coordinator. A paused run stays as it is.
    """
    reply = answer_of(operator_folder(run), calls.HoldRun(reason))
    # The words of the operator are text, whatever is in them.
    pause, console = reply.pause, TerminalConsole(highlight=False, soft_wrap=True)
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
    changed = answer_of(operator_folder(run), calls.GoOn())
    TerminalConsole(highlight=False).print("the run goes on" if changed else "the run was not paused")


@run_app.command("change")
def run_change(
    settings: Annotated[
        list[str],
        option(
            "A setting and its new value, such as inner.learning_rate=1e-3; may be repeated.",
            "--set",
            metavar="NAME=VALUE",
        ),
    ],
    run: Run = None,
    from_round: Annotated[
        int | None,
        option(
            "The first round with the new values. Default: the next that can.",
            "--from",
            metavar="ROUND",
            min=1,
        ),
    ] = None,
    reason: Reason = "",
) -> None:
    """Change settings of a run that trains: the rate, the steps of a round, the rounds, the data, others.

    All nodes change at the same round, also those that are away now, when they come back. Schedules go on as
    if the run had begun with the new values; a rollback to a round before the change undoes it, but for the
    number of rounds. 'hetnode status' lists the changes.
    """
    given = settings_of(settings, "--set")
    try:
        told = settings_text(given)
    except (TypeError, ValueError):  # a date of TOML
        raise bad_option("A value of --set is neither number nor text.", "Write inner.steps=20.") from None
    folder = operator_folder(run)
    if data := {name: each for name, each in given.items() if name.startswith("data.")}:
        told = settings_text(given | _tried(folder, data))
    if long := [each.partition("=")[0] for each in told if len(each) > MAX_SETTING]:
        cause = f"The new {long[0]} has more than the {MAX_SETTING} characters that a change may have."
        raise bad_option(cause, "Name fewer sources, or folders with shorter names.")
    change = answer_of(folder, calls.ChangeSettings(told, from_round or 0, reason))
    what = f"from round {change.from_round} on: {', '.join(change.settings)}"
    TerminalConsole(highlight=False, soft_wrap=True).print(what, markup=False)


def _tried(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """The new settings `data`, with whole paths where the nodes are those of 'swarm up'.

    Opens what they name, or what is on the hub where nodes are elsewhere; tells what their owners must name.

    Raises HetnodeError: as :func:`open_stream`; BAD_SPEC.
    """
    from node.data.own import option_for  # noqa: PLC0415
    from node.data.places import with_places  # noqa: PLC0415
    from node.data.sources import names_files, open_source  # noqa: PLC0415
    from node.net.coordinator_channel import fetch_status  # noqa: PLC0415

    now = command_runner.run(fetch_status(*load_operator(folder))).spec
    spec = changed(now, [RunChange(1, settings_text(data), "")])
    if (folder / "nodes").is_dir():  # a swarm of 'hetnode swarm up'
        from node.data.stream import open_stream  # noqa: PLC0415
        from node.data.tokenizer import find_tokenizer  # noqa: PLC0415

        open_stream(spec, tokenizer=find_tokenizer(spec.data, folder))

        def whole(source: str, _: str) -> str:
            kind, _, path = source.partition(":")
            is_here = names_files(source) and "://" not in path
            return f"{kind}:{os.path.abspath(os.path.expanduser(path))}" if is_here else source

        # The nodes may run in another folder than this command.
        found = with_places(spec.data.model_dump(mode="json"), whole)
        return {name: found.get(name.removeprefix("data."), "") for name in data}
    known = {each.source for each in now.data.all_sources}
    new = [each for each in spec.data.all_sources if each.source not in known]
    if paths := [option_for(each) for each in new if names_files(each.source)]:
        log.warning("nodes without --data %s, or their own copies, end at the change", ", ".join(paths))
    for each in (each for each in new if each.source.startswith("hf:") and not names_files(each.source)):
        try:  # a wrong name would end all nodes
            next(open_source(each.source, each.text_field or spec.data.text_field).documents(), None)
        except HetnodeError as error:
            if error.code is not ErrorCode.MISSING_EXTRA:
                raise
            log.warning("%s was not tried: %s", each.source, error.cause)
    return dict(data)


@run_app.command("backup")
def run_backup(
    run: Run = None,
    out: Annotated[Path, option("The folder to write, for its owner's eyes only: keys are in it.")] = Path(
        "backup"
    ),
) -> None:
    """Copy the folder of a coordinator while it runs, so that the run can go on from the copy.

    'hetnode coordinator --folder COPY' goes on. Nodes that know later rounds wait then: 'hetnode rollback'.
    """
    from coordinator.store.backup import back_up  # noqa: PLC0415
    from coordinator.store.log_copy import LOG_FILE  # noqa: PLC0415
    from node.security.identity import peer_in  # noqa: PLC0415

    folder = only_coordinator() if run is None else coordinator_folder(run, LOG_FILE)
    if folder is None:
        raise no_coordinator(run)
    make_usable(out.absolute().parent, "--out: the folder")
    try:
        back_up(folder, out, peer_in(folder / "identity.key"))
    except OSError as error:
        raise bad_option(
            f"The folder {out} cannot be written: {error.strerror}.", "Give another --out."
        ) from None
    say(f"{out} is a copy of {folder}. It has the keys of the run: keep it as safe")


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
    reason: Reason = "",
    yes: Annotated[bool, option("Do not ask before the rollback.", "--yes")] = False,
) -> None:
    """Let a run go back to the model after a former round. It is paused then, until 'hetnode run resume'.

    The rollback is the decision of the next round: all nodes load the anchors and the momentum after ROUND,
    also those that are away now, when they come back. Without --to, this lists the rounds to go back to.

    Where the coordinator's folder was restored from an older copy, nodes hold the model after later rounds.
    They are listed, too, and --to lets the run go on from there: it trusts what most of its nodes tell.
    """
    found = answer_of(operator_folder(run), calls.ListRollbacks())
    console = TerminalConsole(highlight=False, soft_wrap=True)
    undone = {each.round_number: max(0, found.round_number - 1 - each.round_number) for each in found.rounds}
    is_ahead = restore_round is not None and restore_round >= found.round_number
    if restore_round is None:
        table = Table("go to round", "rounds undone", "tokens undone", "possible")
        for each in found.rounds:
            table.add_row(
                str(each.round_number),
                str(undone[each.round_number]),
                f"{each.tokens:,}",
                each.problem
                or ("yes" if each.round_number < found.round_number else "yes, most nodes hold it"),
            )
        TerminalConsole(highlight=False).print(table)
        return
    if not yes and is_ahead:
        console.print(_LATER.format(found.round_number, restore_round), markup=False)
        typer.confirm(f"Go on from round {restore_round}?", abort=True)
    elif not yes:
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
    number = answer_of(operator_folder(run), calls.RestoreRound(restore_round, reason))
    console.print(f"round {number} is a rollback to round {restore_round}", markup=False)
    paused = "the run is paused; 'hetnode run resume' lets it go on"
    console.print("the run goes on" if is_ahead else paused, markup=False)


def answer_of(folder: Path, request: Request[Answer]) -> Answer:
    """The answer to `request` of the operator of the run whose coordinator has `folder`.

    Raises HetnodeError: the refusal; why the coordinator does not answer, as far as this machine knows.
    """
    from node.cli.finished import reason_of_silence  # noqa: PLC0415
    from node.net.coordinator_channel import CoordinatorChannel  # noqa: PLC0415

    async def call() -> Answer:
        async with CoordinatorChannel(*load_operator(folder)) as client:
            return await client.ask(request)

    try:
        return command_runner.run(call())
    except HetnodeError as error:
        if error.code not in (ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.NO_CREDENTIALS):
            raise
        raise reason_of_silence(folder) or error from None
