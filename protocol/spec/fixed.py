"""What all runs have alike, although the JSON of a specification has a name for it.

The hash of a specification covers its JSON, and equal hashes mean equal runs. So the JSON holds these values
under their names, although no run chooses them: :data:`FIXED` has one line for each name. A run file that
gives one is refused with the reason and with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


PLAIN_CLIP = 8.0
"""What JSON without `outer.clip` means: a mean that bounds giants alone, as in the runs of the findings."""


@dataclass(frozen=True)
class Fixed:
    """A value that no run chooses.

    Attributes:
        value: what all runs have.
        why: a sentence.
        instead: what to do instead, a sentence.
        is_hashed: whether the JSON has it; else it had its name only with another value.
        beside: another field of the section; the JSON has the value only where that field is not empty.
    """

    value: Any
    why: str
    instead: str
    is_hashed: bool = False
    beside: str = ""


_MORE_LARGEST = "Leave it out; bytes are better spent on a larger outer.top_k."
_LEAVE_OUT = "Leave it out."
_NO_GAIN = "It brought no gain (docs/findings.md)."
_NOT_TUNED = "All runs have the same value, since no other one was of use."

FIXED: Mapping[str, Fixed] = {
    "protocol_version": Fixed(
        ARITHMETIC,
        "It is the version of the arithmetic of this program.",
        "Leave it out, and run the version of hetnode with which the run began.",
        is_hashed=True,
    ),
    "model.stage_embeddings": Fixed(
        False,
        "No other program has such models, so they could not be exported.",
        "Leave it out; link.table lowers the price of compressed links, too.",
    ),
    "outer.selection": Fixed(
        "largest",
        "Values at random positions end at a loss of 2.367 instead of 2.081 at equal bytes.",
        _MORE_LARGEST,
    ),
    "outer.dense_every": Fixed(0, "Dense rounds end at a loss of 2.203 instead of 2.081.", _MORE_LARGEST),
    "outer.dense_quantizer": Fixed(None, "It was for dense rounds, which lose.", _MORE_LARGEST),
    "outer.layout": Fixed("flat", _NO_GAIN, _LEAVE_OUT, is_hashed=True),
    "outer.short_chunk": Fixed("proportional", _NO_GAIN, _LEAVE_OUT, is_hashed=True),
    "outer.codebook": Fixed(
        "tensor",
        "A scale for each chunk ends at a loss of 2.206 instead of 2.176 at equal bytes.",
        'Leave it out; outer.quantizer = "1bit" makes payloads smaller.',
        is_hashed=True,
    ),
    "outer.weighting": Fixed(
        "assigned",
        "Weights by distance cost 0.2 to 0.4 % among honest replicas, and do not stop one liar among four.",
        "Leave it out; norms are bounded in every run, and hetnode health names peers that disagree.",
    ),
    "outer.eager": Fixed(
        True,
        "Steps that overlap start from an estimate: without it, 3 of 10 cost 1.9 % of the loss, not 1.3 %.",
        "Leave it out; outer.overlap alone says how many steps overlap.",
        is_hashed=True,
        beside="overlap",
    ),
    "grouping.weights": Fixed(
        "equal",
        "Measured weights make the loss of replicas behind links of 1/64 3.9 % higher.",
        _LEAVE_OUT,
    ),
    "grouping.margin": Fixed(MARGIN, _NOT_TUNED, _LEAVE_OUT, is_hashed=True),
    "grouping.settle_rounds": Fixed(SETTLE_ROUNDS, _NOT_TUNED, _LEAVE_OUT, is_hashed=True),
    "grouping.reserve": Fixed(MEMORY_RESERVE, _NOT_TUNED, _LEAVE_OUT, is_hashed=True),
    "grouping.longest_phase": Fixed(
        0.0,
        "A constant batch is constant, however long a phase takes.",
        "Leave it out, or choose a smaller grouping.global_batch or inner.steps.",
        is_hashed=True,
        beside="batch",
    ),
    "timing.least_window": Fixed(
        LEAST_WINDOW_SECONDS,
        _NOT_TUNED,
        "Leave it out; timing.straggler makes rounds wait longer.",
        is_hashed=True,
    ),
    "timing.outage": Fixed(OUTAGE_SECONDS, _NOT_TUNED, _LEAVE_OUT, is_hashed=True),
    "recovery.extra_steps": Fixed(EXTRA_STEPS, _NOT_TUNED, _LEAVE_OUT, is_hashed=True),
    "recovery.cold_steps": Fixed(COLD_STEPS, _NOT_TUNED, _LEAVE_OUT, is_hashed=True),
    "recovery.least_share": Fixed(LEAST_SHARE, _NOT_TUNED, _LEAVE_OUT, is_hashed=True),
}
"""By the name in the JSON."""

REMOVED_VALUES: Mapping[tuple[str, Any], Fixed] = {
    ("link.dtype", name): Fixed(
        "bf16",
        f"{name} brought no gain over bf16, int4 and dithered links at equal bytes.",
        'Use "bf16", or "dither5" with link.gradient_dtype = "dither3".',
    )
    for name in ("int8", "fp32")
} | {
    ("link.gradient_dtype", name): Fixed(
        "", f"{name} brought no gain over bf16, int4 and dithered links at equal bytes.", 'Use "dither3".'
    )
    for name in ("int8", "fp32")
}
"""By the name of a setting and its value."""


def refuse_fixed(tree: Mapping[str, Any]) -> None:
    """Refuse a run file that gives a value of :data:`FIXED` or of :data:`REMOVED_VALUES`.

    Raises HetnodeError SETTING_REMOVED, which names all of them.
    """
    given = [(name, entry) for name, entry in FIXED.items() if _get(tree, name) is not _ABSENT]
    _refuse([*given, *_with_removed_values(tree)])


def with_fixed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a specification, from its settings: with what all runs have, where the hash covers it."""
    full = {name: dict(each) if isinstance(each, Mapping) else each for name, each in tree.items()}
    for name, entry in FIXED.items():
        if _is_written(full, name, entry):
            section, field = _place(full, name)
            section[field] = entry.value
    if _get(full, "outer.clip") == PLAIN_CLIP:
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
        value, is_written = _get(settings, name), _is_written(settings, name, entry)
        lacks = value is _ABSENT and is_written and entry.beside
        if lacks or value not in (_ABSENT, entry.value):
            others.append((name, entry))
        if value is not _ABSENT:
            section, field = _place(settings, name)
            del section[field]
    _refuse([*others, *_with_removed_values(settings)])
    return settings


_ABSENT = object()


def _place(tree: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The section of `tree` that has a field, and the name of the field in it."""
    section, _, field = name.rpartition(".")
    return (tree[section] if section else tree), field


def _get(tree: Mapping[str, Any], name: str) -> Any:
    section, _, field = name.rpartition(".")
    held = tree.get(section, {}) if section else tree
    return held.get(field, _ABSENT) if isinstance(held, Mapping) else _ABSENT


def _is_written(tree: Mapping[str, Any], name: str, entry: Fixed) -> bool:
    section = name.rpartition(".")[0]
    if not entry.is_hashed or not isinstance(tree.get(section, tree), Mapping):
        return False
    return not entry.beside or bool(_get(tree, f"{section}.{entry.beside}") not in (_ABSENT, 0))


def _with_removed_values(tree: Mapping[str, Any]) -> Iterator[tuple[str, Fixed]]:
    for (name, value), entry in REMOVED_VALUES.items():
        if _get(tree, name) == value:
            yield f'{name} = "{value}"', entry


def _refuse(found: Iterable[tuple[str, Fixed]]) -> None:
    entries = list(found)
    if entries:
        raise HetnodeError(
            ErrorCode.SETTING_REMOVED,
            f"Runs have no {', '.join(name for name, _ in entries)}. "
            + " ".join(dict.fromkeys(entry.why for _, entry in entries)),
            " ".join(dict.fromkeys(entry.instead for _, entry in entries)),
        )
