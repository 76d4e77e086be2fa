"""The inner optimizer: AdamW or Muon over a member's stages, with clipping and the run's learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypedDict

import torch
from torch import Tensor, nn

from node.core.optimizer.adamw import MOMENTS, AdamW
from node.core.optimizer.muon import Muon
from node.core.optimizer.schedule import cold_factor, learning_rate
from node.ranks.parameters import local_part
from protocol.spec.fixed import BETAS, COLD_STEPS, EPSILON
from protocol.spec.run import RunSpec

MakeOptimizer = Callable[..., AdamW]
"""Has the arguments of AdamW."""
OPTIMIZERS: Mapping[str, MakeOptimizer] = {"adamw": AdamW, "muon": Muon}
"""By ``inner.optimizer`` of the specification."""


class Moments(TypedDict):
    """State dict of :class:`StageOptimizer`. The moments are float32, by canonical name.

    Matrices that Muon changes have no `exp_avg_sq`. `steps` is the optimizer's own count, which AdamW needs
    for its bias correction. `cold_steps` counts the steps since the moments restarted from 0 in the middle of
    the run. It is None if they never restarted, or if the learning rate has reached its full value again.
    """

    steps: int
    cold_steps: int | None
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]


class InnerOptimizer:
    """The run's optimizer over all hosted stages. Each has separate moments: see :class:`StageOptimizer`.

    `parameters` are the live ones by stage and canonical name.
    """

    def __init__(
        self,
        spec: RunSpec,
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        undecayed: Iterable[str],
        optimizers: Mapping[str, MakeOptimizer] = OPTIMIZERS,
    ) -> None:
        self._spec = spec
        self._parameters = [parameter for named in parameters.values() for parameter in named.values()]
        self._stages = {
            stage: StageOptimizer(spec, named, undecayed, optimizers) for stage, named in parameters.items()
        }

    def begin_round(self, round_number: int) -> None:
        """Call it before the first step of `round_number`."""
        for stage in self._stages.values():
            stage.begin_round(round_number)

    def squared_gradient_norm(self) -> float:
        """Sum of squares of all gradients of this member, with a relative error below 1e-5.

        Infinite if the norm of a gradient exceeds float32.
        """
        # Only this scalar travels along the pipeline: clipping needs the norm over the stages of all members.
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        # Of a gradient that is sharded over ranks, only this rank's part counts.
        norms = [_norm(local_part(gradient)) for gradient in gradients]
        # One transfer from a GPU, for all parameters together.
        return float(torch.stack(norms).cpu().double().square().sum()) if norms else 0.0

    @torch.no_grad()
    def step(self, inner_step: int, norm: float) -> None:
        """Take inner step `inner_step` of the run; `norm` is the gradient norm of the whole replica."""
        # The same 1e-6 as in torch.nn.utils.clip_grad_norm_.
        scale = self._spec.inner.clip_norm / (norm + 1e-6)
        for parameter in self._parameters if scale < 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        rate = learning_rate(self._spec.inner, inner_step, self._spec.total_steps)
        for stage in self._stages.values():
            stage.step(rate)

    def zero_grad(self) -> None:
        """Drop the gradients of the backward passes since the last step."""
        for stage in self._stages.values():
            stage.zero_grad()

    def reset(self, stage: int) -> None:
        """Drop the moments of `stage`. Call it when the parameters of the stage have been replaced."""
        self._stages[stage].load_state_dict(None)

    def state_dict(self) -> dict[int, Moments | None]:
        """The result of :meth:`StageOptimizer.state_dict` for each stage."""
        return {stage: optimizer.state_dict() for stage, optimizer in self._stages.items()}

    def load_state_dict(self, state: Mapping[int, Moments | None]) -> None:
        """Copy `state`. Stages that are not in it keep their state."""
        for stage, held in state.items():
            self._stages[stage].load_state_dict(held)


def _norm(gradient: Tensor) -> Tensor:
    """The L2 norm, a float32 scalar on the device."""
    # By rows first: a CPU adds all squares in float32, with an error of 0.3 % for 25M values at once.
    norm: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(gradient, dim=-1))
    return norm


class StageOptimizer:
    """AdamW, or Muon, on the parameters of one stage, which it changes in place.

    Weight decay applies to matrices only, and never to the embedding: with decay, a pipeline replica and a
    full replica would compute different values for the embedding.

    Args:
        parameters: the live parameters by canonical name.
        undecayed: names of further matrices without weight decay.
    """

    def __init__(
        self,
        spec: RunSpec,
        parameters: Mapping[str, nn.Parameter],
        undecayed: Iterable[str],
        optimizers: Mapping[str, MakeOptimizer] = OPTIMIZERS,
    ) -> None:
        self._parameters = parameters
        plain_names = {name for name, parameter in parameters.items() if parameter.dim() != 2} | {*undecayed}
        inner = spec.inner
        groups = [
            {
                "params": [item for item in parameters.items() if (item[0] in plain_names) == is_plain],
                "weight_decay": 0.0 if is_plain else inner.weight_decay,
            }
            for is_plain in (False, True)
        ]
        self._optimizer = optimizers[inner.optimizer](
            [group for group in groups if group["params"]],
            lr=inner.learning_rate,
            betas=BETAS,
            eps=EPSILON,
        )
        self._cold_steps: int | None = None
        self._is_late = False

    def begin_round(self, round_number: int) -> None:
        """Start the slow rise of the learning rate if the moments are empty and this is not round 1."""
        # In round 1 the warm-up of the run's own schedule has the same effect.
        self._is_late = round_number > 1
        if self._is_late and not self._optimizer.state:
            self._cold_steps = 0

    def step(self, rate: float) -> None:
        """Take one step with learning rate `rate`, or with a part of it in the first COLD_STEPS."""
        if self._cold_steps is not None:
            rate *= cold_factor(self._cold_steps)
            self._cold_steps = self._cold_steps + 1 if self._cold_steps + 1 < COLD_STEPS else None
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def zero_grad(self) -> None:
        # An idle or parked replica then holds no gradients.
        self._optimizer.zero_grad()

    def state_dict(self) -> Moments | None:
        """The live moments, not copied, where the optimizer keeps them. None before the first step."""
        if not (state := self._optimizer.state):
            return None
        held = {name: state[parameter] for name, parameter in self._parameters.items()}
        first, second = (
            {name: each[moment] for name, each in held.items() if moment in each} for moment in MOMENTS
        )
        return {
            # All parameters take every step together, so one count stands for all.
            "steps": int(next(iter(held.values()))["step"]),
            "cold_steps": self._cold_steps,
            "exp_avg": first,
            "exp_avg_sq": second,
        }

    def load_state_dict(self, state: Moments | None) -> None:
        """Copy `state` and continue; None drops the moments. Names and shapes match the parameters.

        Of parameters that are sharded over ranks, `state` has the part of this rank.
        """
        self._optimizer.state.clear()
        if state is None:  # perhaps in the middle of a phase, which overlaps with a rollback
            self._cold_steps = 0 if self._is_late else None
            return
        self._cold_steps = state["cold_steps"]
        held = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        for name, parameter in self._parameters.items():
            own = self._optimizer.state_of(parameter, [each for each in MOMENTS if name in held[each]])
            own["step"].fill_(state["steps"])  # AdamW also keeps this count as a float tensor
            for moment in own.keys() & held.keys():
                local_part(own[moment]).copy_(held[moment][name].detach())  # read only now
