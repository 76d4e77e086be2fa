"""The one place where a person's choices become a run specification: a preset, a TOML run file, overrides."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.presets import PRESETS
from protocol.run_files.removed import refuse_removed
from protocol.run_files.sources import likely_source
from protocol.spec.run import RunSpec, invalid_spec
from protocol.spec.sections import Section


def resolve(
    preset: str | None = None, file: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> RunSpec:
    """Build the spec of a run: preset, then the TOML run file, then overrides; later ones win field by field.

    Args:
        preset: a name in PRESETS; None takes the file's ``preset``, or "tiny".
        file: TOML with the same sections as RunSpec.
        overrides: dotted keys, such as ``{"link.k": 8, "rounds": 5}``; None values are skipped.

    Raises:
        HetnodeError: UNKNOWN_PRESET, or BAD_SPEC or SETTING_REMOVED with every offending field named.
    """
    from_file = _read_toml(file) if file is not None else {}
    named_in_file = from_file.pop("preset", None)
    name = preset or named_in_file or "tiny"
    if not isinstance(name, str) or name not in PRESETS:
        remedy = f"Use one of: {', '.join(sorted(PRESETS))}."
        raise HetnodeError(ErrorCode.UNKNOWN_PRESET, f"There is no preset '{name}'.", remedy)
    tree = _merge(_merge({"preset": name}, PRESETS[name]), from_file)
    for key, value in (overrides or {}).items():
        if value is not None:
            branch = value
            for part in reversed(key.split(".")):
                branch = {part: branch}
            tree = _merge(tree, branch)
    refuse_removed(tree)
    # What was set when a run was changed: this one begins anew.
    tree.pop("began_as", None)
    if isinstance(data := tree.get("data"), dict):
        source = data.get("source")
        if isinstance(source, str) and (meant := likely_source(source)):
            raise HetnodeError(
                ErrorCode.BAD_SPEC, f"The data source '{source}' has no kind.", f"Use {meant}."
            )
        tree["data"] = {name: each for name, each in data.items() if name != "past"}
    try:
        return RunSpec.model_validate(tree)
    except ValidationError as error:
        raise invalid_spec(error) from None


def to_toml(spec: RunSpec) -> str:
    """`spec` as a run file, from which :func:`resolve` makes an equal one."""
    tree = spec.model_dump(mode="json")
    lines = [f"{key} = {toml_of(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, fields in tree.items():
        if isinstance(fields, dict):
            lines += ["", f"[{section}]"]
            lines += [f"{key} = {toml_of(value)}" for key, value in fields.items()]
    return "\n".join(lines) + "\n"


def toml_of(value: Any) -> str:
    """A value of JSON, but for null, as TOML has it within a section, in ASCII."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_of, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml_of(each)}' for key, each in value.items())} }}"
    # TOML has no pairs of surrogates, with which JSON writes letters beyond 16 bits.
    plain = json.dumps(value, ensure_ascii=False)
    return "".join(each if " " <= each <= "~" else f"\\U{ord(each):08x}" for each in plain)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        for name, field in RunSpec.model_fields.items():
            if isinstance(field.default, Section) and not isinstance(tree.get(name, {}), dict):
                raise ValueError(f"'{name}' must be a section, [{name}]")
        return tree
    except (OSError, ValueError) as error:
        raise HetnodeError(
            ErrorCode.BAD_SPEC,
            f"The run file {file} cannot be read: {error}.",
            "Give a TOML file with the sections that 'hetnode spec show' prints.",
        ) from None


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged
