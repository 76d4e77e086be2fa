"""The links of one replica as a variation changes them."""

from __future__ import annotations

from node.experiment.in_process_replica import LocalReplica
from node.experiment.link_parameters import LinkParameters
from node.experiment.token_table import TableEnd, TokenTable
from node.experiment.variation import Variation
from protocol.spec.run import RunSpec


class VariedLinks:
    """The ends of all links of `replica`. The replica trains their parameters.

    Attributes:
        parameters: by name, equal for all replicas with as many members.
    """

    def __init__(self, spec: RunSpec, variation: Variation, replica: LocalReplica) -> None:
        self._variation, self._replica = variation, replica
        self.parameters: dict[str, LinkParameters] = {}
        self._tables: dict[int, TokenTable] = {}
        if variation.private_tables:
            for boundary in self._boundaries:
                self._add_table(spec, boundary)
        replica.link_parameters = list(self.parameters.values())

    def attach(self) -> None:
        """Wrap the ends that the replica has just created."""
        for receiver in self._replica.members[1:]:
            end = receiver.hosted.upstream
            assert end is not None
            if table := self._tables.get(receiver.stages.first):
                end = TableEnd(end, table)
            receiver.hosted.upstream = end

    @property
    def _boundaries(self) -> list[int]:
        """The stages behind a link."""
        return [member.stages.first for member in self._replica.members[1:]]

    def _add_table(self, spec: RunSpec, boundary: int) -> None:
        variation, model = self._variation, spec.model
        # Each link has other buckets, so that two tokens which share one share no other.
        seed = spec.seed * spec.swarm.stages + boundary
        table = TokenTable(
            model.vocabulary, model.width, seed, variation.table_rank, variation.table_buckets
        ).to(self._replica.host_of(boundary).device)
        self._tables[boundary] = table
        self.parameters[f"table/{boundary}"] = LinkParameters(spec, table)
