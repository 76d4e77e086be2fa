"""What the environment of a launcher says."""

from __future__ import annotations

import pytest

from node.hosts.launch import Launch, launch_of
from protocol.errors import ErrorCode, HetnodeError

FULL = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_a_rank_of_two_hosts() -> None:
    assert launch_of(FULL) == Launch(5, 8, 1, 4, "host", 29500, serves_store=True)


def test_torchrun_runs_the_store() -> None:
    found = launch_of({**FULL, "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found is not None
    assert found.leads
    assert not found.serves_store


@pytest.mark.parametrize("environment", [{}, {"MASTER_ADDR": "host", "MASTER_PORT": "1"}])
def test_a_node_of_its_own(environment: dict[str, str]) -> None:
    assert launch_of(environment) is None


def test_one_process_alone_is_a_node_of_its_own() -> None:
    assert (
        launch_of({**FULL, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
        is None
    )


@pytest.mark.parametrize("missing", sorted(FULL))
def test_an_incomplete_environment_names_what_is_missing(missing: str) -> None:
    with pytest.raises(HetnodeError, match=f"but not {missing}") as caught:
        launch_of({name: value for name, value in FULL.items() if name != missing})
    assert caught.value.code is ErrorCode.BAD_OPTION


@pytest.mark.parametrize(
    "changed",
    [
        {"RANK": "8"},
        {"RANK": "-1"},
        {"RANK": "one"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "9999"},
        {"LOCAL_RANK": "4"},
        {"LOCAL_WORLD_SIZE": "9"},
        {"MASTER_PORT": "65536"},
        {"MASTER_PORT": "0"},
        {"WORLD_SIZE": "\N{SUPERSCRIPT TWO}"},
    ],
)
def test_a_contradiction_is_refused(changed: dict[str, str]) -> None:
    with pytest.raises(HetnodeError) as caught:
        launch_of({**FULL, **changed})
    assert caught.value.code is ErrorCode.BAD_OPTION
