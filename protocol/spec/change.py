"""Changes of a run while it trains: settings that have other values from some round on.

What a change may concern is no part of the state that nodes keep: shapes, codecs, the tokenizer and the split
into stages stay as they are. A schedule goes on as if the run had begun with the new values: with rounds
doubled, a cosine that was half over is a quarter over. A source of data goes on where it stood (`data.past`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.data import DataSource
from protocol.spec.run import RunSpec
from protocol.types import RunChange

CHANGEABLE = frozenset(
    {
        "rounds",
        *(f"inner.{name}" for name in ("steps", "learning_rate", "final_ratio", "decay_rounds")),
        *(f"inner.{name}" for name in ("weight_decay", "clip_norm")),
        *(f"outer.{name}" for name in ("learning_rate", "momentum")),
        *(f"link.{name}" for name in ("least_k", "most_k")),
        *(f"timing.{name}" for name in ("straggler", "match_window", "fetch", "decide", "link")),
        *("data.source", "data.validation"),
    }
)
"""The settings that a change may name."""
MOST_CHANGES = 256
"""Of one run: each plan tells all of them."""


def settings_text(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings as a change has them, in ascending order. Raises ValueError for what JSON cannot say."""
    return tuple(f"{name}={json.dumps(values[name], allow_nan=False)}" for name in sorted(values))


def changed(spec: RunSpec, changes: Iterable[RunChange]) -> RunSpec:
    """`spec` after `changes`, in their order; itself without any.

    Raises HetnodeError: BAD_SPEC for a setting that cannot change in a run, and for values that no run has.
    """
    tree = spec.tree
    for change in changes:
        tree["began_as"] = spec.identity
        data, trained = tree["data"], tree["data"]["source"]
        for text in change.settings:
            name, _, value = text.partition("=")
            section, field = name.rpartition(".")[::2]
            if name not in CHANGEABLE:
                raise HetnodeError(
                    ErrorCode.BAD_SPEC,
                    f"'{name:.80}' cannot be changed while a run trains.",
                    f"What can: {', '.join(sorted(CHANGEABLE))}.",
                )
            try:
                (tree[section] if section else tree)[field] = json.loads(value)
            except (ValueError, RecursionError):
                raise HetnodeError(
                    ErrorCode.BAD_SPEC, f"'{text:.80}' has no value.", "Write it like inner.steps=20."
                ) from None
        samples = change.first_sample - sum(each["samples"] for each in data.get("past", ()))
        if data["source"] != trained and samples > 0:
            data["past"] = [*data.get("past", ()), {"source": trained, "samples": samples}]
    return RunSpec.from_tree(tree) if "began_as" in tree else spec


def restored(spec: RunSpec, former: RunSpec) -> tuple[str, ...]:
    """The settings of a change that gives `spec` the values of `former`, but for the number of rounds."""
    now, then = _flat(spec), _flat(former)
    return settings_text({name: then[name] for name in then if name != "rounds" and then[name] != now[name]})


def _flat(spec: RunSpec) -> dict[str, Any]:
    """The values of what may change, by name, as JSON has them."""
    values = {name: attrgetter(name)(spec) for name in CHANGEABLE}
    return values | {f"data.{name}": _plain(getattr(spec.data, name)) for name in ("source", "validation")}


def _plain(given: str | tuple[DataSource, ...]) -> Any:
    return given if isinstance(given, str) else [each.model_dump() for each in given]
