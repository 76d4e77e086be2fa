"""A matrix: the tables of an experiment as a TOML file says them, and the trials that fill their cells.

title = "Small"
preset = "tiny"
replicas = 4                        # M
seeds = [0, 1]
spec = { rounds = 30, swarm.stages = 4 }

[[table]]
name = "table-1"
title = "Full, mixed and compressed replicas"
baseline = "sparseloco"             # the row that "delta %" refers to
orderings = true                    # say whether base < heterogeneous < uniform

[[table.row]]
name = "sparseloco"
mode = "sparseloco"

[[table.row]]
name = "uniform"
mode = "uniform"
k = [16, 4]                         # a row each
variation = { adaptation = false }
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.data.tokenizer import check_tokenizer
from node.experiment.options import ComputeOptions
from node.experiment.results import Result
from node.experiment.tokenizers import TokenizerFile
from node.experiment.trial import Mode, Planned, Trial, portable_source, trial_in_mode
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec

_OF_TOKENIZER = (
    "data.source",
    "data.text_field",
    "data.tokenizer",
    "data.tokenizer_sha256",
    "model.vocabulary",
)
"""What a tokenizer is trained on, and what it sets itself."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TokenizerSection(_Section):
    """Byte-level BPE with this many ids, trained on the training text of the data source."""

    vocabulary: int = Field(ge=257, le=2**20)


class RowSection(_Section):
    """One row of a table, or, with several k, one for each."""

    name: str = Field(min_length=1)
    mode: Mode
    fraction: float | None = Field(None, ge=0, le=1, description="of full replicas")
    k: int | tuple[int, ...] | None = Field(None, description="link.k; the name of each row gets its k/d")
    spec: Mapping[str, Any] = Field(default_factory=dict)
    variation: Mapping[str, Any] = Field(default_factory=dict)
    tokenizer: str | None = None
    baseline: str | None = None
    paper: str = Field("", description="what the paper says")


class TableSection(_Section):
    """One table of the report."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str = Field(min_length=1)
    text: str = ""
    notes: tuple[str, ...] = ()
    baseline: str | None = None
    orderings: bool = Field(False, description="give verdicts on base < heterogeneous < uniform")
    spec: Mapping[str, Any] = Field(default_factory=dict)
    tokenizer: str | None = None
    row: tuple[RowSection, ...] = Field(min_length=1)


class MatrixFile(_Section):
    """The file as it stands."""

    title: str
    text: tuple[str, ...] = Field((), description="paragraphs with which the report begins")
    made_with: str = Field("", description="the command that makes the report, where it has one of its own")
    preset: str = "tiny"
    replicas: int = Field(ge=1, le=10_000, description="M")
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    validate_every: int = Field(10, ge=1, description="rounds of H steps")
    spec: Mapping[str, Any] = Field(default_factory=dict)
    tokenizers: Mapping[str, TokenizerSection] = Field(default_factory=dict)
    compute: ComputeOptions = ComputeOptions()
    table: tuple[TableSection, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Row:
    """A row with its trials, by seed.

    Attributes:
        baseline: name of the row of the same table that it is compared with; "" where there is none.
        k: of the links; None where the row has no links.
        width: d.
        steps_per_round: inner steps.
    """

    name: str
    mode: Mode
    baseline: str
    paper: str
    k: int | None
    width: int
    steps_per_round: int
    trials: Mapping[int, Planned]


@dataclass(frozen=True)
class Table:
    """A table with its rows, in the order of the file."""

    name: str
    title: str
    text: str
    notes: tuple[str, ...]
    orderings: bool
    rows: tuple[Row, ...]

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True)
class Matrix:
    """All tables of one file."""

    title: str
    text: tuple[str, ...]
    made_with: str
    seeds: tuple[int, ...]
    compute: ComputeOptions
    tables: tuple[Table, ...]

    @property
    def trials(self) -> list[Planned]:
        """Every trial once: seed by seed, so that a part of them compares, and in the order of the tables."""
        found: dict[str, Planned] = {}
        for seed in self.seeds:
            for table in self.tables:
                for row in table.rows:
                    found.setdefault(row.trials[seed].trial.key, row.trials[seed])
        return list(found.values())

    def narrowed(self, tables: Sequence[str], seeds: Sequence[int]) -> Matrix:
        """Only these tables and seeds; all where none is named. Raises HetnodeError BAD_OPTION."""
        for option, wanted, there in (
            ("--table", tables, [table.name for table in self.tables]),
            ("--seed", seeds, self.seeds),
        ):
            for each in wanted:
                if each not in there:
                    raise HetnodeError(
                        ErrorCode.BAD_OPTION,
                        f"The matrix has no {option[2:]} '{each}'.",
                        f"Give {option} one of: {', '.join(map(str, there))}.",
                    )
        return replace(
            self,
            seeds=tuple(seed for seed in self.seeds if not seeds or seed in seeds),
            tables=tuple(table for table in self.tables if not tables or table.name in tables),
        )


def read_matrix_file(file: Path) -> MatrixFile:
    """Raises HetnodeError BAD_MATRIX, which names the file and every key that is wrong."""
    try:
        return MatrixFile.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        faults = (f"{_where(item['loc'])}: {item['msg']}" for item in error.errors(include_url=False))
        raise _bad(file, "; ".join(faults)) from None
    except (OSError, ValueError) as error:
        raise _bad(file, str(error)) from None


def build_matrix(file: Path, read: MatrixFile, tokenizers: Mapping[str, TokenizerFile]) -> Matrix:
    """The trials of a matrix.

    Args:
        file: where it was read, for messages.
        read: what stands in it.
        tokenizers: those that it defines, by name. A trial with one that is missing has a key that no result
            has, and cannot be run.

    Raises:
        HetnodeError: BAD_MATRIX, which names the row; UNKNOWN_PRESET; what loading a tokenizer raises.
    """
    names = [table.name for table in read.table]
    if twice := {name for name in names if names.count(name) > 1}:
        raise _bad(file, f"two tables have the name {', '.join(sorted(twice))}")
    tables = tuple(_table(file, read, table, tokenizers) for table in read.table)
    return Matrix(read.title, read.text, read.made_with, read.seeds, read.compute, tables)


def data_of(read: MatrixFile) -> tuple[str, str]:
    """Data source of the matrix, and the key of its text. Raises as :func:`protocol.spec.resolve.resolve`."""
    data = resolve(read.preset, overrides=_dotted(read.spec)).data
    return data.source, data.text_field


def tokenizers_used(read: MatrixFile, tables: Sequence[str]) -> set[str]:
    """Names of those that these tables take; all tables where none is named."""
    named = {
        row.tokenizer or table.tokenizer
        for table in read.table
        if not tables or table.name in tables
        for row in table.row
    }
    return {name for name in named if name is not None and name in read.tokenizers}


def tokenizers_of(read: MatrixFile, results: Iterable[Result]) -> dict[str, TokenizerFile]:
    """The tokenizers of a matrix with which `results` were made; the files need not be on this machine.

    One of another vocabulary, or that was trained on other data, is not that of the matrix.
    """
    source, text_field = data_of(read)
    trained_on = portable_source(source), text_field
    found = {}
    for result in results:
        data, vocabulary = result.spec["data"], result.spec["model"]["vocabulary"]
        name, sha256 = data["tokenizer"], data["tokenizer_sha256"]
        section = read.tokenizers.get(name)
        is_same = (data["source"], data["text_field"]) == trained_on
        if sha256 and is_same and section is not None and section.vocabulary == vocabulary:
            found[name] = TokenizerFile(Path(f"{name}.json"), sha256, vocabulary)
    return found


def _table(
    file: Path, read: MatrixFile, table: TableSection, tokenizers: Mapping[str, TokenizerFile]
) -> Table:
    rows = tuple(row for section in table.row for row in _rows(file, read, table, section, tokenizers))
    names = [row.name for row in rows]
    if twice := {name for name in names if names.count(name) > 1}:
        raise _bad(file, f"{table.name}: two rows have the name {', '.join(sorted(twice))}")
    for row in rows:
        if row.baseline and row.baseline not in names:
            raise _bad(
                file, f"{table.name}, row {row.name}: there is no row '{row.baseline}' to compare with"
            )
    return Table(table.name, table.title, table.text, table.notes, table.orderings, rows)


def _rows(
    file: Path,
    read: MatrixFile,
    table: TableSection,
    section: RowSection,
    tokenizers: Mapping[str, TokenizerFile],
) -> Iterator[Row]:
    widths: tuple[int | None, ...] = section.k if isinstance(section.k, tuple) else (section.k,)
    where = f"{table.name}, row {section.name}"
    for k in widths:
        try:
            own = {**_dotted(table.spec), **_dotted(section.spec)}
            overrides = {**_dotted(read.spec), **own, **({} if k is None else {"link.k": k})}
            overrides |= _tokenizer(read, section.tokenizer or table.tokenizer, own, tokenizers)
            trials = {
                seed: _planned(read, section, {**overrides, "seed": seed}, section.name)
                for seed in read.seeds
            }
        except HetnodeError as error:
            if error.code is not ErrorCode.BAD_SPEC:
                raise
            raise _bad(file, f"{where}: {error.cause.rstrip('.')}") from None
        except ValidationError as error:
            faults = (f"variation.{_where(item['loc'])}: {item['msg']}" for item in error.errors())
            raise _bad(file, f"{where}: {'; '.join(faults)}") from None
        except ValueError as error:
            raise _bad(file, f"{where}: {error}") from None
        spec = trials[read.seeds[0]].trial.spec
        has_links = spec.swarm.pipelines > 0
        if k is not None and not has_links:
            raise _bad(file, f"{where}: k is given, and no replica has links")
        name = (
            section.name
            if not isinstance(section.k, tuple)
            else f"{section.name} {fraction_of(k or 0, spec.model.width)}"
        )
        yield Row(
            name=name,
            mode=section.mode,
            baseline=section.baseline or table.baseline or "",
            paper=section.paper,
            k=spec.link.k if has_links else None,
            width=spec.model.width,
            steps_per_round=spec.inner.steps,
            trials={seed: replace(planned, name=name) for seed, planned in trials.items()},
        )


def _planned(read: MatrixFile, section: RowSection, overrides: Mapping[str, Any], name: str) -> Planned:
    spec = resolve(read.preset, overrides=overrides)
    trial = trial_in_mode(spec, section.mode, read.replicas, section.fraction, section.variation)
    trial = Trial(_pinned(trial.spec), trial.variation)
    every = read.validate_every * spec.inner.steps // trial.spec.inner.steps
    return Planned(trial, name, section.mode, every)


def _pinned(spec: RunSpec) -> RunSpec:
    """With the hash of a tokenizer file that is named by its path."""
    if spec.data.tokenizer == "byte" or spec.data.tokenizer_sha256:
        return spec
    pinned = spec.data.model_copy(update={"tokenizer_sha256": check_tokenizer(spec).sha256})
    return spec.model_copy(update={"data": pinned})


def _tokenizer(
    read: MatrixFile, name: str | None, own: Mapping[str, Any], tokenizers: Mapping[str, TokenizerFile]
) -> dict[str, Any]:
    """What taking the tokenizer `name` sets, in a row of which, with its table, `own` is the spec."""
    if name is None:
        return {}
    if name not in read.tokenizers:
        raise ValueError(f"there is no section [tokenizers.{name}]")
    if against := [key for key in _OF_TOKENIZER if key in own]:
        raise ValueError(
            f"tokenizer '{name}' is trained on the data of the whole matrix and sets the vocabulary: "
            f"{', '.join(against)} cannot be given beside it"
        )
    unknown = TokenizerFile(Path(f"{name}.json"), "0" * 64, read.tokenizers[name].vocabulary)
    found = tokenizers.get(name, unknown)
    return {
        "data.tokenizer": str(found.path),
        "data.tokenizer_sha256": found.sha256,
        "model.vocabulary": found.vocabulary,
    }


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections as dotted keys, so that a row can change one field of a section."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def fraction_of(k: int, width: int) -> str:
    """k/d as people write it, such as "1/8"; "1" where nothing is compressed."""
    if k in (0, width):
        return "1"
    return f"1/{width // k}" if width % k == 0 else f"{k}/{width}"


def _where(location: Sequence[int | str]) -> str:
    return ".".join(map(str, location))


def _bad(file: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_MATRIX,
        f"The matrix {file} is not valid: {why.rstrip('.')}.",
        "Mend the file; those in benchmarks/reproduction are valid ones.",
    )
