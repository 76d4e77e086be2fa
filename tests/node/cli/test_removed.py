"""What says what to do instead of a command or an option that went."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from node.cli.main import COMMANDS as PRESENT
from node.cli.removed import COMMANDS, OPTIONS, refuse_removed
from protocol.errors import ErrorCode, HetnodeError
from tests.support.commands import hetnode


def leaves(name: str, command: Any) -> Iterator[tuple[str, set[str]]]:
    """Every command with its options, as they are typed."""
    below = getattr(command, "commands", {})
    if not below:
        yield name, {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    for other, each in below.items():
        yield from leaves(f"{name} {other}", each)


KNOWN = dict(leaf for name, lazy in PRESENT.items() for leaf in leaves(name, lazy.load(name)))


def test_nothing_in_the_tables_is_there() -> None:
    assert not COMMANDS.keys() & KNOWN.keys()
    for commands, options in OPTIONS.items():
        for command in commands:
            assert command in KNOWN
            assert not options.keys() & KNOWN[command]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_went_says_what_to_do(name: str) -> None:
    with pytest.raises(HetnodeError) as refused:
        refuse_removed([*name.split(), "--out", "x"])
    assert refused.value.code is ErrorCode.BAD_OPTION
    assert refused.value.remedy == COMMANDS[name]


def test_each_option_that_went_says_what_to_do() -> None:
    for commands, options in OPTIONS.items():
        for command, option in product(commands, options):
            for words in ([option, "x"], [f"{option}=x"], ["x", option]):
                with pytest.raises(HetnodeError) as refused:
                    refuse_removed([*command.split(), *words])
                assert refused.value.remedy
                assert option in refused.value.cause


def test_what_is_there_is_not_refused() -> None:
    for command, options in KNOWN.items():
        refuse_removed([*command.split(), *options])


def test_the_message_comes_before_that_of_wrong_usage() -> None:
    for words, instead in (
        (("plan", "figure2"), "python -m benchmarks.plan_figures"),
        (("join", "INVITE", "--devices", "all"), "--device all"),
    ):
        done = hetnode(*words)
        assert (done.returncode, "[bad-option]" in done.stderr, instead in done.stderr) == (2, True, True)
