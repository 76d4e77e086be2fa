"""Families of commands."""

from __future__ import annotations

from itertools import islice
from typing import Any

from typer.core import TyperGroup


class CommandFamily(TyperGroup):
    """A family of commands whose own options may also stand behind the name of the command.

    Its help does not cut what a command does to a line.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        helps = {name: getattr(self.get_command(ctx, name), "help", "") for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, text.partition("\n\n")[0]) for name, text in helps.items()])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for each in self.params if each.name != "help" for name in each.opts}
        words, shared, rest = iter(args), list[str](), list[str]()
        for word in words:
            name, has_value, _ = word.partition("=")
            if word == "--":
                rest += [word, *words]
            elif name in own:
                shared += [word] if has_value else [word, *islice(words, 1)]
            else:
                rest.append(word)
        return super().parse_args(ctx, [*shared, *rest])
