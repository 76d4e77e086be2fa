"""What a member keeps of payloads that no commit counts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.core.train.commits import Commits, OwnPayload
from node.core.train.services import Services
from node.ipc.worker_calls import CommitResult, ResetError
from protocol.types import Committed, ExchangeGroup, ManifestEntry, PayloadDescriptor, PeerId
from tests.builders import spec_of

OWN = PayloadDescriptor("run", 0, 1, PeerId("own"), "anchor", "codec", 1.0, 8, "00")
OTHER = replace(OWN, owner=PeerId("other"))


class Worker:
    """Notes the rounds in which progress is dropped."""

    reads_files = True

    def __init__(self) -> None:
        self.round_number = 0
        self.dropped_in: list[int] = []

    async def call(self, request: Any) -> Any:
        if isinstance(request, ResetError):
            self.dropped_in.append(self.round_number)
            return None
        return CommitResult("digest", None)


async def dropped_in(rounds: str) -> list[int]:
    """The rounds in which what the own payloads held is dropped, by what happens to the own one in each.

    c: it counts; o: it is omitted; l: it is late, or its group was closed before it came.
    """
    worker = Worker()
    services = SimpleNamespace(
        worker=worker, identity=SimpleNamespace(peer=OWN.owner), spec=spec_of(), compare=None
    )
    commits = Commits(cast(Services, services))
    for worker.round_number, what in enumerate(rounds, start=1):
        own, other = (replace(each, round_number=worker.round_number) for each in (OWN, OTHER))
        group = ExchangeGroup("group", (other,) if what == "l" else (other, own))
        commits.pending[0] = OwnPayload.in_group(own, group)
        counted = (other, own) if what == "c" else (other,)
        entries = tuple(ManifestEntry(each, (each.owner,)) for each in counted)
        gathered = cast(Any, dict.fromkeys((own, *counted), "a file"))  # the own one is always here
        decision = Committed(0, worker.round_number, 1, "", entries)
        await commits.to_stage(decision, [gathered[each] for each in counted], gathered)
    return worker.dropped_in


@pytest.mark.parametrize(
    ("rounds", "dropped"),
    [("oo", [2]), ("oooo", [2, 4]), ("oco", []), ("ll", []), ("lolo", []), ("llll", []), ("oool", [2])],
)
async def test_what_payloads_held_is_dropped_where_two_in_a_row_came_in_time_and_counted_for_nothing(
    rounds: str, dropped: list[int]
) -> None:
    assert await dropped_in(rounds) == dropped
