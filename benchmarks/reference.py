"""docs/reference, made from the code: ``python -m benchmarks.reference`` writes its pages."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic.fields import FieldInfo

from benchmarks import homes
from coordinator.ops.monitoring import run_metrics
from coordinator.run.state import events as event_records
from node.cli.main import COMMANDS
from node.monitoring import node_metrics
from protocol import errors as error_codes
from protocol.errors import ErrorCode, ExitCode
from protocol.run_files.presets import PRESETS
from protocol.run_files.removed import REMOVED
from protocol.server.metrics import SHARED, Metric
from protocol.spec.fixed import FIXED
from protocol.spec.run import RunSpec
from protocol.spec.sections import OneOf, Section

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_NOTE = "Made by `python -m benchmarks.reference`; a test says if it is old.\n"

_ALIKE = """\
The hash covers these, too, so the JSON has them, and no run file does (`protocol/spec/fixed.py`)."""


def settings() -> str:
    """Every field of the run specification, with its default, bounds and meaning."""
    lines = [
        "# Settings of a run",
        "",
        _NOTE,
        "A run file has them in TOML, `spec_json` in JSON. `hetnode spec show PRESET --toml` prints a run",
        "file to start from.",
        "The JSON has all fields but those with a † that have their default; of a mixture's source also",
        "`weight` and `text_field`; `outer.clip` where it is 8; `batch` and `global_batch` if both are.",
        "Presets: " + ", ".join(f"`{name}`" for name in PRESETS) + ".",
    ]
    top = {name: field for name, field in RunSpec.model_fields.items() if not _is_section(field)}
    lines += ["", *_table("## The run", top, RunSpec.optional)]
    for name, field in RunSpec.model_fields.items():
        if _is_section(field):
            section = type(field.default)
            text = (inspect.getdoc(section) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")
            lines += ["", *_table(f"## {name}", section.model_fields, section.optional, text)]
    alike = {name: entry for name, entry in FIXED.items() if entry.is_hashed}
    lines += ["", "## What all runs have alike", "", _ALIKE, "", "| field | value | why |", "|---|---|---|"]
    for name, entry in alike.items():
        beside = f", only beside `{entry.beside}`" if entry.beside else ""
        lines.append(f"| `{name}` | `{json.dumps(entry.value)}`{beside} | {_cell(REMOVED[name].why)} |")
    return "\n".join(lines) + "\n"


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.default, Section)


def _table(
    title: str, found: Mapping[str, FieldInfo], optional: Collection[str], text: str = ""
) -> Iterator[str]:
    """The fields of `found`; those of `optional` are not in the JSON where they have their default."""
    yield from (title, "")
    if text:
        yield from (text, "")
    yield from ("| field | default | values | meaning |", "|---|---|---|---|")
    for name, field in found.items():
        default = "none" if field.default is None else str(field.default).lower()
        if isinstance(field.default, str):
            default = f"`{field.default}`" if field.default else '""'
        mark = " †" if name in optional else ""
        yield f"| `{name}`{mark} | {default} | {_bounds(field)} | {_cell(field.description or '')} |"


def _bounds(field: FieldInfo) -> str:
    choices = [str(each) for each in get_args(field.annotation) if isinstance(each, str)]
    choices += [name for each in field.metadata if isinstance(each, OneOf) for name in each.names]
    if choices:
        return ", ".join(f"`{each}`" for each in choices)
    told = []
    for sign, key in ((">", "gt"), (">=", "ge"), ("<", "lt"), ("<=", "le")):
        for limit in field.metadata:
            if (bound := getattr(limit, key, None)) is not None:
                told.append(f"{sign} {bound:,}" if isinstance(bound, int) else f"{sign} {bound:g}")
    return ", ".join(told)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def errors() -> str:
    """Every error code, with its exit status and what it means."""
    meanings = _documented(error_codes, "ErrorCode")
    families = _documented(error_codes, "ExitCode")
    lines = [
        *("# Errors and exit statuses", "", _NOTE),
        "A failure that is not a bug prints one message, `error [code] cause remedy`, without a traceback.",
        "The codes are stable: scripts may rely on them. Peers receive the same codes over gRPC. As process",
        "1 of a container, a command that signal n has ended exits with 128 + n.",
        *("", "| exit status | family |", "|---|---|"),
        *(f"| {code.value} | {families[code.name]} |" for code in ExitCode),
        *("", "| code | exit status | when |", "|---|---|---|"),
        *(f"| `{code.label}` | {int(code.exit_code)} | {_cell(meanings[code.name])} |" for code in ErrorCode),
    ]
    return "\n".join(lines) + "\n"


def _documented(module: Any, name: str) -> dict[str, str]:
    """The text under each member of an enumeration. KeyError for a member without one."""
    tree = ast.parse(inspect.getsource(module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {}
    for member, after in pairwise(body):
        if isinstance(member, ast.Assign) and isinstance(after, ast.Expr):
            target = member.targets[0]
            assert isinstance(target, ast.Name)
            found[target.id] = ast.literal_eval(after.value).rstrip(".")
    return found


def metrics() -> str:
    """Every metric of coordinator and nodes."""

    def table(title: str, found: Iterable[Metric]) -> list[str]:
        rows = [
            f"| `{each.name}` | {', '.join(f'`{label}`' for label in each.labels)} | {each.help} |"
            for each in found
        ]
        return ["", f"## {title}", "", "| metric | labels | meaning |", "|---|---|---|", *rows]

    lines = [
        *("# Metrics", "", _NOTE),
        "`--metrics HOST:PORT` serves them to Prometheus. Labels have few values over the life of a run.",
        "Totals of the run survive a restart of the coordinator; changes of peers and refusals count from",
        "the start of the process.",
        *table("The coordinator", run_metrics.METRICS),
        *table("A node", node_metrics.METRICS),
        *table("Both", SHARED),
    ]
    return "\n".join(lines) + "\n"


def events() -> str:
    """Every event of the coordinator's log."""
    kinds = [
        each
        for each in vars(event_records).values()
        if inspect.isclass(each) and each.__module__ == event_records.__name__ and not each.__subclasses__()
    ]
    rows = []
    for kind in kinds:
        text = (inspect.getdoc(kind) or "").partition("\n\n")[0]
        text = "" if text.startswith(f"{kind.__name__}(") else text  # dataclasses write their signature
        names = ", ".join(f"`{each.name}`" for each in fields(kind) if each.name != "at")
        rows.append(f"| `{kind.__name__}` | {names} | {_cell(text)} |")
    lines = [
        *("# Events", "", _NOTE),
        "The coordinator's log is a sequence of these records; each also has `at`, seconds on the clock of",
        "the command loop. The state of a run follows from them alone.",
        *("", "| event | fields | meaning |", "|---|---|---|", *rows),
    ]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every command."""
    rows = [row for name, lazy in COMMANDS.items() for row in _rows(f"hetnode {name}", lazy.load(name))]
    lines = [
        *("# Commands", "", _NOTE),
        "`hetnode COMMAND --help` describes the options.",
        *("", "| command | what it does |", "|---|---|", *rows),
    ]
    return "\n".join(lines) + "\n"


def _rows(title: str, command: Any) -> Iterator[str]:
    if isinstance(command, typer.core.TyperGroup):
        for name, below in command.commands.items():
            yield from _rows(f"{title} {name}", below)
        return
    arguments = [each.name.upper() for each in command.params if each.param_type_name == "argument"]
    text = (command.help or "").partition("\n\n")[0]
    yield f"| `{' '.join([title, *arguments])}` | {_cell(text)} |"


PAGES: Mapping[str, Callable[[], str]] = {
    "settings": settings,
    "errors": errors,
    "metrics": metrics,
    "events": events,
    "commands": commands,
    "8b": homes.page,
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / f"{name}.md").write_text(page())


if __name__ == "__main__":
    main()
