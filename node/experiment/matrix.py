"""A matrix: the tables of an experiment, as a TOML file defines them, and the trials of their cells.

title = "Small"
preset = "tiny"
replicas = 4                        # M
seeds = [0, 1]
spec = { rounds = 30, swarm.stages = 4 }
data_parallel = { inner.learning_rate = 4e-3 }  # for the rows of mode data-parallel

[[table]]
name = "table-1"
title = "Full, mixed and compressed replicas"
baseline = "sparseloco"             # the row that "delta %" refers to
orderings = true                    # give verdicts on base < heterogeneous < uniform

[[table.row]]
name = "sparseloco"
mode = "sparseloco"

[[table.row]]
name = "uniform"
mode = "uniform"
k = [16, 4]                         # one row for each
variation = { adaptation = false }
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from node.data.tokenizer import BYTES, pinned
from node.experiment.results import Result, faults_of
from node.experiment.tokenizers import END_OF_TEXT_ID, TokenizerFile
from node.experiment.trial import Mode, Planned, Trial, TrialOptions, portable_source, trial_in_mode
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

_SET_BY_TOKENIZER = (
    "data.source",
    "data.text_field",
    "data.tokenizer",
    "data.tokenizer_sha256",
    "model.vocabulary",
)
"""The data that a tokenizer of the matrix is trained on, and the fields that it sets."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TokenizerSection(_Section):
    """Byte-level BPE with `vocabulary` ids, trained on the training text of the data source."""

    vocabulary: int = Field(ge=257, le=2**20)


class RowSection(_Section):
    """One row of a table; a list of k gives one row for each."""

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
    """The content of the file."""

    title: str
    text: tuple[str, ...] = Field((), description="first paragraphs of the report")
    made_with: str = Field("", description="the command that makes the report; default: hetnode experiment")
    preset: str = "tiny"
    replicas: int = Field(ge=1, le=10_000, description="M")
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    validate_every: int = Field(10, ge=1, description="rounds of H steps")
    spec: Mapping[str, Any] = Field(default_factory=dict)
    data_parallel: Mapping[str, Any] = Field(
        default_factory=dict,
        description="fields of the spec for rows of mode data-parallel, such as AdamW's own learning rate",
    )
    tokenizers: Mapping[str, TokenizerSection] = Field(default_factory=dict)
    compute: TrialOptions = TrialOptions()
    table: tuple[TableSection, ...] = Field(min_length=1)


@dataclass(frozen=True)
class MatrixRow:
    """A row with its trials, by seed.

    Attributes:
        baseline: the row of the same table with which it is compared, by name; "" if there is none.
        k: of the links; None if the row has no links.
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
    """A table of the file with its rows, in their order; a list of k has given several."""

    section: TableSection
    rows: tuple[MatrixRow, ...]

    @property
    def name(self) -> str:
        return self.section.name

    def row(self, name: str) -> MatrixRow:
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True)
class Matrix:
    """All tables of one file."""

    file: MatrixFile
    seeds: tuple[int, ...]
    tables: tuple[Table, ...]

    @property
    def trials(self) -> list[Planned]:
        """Every trial once. The seeds come one after the other, so that an incomplete run can be compared."""
        found: dict[str, Planned] = {}
        for seed in self.seeds:
            for table in self.tables:
                for row in table.rows:
                    found.setdefault(row.trials[seed].trial.key, row.trials[seed])
        return list(found.values())

    def narrowed(self, tables: Sequence[str], seeds: Sequence[int]) -> Matrix:
        """Only these tables and seeds; () stands for all. Raises HetnodeError BAD_OPTION."""
        for option, wanted, known in (
            ("--table", tables, [table.name for table in self.tables]),
            ("--seed", seeds, self.seeds),
        ):
            for each in wanted:
                if each not in known:
                    raise HetnodeError(
                        ErrorCode.BAD_OPTION,
                        f"The matrix has no {option[2:]} '{each}'.",
                        f"Give {option} one of: {', '.join(map(str, known))}.",
                    )
        return replace(
            self,
            seeds=tuple(seed for seed in self.seeds if not seeds or seed in seeds),
            tables=tuple(table for table in self.tables if not tables or table.name in tables),
        )


def read_matrix_file(file: Path) -> MatrixFile:
    """Read and validate `file`. Raises HetnodeError BAD_MATRIX, which names the file and every wrong key."""
    try:
        return MatrixFile.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise _bad(file, faults_of(error)) from None


def build_matrix(file: Path, read: MatrixFile, tokenizers: Mapping[str, TokenizerFile]) -> Matrix:
    """The trials of a matrix.

    Args:
        file: for messages.
        read: the content of `file`.
        tokenizers: the trained tokenizers of the matrix, by name. A trial whose tokenizer is missing gets a
            key that no result has, and cannot run.

    Raises:
        HetnodeError: BAD_MATRIX, which names the row; UNKNOWN_PRESET; as :func:`check_tokenizer`.
    """
    if repeated := _repeated([table.name for table in read.table]):
        raise _bad(file, f"two tables have the name {repeated}")
    builder = _Builder(file, read, tokenizers)
    tables = tuple(map(builder.table, read.table))
    return Matrix(read, read.seeds, tables)


def data_of(read: MatrixFile) -> tuple[str, str]:
    """The data source of the matrix and the key of its text. Raises as :func:`resolve`."""
    data = resolve(read.preset, overrides=_dotted(read.spec)).data
    if not isinstance(data.source, str):
        raise HetnodeError(
            ErrorCode.BAD_MATRIX,
            "A tokenizer of a matrix is trained on one source, and data.source is a mixture.",
            "Train the tokenizer elsewhere, and name its file in data.tokenizer.",
        )
    return data.source, data.text_field


def tokenizers_used(read: MatrixFile, tables: Sequence[str]) -> set[str]:
    """Names of the tokenizers that these tables use; () stands for all tables."""
    chosen = [table for table in read.table if not tables or table.name in tables]
    return {row.tokenizer or table.tokenizer or "" for table in chosen for row in table.row} & set(
        read.tokenizers
    )


def tokenizers_of(read: MatrixFile, results: Iterable[Result]) -> dict[str, TokenizerFile]:
    """The tokenizers of the matrix with which `results` were made. Their files need not exist here.

    A tokenizer with another vocabulary or from other data is not one of the matrix.
    """
    if not read.tokenizers:
        return {}
    source, text_field = data_of(read)
    source = portable_source(source)
    found = {}
    for result in results:
        data, vocabulary = result.spec["data"], result.spec["model"]["vocabulary"]
        name, sha256 = data["tokenizer"], data["tokenizer_sha256"]
        section = read.tokenizers.get(name)
        is_same = section is not None and section.vocabulary == vocabulary
        if sha256 and is_same and (data["source"], data["text_field"]) == (source, text_field):
            found[name] = TokenizerFile(Path(f"{name}.json"), sha256, vocabulary)
    return found


@dataclass(frozen=True)
class _Builder:
    """Builds the tables of one file. See :func:`build_matrix`."""

    file: Path
    read: MatrixFile
    tokenizers: Mapping[str, TokenizerFile]

    def table(self, table: TableSection) -> Table:
        rows = []
        for section in table.row:
            for k in section.k if isinstance(section.k, tuple) else (section.k,):
                try:
                    rows.append(self._row(table, section, k))
                except HetnodeError as error:
                    if error.code not in (ErrorCode.BAD_SPEC, ErrorCode.SETTING_REMOVED):
                        raise
                    raise self._bad_row(table, section.name, error.cause) from None
                except ValueError as error:
                    raise self._bad_row(table, section.name, faults_of(error, "variation.")) from None
        names = [row.name for row in rows]
        if repeated := _repeated(names):
            raise _bad(self.file, f"{table.name}: two rows have the name {repeated}")
        for row in rows:
            if row.baseline and row.baseline not in names:
                raise self._bad_row(
                    table, row.name, f"its baseline '{row.baseline}' is not a row of the table"
                )
        return Table(table, tuple(rows))

    def _row(self, table: TableSection, section: RowSection, k: int | None) -> MatrixRow:
        of_mode = self.read.data_parallel if section.mode is Mode.DATA_PARALLEL else {}
        own = {**_dotted(of_mode), **_dotted(table.spec), **_dotted(section.spec)}
        overrides = {**_dotted(self.read.spec), **own, **({} if k is None else {"link.k": k})}
        overrides |= self._tokenizer_fields(section.tokenizer or table.tokenizer, own)
        name, planned = section.name, {}
        for seed in self.read.seeds:
            spec = resolve(self.read.preset, overrides={**overrides, "seed": seed})
            if isinstance(section.k, tuple):
                name = f"{section.name} {fraction_of(k or 0, spec.model.width)}"
            trial = trial_in_mode(spec, section.mode, self.read.replicas, section.fraction, section.variation)
            trial = Trial(_pinned(trial.spec), trial.variation)
            every = self.read.validate_every * spec.inner.steps // trial.spec.inner.steps
            planned[seed] = Planned(trial, name, section.mode, every)
        spec = trial.spec
        has_links = spec.swarm.pipelines > 0
        if k is not None and not has_links:
            raise ValueError("k is given, and no replica has links")
        return MatrixRow(
            name=name,
            mode=section.mode,
            baseline=section.baseline or table.baseline or "",
            paper=section.paper,
            k=spec.link.k if has_links else None,
            width=spec.model.width,
            steps_per_round=spec.inner.steps,
            trials=planned,
        )

    def _tokenizer_fields(self, name: str | None, own: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the spec that tokenizer `name` sets. `own` are those of the row and its table."""
        if name is None:
            return {}
        if name not in self.read.tokenizers:
            raise ValueError(f"there is no section [tokenizers.{name}]")
        if conflicts := [key for key in _SET_BY_TOKENIZER if key in own]:
            raise ValueError(
                f"tokenizer '{name}' is trained on the data of the whole matrix and sets the vocabulary, so "
                f"this row or table cannot set {', '.join(conflicts)}"
            )
        unknown = TokenizerFile(Path(f"{name}.json"), "0" * 64, self.read.tokenizers[name].vocabulary)
        found = self.tokenizers.get(name, unknown)
        are_apart = own.get("data.pack") == "documents"
        return {
            "data.tokenizer": str(found.path),
            "data.tokenizer_sha256": found.sha256,
            "model.vocabulary": found.vocabulary,
            **({"data.separator": END_OF_TEXT_ID} if are_apart else {}),
        }

    def _bad_row(self, table: TableSection, name: str, why: str) -> HetnodeError:
        return _bad(self.file, f"{table.name}, row {name}: {why}")


def _pinned(spec: RunSpec) -> RunSpec:
    """`spec` with the hash of its tokenizer file, if it has one, and the token between its documents."""
    data = spec.data
    is_known = data.tokenizer_sha256 and (data.pack == "joined" or data.separator is not None)
    return spec if data.tokenizer == BYTES or is_known else pinned(spec)


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections as dotted keys, so that a row can change one field of a section."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def fraction_of(k: int, width: int) -> str:
    """k/d for people, such as "1/8"; "1" without compression."""
    if k in (0, width):
        return "1"
    return f"1/{width // k}" if width % k == 0 else f"{k}/{width}"


def _repeated(names: Sequence[str]) -> str:
    """The names that occur more than once, as a list; "" if there are none."""
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def _bad(file: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_MATRIX,
        f"The matrix {file} is not valid: {why.rstrip('.')}.",
        "Correct the file. The files in benchmarks/reproduction are examples.",
    )
