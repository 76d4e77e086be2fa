"""``hetnode explain``: why something in a run is as it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from node import command_runner
from node.cli.options import option
from node.cli.output import say
from node.cli.status import AWAY, stored_run
from node.command_runner import TerminalConsole
from node.here import known_runs
from node.views.text import as_text
from protocol.errors import HetnodeError
from protocol.status import Explanation

_MOST_CHARACTERS, _MOST_SENTENCES, _INDENT = 1000, 100, 2

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
            "Default: as 'hetnode status'.",
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
    answer = _answer(run, " ".join(what or ["now"]))
    if as_json:
        say(json.dumps(asdict(answer)))
    else:
        TerminalConsole(highlight=False).print(ExplanationView(answer))


@dataclass(frozen=True)
class ExplanationView:
    """The title, then one paragraph for each sentence, with the numbers of its events dimmed at the end.

    The coordinator bounds its sentences; this shows no more than that of any other, and nothing but text.
    """

    explanation: Explanation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width)
        yield as_text(self.explanation.title.text, "bold", _MOST_CHARACTERS)
        for each in self.explanation.statements[:_MOST_SENTENCES]:
            shown = as_text(each.text, most=_MOST_CHARACTERS)
            if each.events:
                shown.append(f" [{', '.join(map(str, each.events))}]", style="dim")
            # Not rich's padding, which fills each line with blanks.
            for line in shown.wrap(console, width - _INDENT):
                line.rstrip()
                yield Text(" " * _INDENT) + line


def _answer(run: str | None, question: str) -> Explanation:
    """From the coordinator, or from its folder if that is on this machine and no coordinator answers."""
    from node.here.nodes import meant  # noqa: PLC0415
    from node.net.coordinator_channel import fetch_explanation  # noqa: PLC0415

    run = meant(run)
    try:
        address, credentials = known_runs.operator_or_member(run)
        return command_runner.run(fetch_explanation(address, credentials, question))
    except HetnodeError as error:
        folder = stored_run(run) if error.code in AWAY else None
        if folder is None:
            raise
    from coordinator.ops.explain.offline import last_explanation  # noqa: PLC0415

    return last_explanation(folder, question)
