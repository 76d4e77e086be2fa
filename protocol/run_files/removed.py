"""The settings that a run file cannot give: why, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.fixed import ABSENT, FIXED, get, removed_values_in


@dataclass(frozen=True)
class Removed:
    """Why runs have no such setting, and what to do instead: two sentences."""

    why: str
    instead: str = "Leave it out."


_MORE_LARGEST = "Leave it out; bytes are better spent on a larger outer.top_k."
_NO_GAIN = "It brought no gain (docs/findings.md)."
_NOT_TUNED = "All runs have the same value, since no other one was of use."
_LLAMA3 = "Each published model with RoPE as in Llama 3 has the same value."
_RATE = "Leave it out; inner.learning_rate and inner.optimizer decide how fast a model learns."

REMOVED: Mapping[str, Removed] = {
    "protocol_version": Removed(
        "It is the version of the arithmetic of this program.",
        "Leave it out, and run the version of hetnode with which the run began.",
    ),
    "model.stage_embeddings": Removed(
        "No other program has such models, so they could not be exported.",
        "Leave it out; link.table lowers the price of compressed links, too.",
    ),
    "model.rope_low_frequency": Removed(_LLAMA3),
    "model.rope_high_frequency": Removed(_LLAMA3),
    "inner.beta1": Removed(_NOT_TUNED, _RATE),
    "inner.beta2": Removed(_NOT_TUNED, _RATE),
    "inner.epsilon": Removed(_NOT_TUNED, _RATE),
    "outer.selection": Removed(
        "Values at random positions end at a loss of 2.367 instead of 2.081 at equal bytes.", _MORE_LARGEST
    ),
    "outer.dense_every": Removed("Dense rounds end at a loss of 2.203 instead of 2.081.", _MORE_LARGEST),
    "outer.dense_quantizer": Removed("It was for dense rounds, which lose.", _MORE_LARGEST),
    "outer.layout": Removed(_NO_GAIN),
    "outer.short_chunk": Removed(_NO_GAIN),
    "outer.codebook": Removed(
        "A scale for each chunk ends at a loss of 2.206 instead of 2.176 at equal bytes.",
        'Leave it out; outer.quantizer = "1bit" makes payloads smaller.',
    ),
    "outer.weighting": Removed(
        "Weights by distance cost 0.2 to 0.4 % among honest replicas, and do not stop one liar among four.",
        "Leave it out; norms are bounded in every run, and hetnode health names peers that disagree.",
    ),
    "outer.eager": Removed(
        "Steps that overlap start from an estimate: without it, 3 of 10 cost 1.9 % of the loss, not 1.3 %.",
        "Leave it out; outer.overlap alone says how many steps overlap.",
    ),
    "grouping.weights": Removed(
        "Measured weights make the loss of replicas behind links of 1/64 3.9 % higher."
    ),
    "grouping.margin": Removed(_NOT_TUNED),
    "grouping.settle_rounds": Removed(_NOT_TUNED),
    "grouping.reserve": Removed(_NOT_TUNED),
    "grouping.longest_phase": Removed(
        "A constant batch is constant, however long a phase takes.",
        "Leave it out, or choose a smaller grouping.global_batch or inner.steps.",
    ),
    "timing.least_window": Removed(_NOT_TUNED, "Leave it out; timing.straggler makes rounds wait longer."),
    "timing.outage": Removed(_NOT_TUNED),
    "recovery.extra_steps": Removed(_NOT_TUNED),
    "recovery.cold_steps": Removed(_NOT_TUNED),
    "recovery.least_share": Removed(_NOT_TUNED),
}
"""By the name that the JSON of a specification has, or had, for it."""
assert REMOVED.keys() == FIXED.keys(), "each value that no run chooses has a reason"

_VALUE = Removed(
    "int8, int4 and fp32 links are never the best: at equal bytes bf16 or dithered ones lose less.",
    'Use link.dtype = "bf16", or "dither5" with link.gradient_dtype = "dither3".',
)


def refuse_removed(tree: Mapping[str, Any]) -> None:
    """Refuse a run file that gives a setting of :data:`REMOVED`, or a value that runs no longer have.

    Raises HetnodeError SETTING_REMOVED, which names all of them.
    """
    found = {name: entry for name, entry in REMOVED.items() if get(tree, name) is not ABSENT}
    found |= dict.fromkeys(removed_values_in(tree), _VALUE)
    if found:
        why, instead = (
            " ".join(dict.fromkeys(sentences))
            for sentences in zip(*((each.why, each.instead) for each in found.values()), strict=True)
        )
        raise HetnodeError(ErrorCode.SETTING_REMOVED, f"Runs have no {', '.join(found)}. {why}", instead)
