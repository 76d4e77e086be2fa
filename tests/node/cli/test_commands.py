"""The table of commands: what it says of each, and that a command imports only what it needs."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from typer.main import get_command

from node.cli.main import COMMANDS, app
from tests.support.commands import imported_by

HEAVY = ("torch", "hivemind", "datasets", "matplotlib", "transformers", "tokenizers")
LIGHT_COMMANDS = [
    ["--help"],
    ["--version"],
    ["status", "--help"],
    ["health", "--help"],
    ["invite", "create", "--help"],
    ["swarm", "up", "--help"],
    ["doctor", "--help"],
    ["spec", "show", "nano"],
    ["plan", "--replicas", "2", "--stage-peers", "4"],
    ["plan", "--replicas", "2", "--set", "outer.quantizer=none", "--json"],
]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_help_of_each(name: str) -> None:
    own = COMMANDS[name].load(name).help.split("\n\n")[0]
    assert " ".join(own.split()) == COMMANDS[name].help


def test_light_commands_import_nothing_heavy() -> None:
    """What one of them has imported is there when all have run."""
    assert imported_by(*LIGHT_COMMANDS, names=HEAVY) == "[]"


def test_the_help_imports_neither_grpc_nor_the_specification() -> None:
    assert imported_by(["--help"], names=("grpc", "pydantic", "uvloop", "asyncio", "cryptography")) == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_of_80_columns_shows_every_option_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = COMMANDS[name].load(name)
    for each in [command, *getattr(command, "commands", {}).values()]:
        shown = CliRunner().invoke(each, ["--help"]).stdout
        assert max(map(len, shown.splitlines())) <= 80
        options = {option for parameter in each.params for option in parameter.opts if option.startswith("-")}
        assert options <= {*re.split(r"[\s,]+", shown)}


def test_a_command_that_is_misspelt_is_recognized() -> None:
    assert "Did you mean 'join'?" in CliRunner().invoke(get_command(app), ["jion"]).stderr
