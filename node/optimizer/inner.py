"""AdamW over one stage, with moments that can be kept, given back, or started anew in mid-run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from node.optimizer.schedule import cold_factor
from protocol.spec.run import RunSpec

_FIRST, _SECOND = _MOMENTS = "exp_avg", "exp_avg_sq"

AdamW = Callable[..., torch.optim.Optimizer]
"""As torch.optim.AdamW: its arguments, the names of its state, and groups of named parameters."""


@dataclass(frozen=True)
class Moments:
    """The state of :class:`InnerOptimizer`: first and second moments by name, float32 on the CPU.

    Attributes:
        steps: AdamW's own count, for its bias correction.
        cold_steps: steps taken since the moments started anew in mid-run; None where they did not, or where
            the rate has risen in full.
    """

    steps: int
    cold_steps: int | None
    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]


class InnerOptimizer:
    """AdamW on the parameters of one stage, which it changes in place.

    Weight decay acts on matrices only, and never on the embedding: a replica that is cut into members would
    otherwise disagree with one that is not about the table they share.

    Args:
        spec: the run.
        parameters: the live parameters by canonical name.
        undecayed: names of matrices without weight decay.
        adamw: makes the optimizer proper.
    """

    def __init__(
        self,
        spec: RunSpec,
        parameters: Mapping[str, nn.Parameter],
        undecayed: Iterable[str],
        adamw: AdamW = torch.optim.AdamW,
    ) -> None:
        self._parameters, self._cold_limit = parameters, spec.recovery.cold_steps
        spared = set(undecayed)
        decayed, plain = [], []
        for name, parameter in parameters.items():
            (decayed if parameter.dim() == 2 and name not in spared else plain).append((name, parameter))
        inner = spec.inner
        groups = [
            {"params": decayed, "weight_decay": inner.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adamw = adamw(
            [group for group in groups if group["params"]],
            lr=inner.learning_rate,
            betas=(inner.beta1, inner.beta2),
            eps=inner.epsilon,
        )
        self._cold_steps: int | None = None

    def begin_round(self, round_number: int) -> None:
        """Before the first step of `round_`: fresh moments in a run that is past its first round are cold."""
        if round_number > 1 and not self._adamw.state:
            self._cold_steps = 0

    def step(self, rate: float) -> None:
        """One AdamW step along the gradients, at `rate`, or at less of it while the moments are cold."""
        if self._cold_steps is not None:
            rate *= cold_factor(self._cold_steps, self._cold_limit)
            self._cold_steps = self._cold_steps + 1 if self._cold_steps + 1 < self._cold_limit else None
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()

    def forget_gradients(self) -> None:
        """Drop what backward passes have left since the last step."""
        self._adamw.zero_grad(set_to_none=True)

    def start_anew(self) -> None:
        """Forget the moments: they belong to parameters that are no longer there."""
        self._adamw.state.clear()
        self._cold_steps = None

    def map_tensors(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Put `change(key, tensor)` in the place of every moment; keys are equal at every call."""
        for name, parameter in self._parameters.items():
            held = self._adamw.state.get(parameter, {})
            for kind in _MOMENTS if held else ():
                held[kind] = change(f"{kind}/{name}", held[kind])

    @property
    def moments(self) -> Moments | None:
        """The moments, not copied where they lie on the CPU; None before the first step."""
        state = self._adamw.state
        if not state:
            return None
        held = {name: state[parameter] for name, parameter in self._parameters.items()}
        return Moments(
            steps=int(next(iter(held.values()))["step"]),
            cold_steps=self._cold_steps,
            first={name: values[_FIRST].detach().cpu() for name, values in held.items()},
            second={name: values[_SECOND].detach().cpu() for name, values in held.items()},
        )

    def restore(self, moments: Moments | None) -> None:
        """Go on from `moments`, copied; None starts anew. Names and shapes are those of the parameters."""
        self.start_anew()
        if moments is None:
            return
        for name, parameter in self._parameters.items():
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(moments.steps)),
                _FIRST: moments.first[name].to(parameter.device, copy=True),
                _SECOND: moments.second[name].to(parameter.device, copy=True),
            }
        self._cold_steps = moments.cold_steps
