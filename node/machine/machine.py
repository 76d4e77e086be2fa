"""This machine as a worker finds it: its devices, their memory and speed, and the ranks that share them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import psutil
import torch

from node.core.optimizer.inner import OPTIMIZERS, MakeOptimizer
from node.core.worker.compute import Compute, memory_in_use
from node.ipc import worker_calls as calls
from node.machine.devices import check_device
from node.machine.memory import hold_to_limit, layers_bytes, require_need, require_room
from node.machine.speed import layer_speed
from node.measure.hardware import free_memory
from node.moments.host_moments import HOST_OPTIMIZERS
from node.ranks.group import RankGroup, form_group
from protocol.errors import ErrorCode, HetnodeError
from protocol.memory.needs import (
    MemoryPolicy,
    MemoryRoom,
    choose,
    described,
    members_left,
    memory_need,
)
from protocol.spec.fixed import MEMORY_RESERVE
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

    def place(
        self, spec: RunSpec, stages: StageRange, options: calls.ComputeOptions
    ) -> tuple[Compute, bool, Mapping[str, MakeOptimizer]]:
        """How to compute these stages, whether their parameters are sharded, and the optimizers.

        Where memory of the device is short, moments go to main memory, or layers are computed again.
        Raises HetnodeError BAD_OPTION, or DEVICE_UNAVAILABLE if the stages cannot fit in the memory that this
        node may use.
        """
        compute, is_sharded = self._compute(options), self._is_sharded(spec, stages, options)
        within, parts = replace(options, device=compute.device), self.group.size if is_sharded else 1
        hold_to_limit(within)
        free, main = self._free_bytes(within), free_memory()
        if (device := torch.device(compute.device)).type != "cpu":
            free += memory_in_use(device)  # what the measurement of its speed has left can be used again
        planned = 1 - MEMORY_RESERVE
        room = MemoryRoom(compute.device, planned * free, planned * main, self.group.size)
        left, least = members_left(spec, stages), MemoryPolicy(checkpointing=compute.activation_checkpointing)
        policy, need = choose(spec, stages, left, room, least, parts)
        if self.group.any(policy.checkpointing):  # all ranks run a layer equally often
            policy, need = choose(spec, stages, left, room, MemoryPolicy(checkpointing=True), parts)
        at_least = memory_need(spec, stages, 1, compute.device, policy, parts)
        require_need(stages, at_least, within, free, main)
        log.info("%s: %s", stages.text, described(policy, need, compute.device))
        optimizers = HOST_OPTIMIZERS if policy.host_moments else OPTIMIZERS
        return replace(compute, activation_checkpointing=policy.checkpointing), is_sharded, optimizers

    def _compute(self, options: calls.ComputeOptions) -> Compute:
        device = self._device or options.device
        return Compute(
            device, options.compile, options.activation_checkpointing, options.precision, options.pieces
        )

    def _is_sharded(self, spec: RunSpec, stages: StageRange, options: calls.ComputeOptions) -> bool:
        """Whether to shard the parameters over the ranks. All ranks decide the same."""
        if self.group.size == 1:
            return False
        needed = sum(spec.parameters_of(stage) for stage in stages) * _BYTES
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
