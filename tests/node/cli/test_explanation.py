"""An explanation on a terminal of 80 columns, with text of others in it."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from node.cli.explain import ExplanationView
from protocol.status import Explanation, Statement


def shown(explanation: Explanation, **options: object) -> str:
    console = Console(file=StringIO(), width=80, highlight=False, **options)  # type: ignore[arg-type]
    console.print(ExplanationView(explanation))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def explanation(title: str, *statements: Statement) -> Explanation:
    return Explanation(Statement("round", title), statements)


def test_each_sentence_is_a_paragraph_with_the_numbers_of_its_events() -> None:
    text = "replica-1 was last: " + "it offered late " * 8
    lines = shown(
        explanation(
            "Round 5 took 20 s", Statement("last", text, (412, 415)), Statement("remedy", "No event.")
        )
    ).splitlines()
    assert lines[0] == "Round 5 took 20 s"
    assert lines[-1] == "  No event."
    assert "[412, 415]" in " ".join(" ".join(lines).split())
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])


def test_the_numbers_are_dim_on_a_terminal() -> None:
    styled = shown(
        explanation("t", Statement("last", "Late.", (7,))), force_terminal=True, color_system="standard"
    )
    assert "\x1b[2m [7]\x1b[0m" in styled


def test_text_of_others_is_text_and_cut() -> None:
    hostile = "\x1b[2J\x1b[31mred [bold]x[/bold] <b>y</b>\r\n" + "z" * 100_000
    found = shown(explanation(hostile, *[Statement("event", hostile)] * 1000), force_terminal=True)
    assert "\x1b[2J" not in found
    assert "\x1b[31m" not in found
    assert "[bold]x[/bold] <b>y</b>" in found
    assert len(found) < 250_000
