"""The links of one replica as a variation changes them."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from node.experiment.frame_rounding import NoisyReceivingEnd, PreparedSendingEnd, RoundingNoise
from node.experiment.in_process_replica import LocalReplica
from node.experiment.link_parameters import LinkParameters
from node.experiment.microbatch_counter import MicrobatchCounter
from node.experiment.trained_ends import DecoderEnd, EncoderEnd, TrainedEnds
from node.experiment.variation import Variation
from node.worker.trainer import Trainer
from protocol.algorithm.subspace import ReceivingEnd, SendingEnd
from protocol.spec.run import RunSpec

_ENDS = "ends/"


class VariedLinks:
    """The ends of all links of `replica`, which trains their parameters. Wraps the ends that it has.

    `position`: of the replica in the plan.

    Attributes:
        parameters: by name, equal for all replicas with as many members.
    """

    def __init__(self, spec: RunSpec, variation: Variation, position: int, replica: LocalReplica) -> None:
        self._links = [
            _Link(spec, variation, position, sender, receiver)
            for sender, receiver in pairwise(replica.members)
        ]
        self.parameters = {name: each for link in self._links for name, each in link.parameters.items()}
        replica.link_parameters = list(self.parameters.values())
        self.attach()

    def attach(self) -> None:
        """Wrap the ends that the replica has just created anew."""
        for link in self._links:
            link.attach()


class _Link:
    """One link, between two members."""

    def __init__(
        self, spec: RunSpec, variation: Variation, position: int, sender: Trainer, receiver: Trainer
    ) -> None:
        self._spec, self._variation, self._position = spec, variation, position
        self._sender, self._receiver = sender, receiver
        self._boundary = receiver.stages.first
        self.parameters: dict[str, LinkParameters] = {}
        self._ends = self._make_ends() if variation.trained_ends else None

    def attach(self) -> None:
        sending, receiving = self._sender.hosted.downstream, self._receiver.hosted.upstream
        assert sending is not None
        assert receiving is not None
        self._sender.hosted.downstream = self._prepared(self._encoding(sending, receiving))
        self._receiver.hosted.upstream = self._noisy(self._decoding(receiving))

    def _make_ends(self) -> TrainedEnds:
        end = self._sender.hosted.downstream
        assert end is not None
        ends, rate = TrainedEnds(end.basis_dk), self._variation.end_rate
        self.parameters[f"{_ENDS}{self._boundary}"] = LinkParameters(self._spec, ends, rate)
        self._sender.modules[self._boundary - 1].register_forward_pre_hook(self._see_ids, with_kwargs=True)
        return ends

    def _see_ids(self, _: nn.Module, __: object, keywords: dict[str, Tensor]) -> None:
        self._ids_bl = keywords["ids_bl"]

    def _encoding(self, end: SendingEnd, receiving: ReceivingEnd) -> SendingEnd:
        if self._ends is None:
            return end
        # A member on another machine would keep a copy of the same T_perp.
        return EncoderEnd(end, self._ends, lambda: receiving.perpendicular_vd[self._ids_bl])

    def _decoding(self, end: ReceivingEnd) -> ReceivingEnd:
        return end if self._ends is None else DecoderEnd(end, self._ends)

    def _prepared(self, end: SendingEnd) -> SendingEnd:
        variation = self._variation
        if not (variation.stochastic_rounding or variation.link_feedback):
            return end
        feedback = self._spec.link.dtype if variation.link_feedback else None
        return PreparedSendingEnd(end, MicrobatchCounter(self._sender), self._noise(0), feedback)

    def _noisy(self, end: ReceivingEnd) -> ReceivingEnd:
        noise = self._noise(1)
        return end if noise is None else NoisyReceivingEnd(end, MicrobatchCounter(self._receiver), noise)

    def _noise(self, direction: int) -> RoundingNoise | None:
        """That of activations (0) or gradients (1)."""
        if not self._variation.stochastic_rounding:
            return None
        return RoundingNoise((self._spec.seed, self._position, self._boundary, direction))
