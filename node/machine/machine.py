"""This machine as a worker finds it: its devices, their memory and speed, and the ranks that share them."""

from __future__ import annotations

import logging
from dataclasses import replace

import psutil
import torch

from node.core.model.shapes import parameter_count
from node.core.worker.compute import Compute, memory_in_use
from node.ipc import worker_calls as calls
from node.machine.devices import check_device
from node.machine.memory import Need, layers_bytes, require_room
from node.machine.speed import layer_speed
from node.ranks.group import RankGroup, form_group
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.types import StageRange

_BYTES = 16  # of a parameter
_SHARE = 0.7
"""Of a device's memory that parameters, gradients and moments may take; activations need the rest."""
log = logging.getLogger(__name__)


class OwnMachine:
    """The calls about the machine, one method each, and the :class:`node.core.worker.worker.Machine`."""

    def __init__(self) -> None:
        self.group, self._device, self._memory_limit = RankGroup(), "", 0

    def list_devices(self, _: calls.ListDevices) -> tuple[str, ...]:
        return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))

    def form_group(self, call: calls.FormGroup) -> None:
        """Meet the other ranks of this peer. Raises HetnodeError DEVICE_UNAVAILABLE, RANK_FAILED."""
        device = Compute(call.device).open()
        self._device = call.device
        store = call.host, call.port
        self.group = form_group(call.rank, call.size, store, call.listener, device, call.prefix)

    def check_device(self, call: calls.CheckDevice) -> calls.DeviceInfo:
        """Try the device before this node joins a run. Raises HetnodeError DEVICE_UNAVAILABLE."""
        found, self._memory_limit = check_device(self._compute(call.compute)), call.compute.memory_limit
        if self.group.size == 1:
            return found
        free = self.group.totals([found.free_bytes])[0]
        return replace(
            found, name=f"{self.group.size} ranks, the first on {found.name}", free_bytes=int(free)
        )

    def measure_speed(self, call: calls.MeasureSpeed) -> float:
        """Measure how fast the devices of all ranks train layers of the run.

        Raises HetnodeError DEVICE_UNAVAILABLE if one of them cannot.
        """
        compute = Compute(self._device or call.device, precision=call.precision)
        options = calls.ComputeOptions(compute.device, memory_limit=self._memory_limit)
        speed, failure = 0.0, None
        try:
            free = self._free_bytes(options)
            require_room("The layers of a stage need", layers_bytes(call.spec), free, compute.device)
            speed = layer_speed(call.spec, compute, call.seconds)
        except HetnodeError as error:
            failure = error
        self.group.agree(failure)  # the node goes on without a speed, and with ranks in step
        return self.group.totals([speed])[0]

    def place(self, spec: RunSpec, stages: StageRange, options: calls.ComputeOptions) -> tuple[Compute, bool]:
        """How to compute these stages, and whether their parameters are sharded over the ranks.

        Raises HetnodeError BAD_OPTION, or DEVICE_UNAVAILABLE if the stages cannot fit in the memory that this
        node may use.
        """
        compute, is_sharded = self._compute(options), self._is_sharded(spec, stages, options)
        within = replace(options, device=compute.device)
        need = Need.of(spec, stages, compute.device, self.group.size if is_sharded else 1)
        need.hold(within)
        free = self._free_bytes(within)
        if (device := torch.device(compute.device)).type != "cpu":
            free += memory_in_use(device)  # what the measurement of its speed has left can be used again
        need.fit(free, psutil.virtual_memory().available, compute.device)
        return compute, is_sharded

    def _compute(self, options: calls.ComputeOptions) -> Compute:
        device = self._device or options.device
        return Compute(
            device, options.compile, options.activation_checkpointing, options.precision, options.pieces
        )

    def _is_sharded(self, spec: RunSpec, stages: StageRange, options: calls.ComputeOptions) -> bool:
        """Whether to shard the parameters over the ranks. All ranks decide the same."""
        if self.group.size == 1:
            return False
        needed = sum(parameter_count(spec, stage) for stage in stages) * _BYTES
        is_sharded = (
            options.sharded if options.sharded is not None else needed > _SHARE * self._free_bytes(options)
        )
        if is_sharded := self.group.any(is_sharded):
            log.info("rank %d of %d: parameters are sharded over the ranks", self.group.rank, self.group.size)
        if is_sharded and options.compile:
            raise HetnodeError(
                ErrorCode.BAD_OPTION,
                "--compile cannot be used where parameters are sharded over the devices.",
                "Leave out --compile; or give --replicated if the model fits on each device.",
            )
        return is_sharded

    def _free_bytes(self, options: calls.ComputeOptions) -> float:
        """What this rank's device can still take. CPU ranks share the memory of the machine."""
        found = check_device(self._compute(options)).free_bytes
        free = found or psutil.virtual_memory().available / self.group.size
        return min(free, options.memory_limit) if options.memory_limit else free
