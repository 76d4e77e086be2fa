"""Options of several devices that cannot be used together."""

from __future__ import annotations

import pytest

from tests.support.commands import hetnode


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--role", "stage", "--devices", "cpu:2"), "--devices is for full replicas"),
        (("--devices", "all"), "--devices is for full replicas"),
        (("--role", "replica", "--devices", "0,0"), "not a list of different GPUs"),
        (("--role", "replica", "--devices", "all", "--device", "cpu"), "contradict each other"),
        (("--role", "replica", "--sharded"), "are for several devices"),
    ],
)
def test_each_has_one_message_and_the_exit_status_of_options(options: tuple[str, ...], cause: str) -> None:
    result = hetnode("join", "a-run", *options)
    assert result.returncode == 2
    assert cause in result.stderr
    assert result.stderr.count("[bad-option]") == 1
