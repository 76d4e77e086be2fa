"""The credit of a run's peers as a table of at most 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.store.history_answers import Credits
from node.views.run_history import size
from node.views.text import count, plain, short_id


def credit_view(credits: Credits) -> RenderableType:
    """The first peers, and the sums over all peers."""
    if not credits.peers:
        return Text("No peer has joined yet.")
    table = Table(title=f"credit in {plain(credits.run, 60)}", title_justify="left")
    for name in ("", "peer", "stage tokens", "share", "stage rounds", "payloads", "links"):
        table.add_column(name, justify="left" if name == "peer" else "right", no_wrap=True)
    for rank, each in enumerate(credits.credits, start=1):
        share = each.stage_tokens / credits.stage_tokens if credits.stage_tokens else 0.0
        table.add_row(
            f"{rank}",
            short_id(each.peer),
            count(each.stage_tokens),
            f"{share:.1%}",
            f"{each.stage_rounds:,}",
            size(each.payload_bytes),
            size(each.link_bytes) if each.link_bytes else "",
        )
    stages = f"{credits.stages} stages" if credits.stages > 1 else "1 stage"
    shown = len(credits.credits)
    lines = [
        f"{count(credits.tokens)} tokens are committed. A token that one stage has committed is one stage "
        f"token: {count(credits.stage_tokens)}, at {stages}.",
        "Payloads are the bytes that counted. Links are what each peer says that it has sent.",
    ]
    if shown < credits.peers:
        lines.append(f"{shown} of {credits.peers} peers are shown; --most shows more.")
    return Group(table, *(Text(line) for line in lines))
