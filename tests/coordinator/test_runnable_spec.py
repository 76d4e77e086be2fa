"""A run that nodes cannot take part in is refused where it would be created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.api.public_ports import ListenAddresses
from coordinator.app import run_coordinator
from protocol.errors import ErrorCode, HetnodeError
from tests.builders import keyed, spec_of


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        ({"outer__exchange": "reduced"}, "outer.exchange 'reduced'"),
    ],
)
async def test_no_coordinator_starts_a_run_that_nodes_refuse(
    tmp_path: Path, overrides: dict[str, Any], cause: str
) -> None:
    async def start_bootstrap(run: str) -> Any:
        raise AssertionError("nothing is started")

    spec, folder = spec_of(**overrides), tmp_path / "run"
    addresses = ListenAddresses("127.0.0.1:0", enrollment="127.0.0.1:0")
    with pytest.raises(HetnodeError) as refusal:
        await run_coordinator(spec, folder, addresses, keyed(0), start_bootstrap, lambda *_: None)
    assert refusal.value.code is ErrorCode.BAD_SPEC
    assert cause in refusal.value.cause
    assert not folder.exists()
