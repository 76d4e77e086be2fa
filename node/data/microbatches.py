"""Reads the samples of each microbatch on the member that hosts stage 0."""

from __future__ import annotations

from collections.abc import Iterator

from node.data.ahead import ReadAhead
from node.data.stream import SampleStream
from node.data.streamed import Samples
from protocol.spec.run import RunSpec


class MicrobatchReader:
    """Reads microbatches of the samples assigned to this replica.

    Args:
        stream: None on a member without stage 0, which only needs the number of microbatches.
        rank, ranks: this reader is asked for each `ranks`-th microbatch of a step, from number `rank` on.

    Attributes:
        microbatches: number of microbatches in one inner step.
    """

    def __init__(self, spec: RunSpec, stream: SampleStream | None, rank: int = 0, ranks: int = 1) -> None:
        self._spec, self._stream, self._rank, self._ranks = spec, stream, rank, ranks
        self._ahead = None if stream is None else ReadAhead(stream.read)
        self._ordinals = range(0)
        self._distance = 0
        """From the samples of the round before to those of this one, and then to those of the next one."""
        self._validation: Samples | None = None
        self.microbatches = spec.inner.microbatches

    @property
    def per_step(self) -> int:
        """Number of samples in one inner step."""
        return self.microbatches * self._spec.inner.microbatch_size

    def assign(self, ordinals: range) -> None:
        """Use these samples from the next step on. Their number determines the microbatches per step."""
        microbatches, rest = divmod(len(ordinals), self._spec.samples_per_round(1))
        assert microbatches, "the plan assigns no samples to this replica"
        assert not rest, "the number of samples is not a multiple of that in the spec"
        self._distance = ordinals.start - self._ordinals.start if self._ordinals else 0
        self._ordinals, self.microbatches = ordinals, microbatches

    def ordinals(self, step: int, microbatch: int) -> range:
        """The ordinals of one microbatch of inner step `step` (from 0) of the round."""
        size = self._spec.inner.microbatch_size
        # A step beyond H reads the samples of this round again: others belong to other replicas or rounds.
        first = step % self._spec.inner.steps * self.per_step + microbatch * size
        return self._ordinals[first : first + size]

    def training(self, step: int, microbatch: int) -> Samples:
        """Token ids [b, L + 1] of a training microbatch."""
        assert self._ahead is not None, "only the member with stage 0 reads samples"
        return self._ahead.read(self.ordinals(step, microbatch), self._expected(step, microbatch))

    def _expected(self, step: int, microbatch: int) -> Iterator[range]:
        """What is read after this microbatch, in this round and in the next one."""
        count, size = self.microbatches, self._spec.inner.microbatch_size
        end = self._spec.inner.steps * count
        now = step * count % end + microbatch
        for first, distance in ((now + 1, 0), (0, self._distance)):
            for index in range(first, end if first or distance > 0 else 0):
                if index % count % self._ranks == self._rank:
                    start = self._ordinals.start + distance + index * size
                    yield range(start, start + size)

    def validation(self, microbatch: int) -> Samples:
        """Token ids [b, L + 1] of a validation microbatch. They are the same in the whole run."""
        assert self._stream is not None, "only the member with stage 0 reads samples"
        size = self._spec.inner.microbatch_size
        if self._validation is None:  # read once: a streamed source would restart from its beginning
            self._validation = self._stream.validation(self._spec.data.validation_batches * size)
        return self._validation[microbatch * size : (microbatch + 1) * size]
