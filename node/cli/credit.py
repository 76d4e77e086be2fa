"""``hetnode credit``: what each owner, or peer without one, has contributed to a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.store.history_answers import Credit, CreditOrder, Credits, Page
from hetnode.runs import open_run
from node.cli.options import option
from node.cli.output import say
from node.command_runner import TerminalConsole
from node.views.run_history import size
from node.views.text import count, plain, short_id
from protocol.trust.public_name import name_as_text
from protocol.types import PeerId


def credit(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="A run whose coordinator is on this machine, or the folder of its coordinator or of "
            "'swarm up'. Default: the only coordinator here.",
        ),
    ] = None,
    by: Annotated[
        CreditOrder, option("Sort by this, the most first; 'peer' sorts by peer id.")
    ] = CreditOrder.TOKENS,
    most: Annotated[int, option("Contributors to show.", min=1, max=100_000)] = 50,
    as_json: Annotated[bool, option("Print one JSON object instead, for programs.", "--json")] = False,
) -> None:
    """Show what each owner, or peer without one, has contributed: stage tokens, stage rounds and bytes.

    Reads the history in the folder of the coordinator, whether that runs or not.
    """
    found = open_run(run).answers.credits(by, Page(0, most))
    if as_json:
        say(json.dumps(asdict(found), allow_nan=False))
    else:
        TerminalConsole(highlight=False).print(credit_view(found))


def credit_view(credits: Credits) -> RenderableType:
    """The first contributors, and the sums over all peers."""
    if not credits.peers:
        return Text("No peer has joined yet.")
    table = Table(title=f"credit in {plain(credits.run, 60)}", title_justify="left", box=None)
    for name in ("", "peer", "tokens", "share", "stage rounds", "payloads", "links"):
        table.add_column(name, justify="left" if name == "peer" else "right", no_wrap=True)
    # It gets what the figures leave.
    table.add_column("name", no_wrap=True, overflow="ellipsis")
    for rank, each in enumerate(credits.credits, start=1):
        share = each.stage_tokens / credits.stage_tokens if credits.stage_tokens else 0.0
        table.add_row(
            f"{rank}",
            short_id(PeerId(each.owner) or each.peer),
            count(each.stage_tokens),
            f"{share:.1%}",
            f"{each.stage_rounds:,}",
            size(each.payload_bytes),
            size(each.link_bytes) if each.link_bytes else "",
            Text(_name(each)),
        )
    stages = f"{credits.stages} stages" if credits.stages > 1 else "1 stage"
    shown = len(credits.credits)
    lines = [
        f"{count(credits.tokens)} tokens are committed. A token that one stage has committed is one stage "
        f"token: {count(credits.stage_tokens)}, at {stages}.",
        "Payloads are the bytes that counted. Links are what each peer says that it has sent.",
    ]
    if shown < credits.owners:
        lines.append(f"{shown} of {credits.owners} contributors are shown; --most shows more.")
    return Group(table, *(Text(line) for line in lines))


def _name(credit: Credit) -> str:
    """The public name; of an owner that of the node with the most tokens, and how many nodes there are."""
    name = name_as_text(credit.name) if credit.name else ""
    return f"{name} ({credit.nodes} nodes)".strip() if credit.nodes > 1 else name
