"""The hive host answers calls in several threads: no averager may miss a new allow list."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

from node.exchange.hive.averager import SparseAverager
from node.exchange.hive.calls import Admit
from node.exchange.hive.host import Averagers
from protocol.types import PeerId
from protocol.wire.typed_calls import Call, decode_request

NEWCOMER = PeerId("newcomer")


class Averager:
    """Stands for an averager process; keeps the allow list that it has at the moment."""

    def __init__(self, allow_list: Sequence[str]) -> None:
        self.allow_list = tuple(allow_list)
        self.calls = SimpleNamespace(call=self._call)

    def wait_until_ready(self, _: float) -> None:
        pass

    def _call(self, call: Call) -> None:
        self.allow_list = decode_request(Admit, call).peers


def test_an_allow_list_sent_during_the_forks_reaches_all_averagers() -> None:
    averagers = Averagers()
    request = Admit((NEWCOMER,), (), (), (), deadline=1.0)
    admitting = threading.Thread(target=averagers.admit, args=(request,))
    forked: list[Averager] = []

    def fork(_: int, allow_list: Sequence[PeerId]) -> SparseAverager:
        forked.append(Averager(allow_list))
        if len(forked) == 1:
            admitting.start()
            admitting.join(0.1)  # it waits until the first averager is among the others
        return cast(SparseAverager, forked[-1])

    averagers.start(range(3), fork, deadline=9.0)
    admitting.join(10)
    assert [averager.allow_list for averager in forked] == 3 * [(NEWCOMER,)]
