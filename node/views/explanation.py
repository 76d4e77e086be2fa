"""The answer to a question about a run, as text for a terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from protocol.status import Explanation, Statement

_MOST_CHARACTERS = 1000
_MOST_SENTENCES = 100
_INDENT = 2


@dataclass(frozen=True)
class ExplanationView:
    """The title, then one paragraph for each sentence, with the numbers of its events dimmed at the end.

    The coordinator bounds its sentences; this shows no more than that of any other, and nothing but text.
    """

    explanation: Explanation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width)
        yield Text(_plain(self.explanation.title.text), style="bold")
        for each in self.explanation.statements[:_MOST_SENTENCES]:
            # Not rich's padding, which fills each line with blanks.
            for line in _sentence(each).wrap(console, width - _INDENT):
                line.rstrip()
                yield Text(" " * _INDENT) + line


def _sentence(statement: Statement) -> Text:
    shown = Text(_plain(statement.text))
    if statement.events:
        shown.append(f" [{', '.join(map(str, statement.events))}]", style="dim")
    return shown


def _plain(text: str) -> str:
    """`text` without characters that would do something to the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_MOST_CHARACTERS])
