"""Options of several devices that cannot be used together."""

from __future__ import annotations

import os

import pytest

from tests.support.commands import PLAIN, hetnode, run


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--device", "all"), "are for full replicas"),
        (("--role", "stage", "--device", "all"), "Give --device 0,1"),
        (("--role", "stage", "--device", "0,1", "--folder", "here"), "cannot share --folder"),
        (("--role", "stage", "--device", "0,1", "--listen", "127.0.0.1:7000"), "cannot share --listen"),
        (("--role", "replica", "--device", "0,0"), "not a list of different GPUs"),
        (("--role", "replica", "--sharded"), "are for several devices"),
    ],
)
def test_each_has_one_message_and_the_exit_status_of_options(options: tuple[str, ...], cause: str) -> None:
    result = hetnode("join", "a-run", *options)
    assert result.returncode == 2
    assert cause in result.stderr
    assert result.stderr.count("[bad-option]") == 1


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("options", "missing", "cause"),
    [
        (("--role", "replica"), "WORLD_SIZE", "has RANK, but not WORLD_SIZE"),
        (
            ("--role", "replica", "--device", "cpu:2"),
            "",
            "contradict the environment of torchrun",
        ),
        ((), "", "Only a full replica can have several processes"),
    ],
)
def test_the_environment_of_a_launcher_is_checked_first(
    options: tuple[str, ...], missing: str, cause: str
) -> None:
    launched = {name: value for name, value in LAUNCHED.items() if name != missing}
    environment = {**os.environ, **PLAIN, **launched}
    result = run("node.__main__", "join", "a-run", *options, environment=environment)
    assert result.returncode == 2
    assert cause in result.stderr
    assert result.stderr.count("[bad-option]") == 1
