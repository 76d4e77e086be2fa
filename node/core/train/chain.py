"""The place of this member in the chain of its replica: its links, and the pipeline between them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from node.core.train.pipeline import Pipeline
from node.core.train.replica_links import open_links
from node.core.train.services import Services
from node.ipc.worker_calls import Connect
from node.net.membership import PeerAssignment
from protocol.errors import faulty_peer
from protocol.status import Wait
from protocol.types import Link


class OpenChain:
    """Open it with an assignment, and again when its neighbours change. The context closes the links.

    Attributes:
        pipeline: of the links that were opened last.
    """

    pipeline: Pipeline

    def __init__(self, services: Services) -> None:
        self._services, self._links = services, AsyncExitStack()
        self._connected: tuple[int, tuple[Link, ...]] | None = None  # the replica, and its links' k

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._links.__aexit__(kind, error, trace)

    async def open(self, assignment: PeerAssignment, round_number: int) -> None:
        """Open the links in place of those that were open. Raises as :func:`open_links`."""
        await self._links.aclose()
        waits = self._services.figures.waits
        with waits.on(Wait.LINKS):
            links = await open_links(self._services, assignment, round_number, self._links)
        place = assignment.plan, assignment.replica, assignment.position, self._services.worker
        self.pipeline = Pipeline(self._services.spec, *place, *links, waits, round_number)
        await self._connect(assignment)

    async def adopt(self, assignment: PeerAssignment, round_number: int) -> None:
        """Go on with the same links under the plan of the next round, which may give them another k.

        Both ends change k between the same two rounds, when no frame is under way, so the link stays open.
        """
        await self._connect(assignment)
        self.pipeline.adopt(assignment.plan, assignment.replica, round_number)

    async def _connect(self, assignment: PeerAssignment) -> None:
        """Tell the worker how wide both links are, unless it knows."""
        replica, width = assignment.replica, self._services.spec.model.width
        if self._connected == (replica.index, replica.links):
            return
        if any(link.k > width for link in replica.links):
            raise faulty_peer(
                f"Plan {assignment.plan.epoch} has a link whose k exceeds the model's width of {width}."
            )
        k_upstream = None if assignment.is_first else replica.links[assignment.position - 1].k
        k_downstream = None if assignment.is_last else replica.links[assignment.position].k
        await self._services.worker.call(Connect(k_upstream, k_downstream, replica.index))
        self._connected = replica.index, replica.links
