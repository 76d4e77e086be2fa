"""What all runs have alike, although the JSON of a specification has a name for it.

The hash of a specification covers its JSON, and equal hashes mean equal runs. So the JSON holds these values
under their names, although no run chooses them: :data:`FIXED` has one line for each name. What a run file
cannot give, and why, is in protocol.run_files.removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import ErrorCode, HetnodeError

ARITHMETIC = 2
"""Version of the arithmetic of all runs; a change of messages alone raises PROTOCOL_VERSION instead."""
MARGIN = 0.1
"""Share by which another placement must shorten the inner step: measured speeds vary by a few percent."""
SETTLE_ROUNDS = 3
"""Rounds between two changes of plans that only save time: a speed is known after about two rounds."""
MEMORY_RESERVE = 0.1
"""Share of a peer's memory that plans leave free, for what the allocator of a device cannot use."""
LEAST_WINDOW_SECONDS = 5.0
"""A round waits at least this long for slow replicas: shorter ones would lose to a pause of a machine."""
OUTAGE_SECONDS = 86_400.0
"""How long nodes wait for a coordinator that does not answer: a day, in which its operator sees it."""
EXTRA_STEPS = 20
"""Inner steps beyond H that a replica trains without the coordinator: a restart takes minutes."""
COLD_STEPS = 5
"""Steps of warmup after the moments were reset: AdamW's first steps are too large without them."""
LEAST_SHARE = 0.1
"""A replica with a smaller share of its H steps skips the round: its payload would be mostly noise."""
BETAS = 0.9, 0.95
"""Of AdamW, as in Llama, OLMo2 and the other models of today."""
EPSILON = 1e-8
"""Of AdamW, as in torch: no run has tuned it."""
ROPE_TURNS = 1.0, 4.0
"""Of rope_scaling "llama3": angles with fewer turns are stretched whole, those with more are kept, as in each
Llama 3."""


PLAIN_CLIP = 8.0
"""What JSON without `outer.clip` means: a mean that bounds giants alone, as in the runs of the findings."""


@dataclass(frozen=True)
class Fixed:
    """A value that no run chooses.

    Attributes:
        value: what all runs have.
        is_hashed: whether the JSON has it; else it had its name only with another value.
        beside: another field of the section; the JSON has the value only where that field is not empty.
    """

    value: Any
    is_hashed: bool = True
    beside: str = ""


FIXED: Mapping[str, Fixed] = {
    "protocol_version": Fixed(ARITHMETIC),
    "model.stage_embeddings": Fixed(False, is_hashed=False),
    "model.rope_low_frequency": Fixed(ROPE_TURNS[0], is_hashed=False),
    "model.rope_high_frequency": Fixed(ROPE_TURNS[1], is_hashed=False),
    "inner.beta1": Fixed(BETAS[0]),
    "inner.beta2": Fixed(BETAS[1]),
    "inner.epsilon": Fixed(EPSILON),
    "outer.selection": Fixed("largest", is_hashed=False),
    "outer.dense_every": Fixed(0, is_hashed=False),
    "outer.dense_quantizer": Fixed(None, is_hashed=False),
    "outer.layout": Fixed("flat"),
    "outer.short_chunk": Fixed("proportional"),
    "outer.codebook": Fixed("tensor"),
    "outer.weighting": Fixed("assigned", is_hashed=False),
    "outer.eager": Fixed(True, beside="overlap"),
    "grouping.weights": Fixed("equal", is_hashed=False),
    "grouping.margin": Fixed(MARGIN),
    "grouping.settle_rounds": Fixed(SETTLE_ROUNDS),
    "grouping.reserve": Fixed(MEMORY_RESERVE),
    "grouping.longest_phase": Fixed(0.0, beside="batch"),
    "timing.least_window": Fixed(LEAST_WINDOW_SECONDS),
    "timing.outage": Fixed(OUTAGE_SECONDS),
    "recovery.extra_steps": Fixed(EXTRA_STEPS),
    "recovery.cold_steps": Fixed(COLD_STEPS),
    "recovery.least_share": Fixed(LEAST_SHARE),
}
"""By the name in the JSON."""

REMOVED_VALUES = frozenset(
    (name, value) for name in ("link.dtype", "link.gradient_dtype") for value in ("int8", "int4", "fp32")
)
"""Names of settings with values that runs no longer have."""


def with_fixed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a specification, from its settings: with what all runs have, where the hash covers it."""
    full = {name: dict(each) if isinstance(each, Mapping) else each for name, each in tree.items()}
    for name, entry in FIXED.items():
        if _is_written(full, name, entry):
            section, field = _place(full, name)
            section[field] = entry.value
    if get(full, "outer.clip") == PLAIN_CLIP:
        del full["outer"]["clip"]
    return full


def without_fixed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a specification, from its JSON.

    Raises HetnodeError SETTING_REMOVED where the JSON has another value than all runs have.
    """
    settings = {name: dict(each) if isinstance(each, Mapping) else each for name, each in tree.items()}
    if isinstance(outer := settings.setdefault("outer", {}), dict):
        outer.setdefault("clip", PLAIN_CLIP)
    others = []
    for name, entry in FIXED.items():
        value, is_written = get(settings, name), _is_written(settings, name, entry)
        lacks = value is ABSENT and is_written and entry.beside
        if lacks or value not in (ABSENT, entry.value):
            others.append(name)
        if value is not ABSENT:
            section, field = _place(settings, name)
            del section[field]
    if found := [*others, *removed_values_in(settings)]:
        raise HetnodeError(
            ErrorCode.SETTING_REMOVED,
            f"Runs have no {', '.join(found)}, or all have another value of it.",
            "Run the version of hetnode with which this run began.",
        )
    return settings


def removed_values_in(tree: Mapping[str, Any]) -> list[str]:
    """Those of :data:`REMOVED_VALUES` that `tree` gives, as text."""
    found = sorted(each for each in REMOVED_VALUES if get(tree, each[0]) == each[1])
    return [f'{name} = "{value}"' for name, value in found]


ABSENT = object()


def _place(tree: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The section of `tree` that has a field, and the name of the field in it."""
    section, _, field = name.rpartition(".")
    return (tree[section] if section else tree), field


def get(tree: Mapping[str, Any], name: str) -> Any:
    """The value of a field in a tree of settings; ABSENT where it has none."""
    section, _, field = name.rpartition(".")
    held = tree.get(section, {}) if section else tree
    return held.get(field, ABSENT) if isinstance(held, Mapping) else ABSENT


def _is_written(tree: Mapping[str, Any], name: str, entry: Fixed) -> bool:
    section = name.rpartition(".")[0]
    if not entry.is_hashed or not isinstance(tree.get(section, tree), Mapping):
        return False
    return not entry.beside or bool(get(tree, f"{section}.{entry.beside}") not in (ABSENT, 0))
