"""What stages need of a machine's memory at least, compared before anything of theirs is allocated.

Sizes are those of a specification that somebody else wrote. The coordinator plans with closer estimates
(coordinator.placement.cost_model); what these bounds refuse could not run at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from node.core.model.shapes import parameter_count
from node.ipc.worker_calls import ComputeOptions
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.types import StageRange

_TRAINED = 16  # bytes of a parameter with its gradient and moments
_OUTER = 12  # its anchor and error feedback, in main memory
_SCALAR, _HALF = 4, 2
_REMEDY = "Give the node more memory; or --role stage or auto: then the coordinator chooses stages that fit."


@dataclass(frozen=True)
class Need:
    """Bytes that a member needs at least: on its device, and of that its outer state, in main memory."""

    what: str
    device: float
    outer: float

    @classmethod
    def of(cls, spec: RunSpec, stages: StageRange, device: str, parts: int) -> Need:
        """Of `stages`, with parameters that are sharded over `parts` devices like this one."""
        parameters = sum(parameter_count(spec, stage) for stage in stages) / parts
        layers = sum(len(spec.layers_of(stage)) for stage in stages)
        table, width = spec.model.vocabulary * spec.model.width, spec.model.width
        outer = _OUTER * parameters + (stages.first > 0) * _SCALAR * table
        has_link = len(stages) < spec.swarm.stages and spec.link.may_compress
        trained = _TRAINED * parameters - _SCALAR * spec.lacks_second_moment(layers) / parts
        own = trained + _passing(spec, layers) + has_link * _SCALAR * width**2
        on_device = own + outer * (torch.device(device).type == "cpu")
        return cls(f"Stages {stages} of this run need at least", on_device, outer)

    def hold(self, options: ComputeOptions) -> None:
        """Hold torch to the memory limit where it can be held. Raises HetnodeError BAD_OPTION above it."""
        if not options.memory_limit:
            return
        if self.device > options.memory_limit:
            limit = f"--memory-limit {options.memory_limit / 1e9:g}"
            raise HetnodeError(
                ErrorCode.BAD_OPTION, f"{self.what} {self.device / 1e9:.3g} GB, above {limit}.", _REMEDY
            )
        if (device := torch.device(options.device)).type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_limit / total), device)
        elif device.type == "mps":
            most = torch.mps.recommended_max_memory()
            torch.mps.set_per_process_memory_fraction(min(1.0, options.memory_limit / most))

    def fit(self, free: float, main: float, device: str) -> None:
        """Raises HetnodeError DEVICE_UNAVAILABLE where so much is not free."""
        require_room(self.what, self.device, free, device)
        require_room(self.what, self.outer, main, "this machine")


def layers_bytes(spec: RunSpec) -> float:
    """Bytes that a microbatch through the layers of stage 0 needs at least, forward and backward."""
    layers = len(spec.layers_of(0))
    return 2 * _SCALAR * layers * spec.model.layer_parameters + _passing(spec, layers)


def require_room(what: str, needed: float, free: float, device: str) -> None:
    """Raises HetnodeError DEVICE_UNAVAILABLE where `free` bytes are less than the `needed` ones."""
    if needed > free:
        raise HetnodeError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"{what} {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free on {device}.",
            _REMEDY,
        )


def _passing(spec: RunSpec, layers: int) -> float:
    """Bytes of one microbatch: the input of each layer, and what is within one of them, in half precision."""
    model = spec.model
    within = 2 * model.feed_forward + model.query_width + 2 * model.key_width
    return _HALF * spec.inner.microbatch_size * model.context * (layers * model.width + within)
