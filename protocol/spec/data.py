"""Where the text of a run comes from: one source or a mixture of several, and what they are measured on."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from protocol.spec.sections import Section

SOURCE_NAME = r"[a-z0-9][a-z0-9_-]{0,31}"
_NOT_NAMES = ("", "any", "data", "validation")
_KNOWN_SOURCES = "builtin, text:PATH, jsonl:PATH, parquet:PATH, hf:NAME[/CONFIG] or shards:FOLDER#sha256=HEX"
_SOURCE = re.compile(r"|builtin|(text|jsonl|parquet|hf):.+|shards:.+#sha256=[0-9a-f]{64}", re.DOTALL)
_LISTS = 'a list is written [{name = "web", source = "text:PATH", weight = 7}, ...]'


def _known_source(source: str) -> str:
    if not _SOURCE.fullmatch(source):
        right = _LISTS if source.startswith(("[", "{")) else f"use {_KNOWN_SOURCES}"
        raise ValueError(f"unknown data source '{source:.200}': {right}")
    return source


class DataSource(Section):
    """One source of a mixture: `weight` of so many samples as the weights of all add up to are its own."""

    optional = frozenset({"weight", "text_field"})

    name: str = Field("", pattern=f"^{SOURCE_NAME}$")
    source: Annotated[str, Field(min_length=1), AfterValidator(_known_source)]
    weight: int = Field(1, ge=1, le=1000)
    text_field: str = Field("", description="key of the text in its records; '': data.text_field")

    @field_validator("weight", mode="before")
    @classmethod
    def _is_whole(cls, weight: Any) -> Any:
        if isinstance(weight, float):
            raise ValueError(f"the weight {weight:g} is no whole number: write 7 and 3 for 0.7 and 0.3")
        return weight


def _form(given: Any) -> str | None:
    if isinstance(given, list | tuple) and all(isinstance(each, dict | DataSource) for each in given):
        return "(several)"
    return "(one)" if isinstance(given, str) else None


Sources = Annotated[
    Annotated[str, AfterValidator(_known_source), Tag("(one)")]
    | Annotated[tuple[DataSource, ...], Field(max_length=32), Tag("(several)")],
    Discriminator(_form, custom_error_type="sources", custom_error_message=f"it is no source, and {_LISTS}"),
]
"""One source without a name, or several, each with one."""


def listed(given: str | tuple[DataSource, ...], name: str = "") -> tuple[DataSource, ...]:
    """The sources that a setting gives; `name` is for one that has none."""
    if isinstance(given, str):
        return (DataSource.model_construct(name=name, source=given),) if given else ()
    return given


class PastData(Section):
    """What a changed run trained before: from which sources, and how many samples."""

    source: Sources
    samples: int = Field(ge=1, lt=2**63)


class DataSpec(Section):
    """Where samples come from: ``builtin``, ``hf:NAME[/CONFIG]``, ``text:PATH``, jsonl, parquet or shards."""

    optional = frozenset({"end_token", "validation", "past", "pack", "separator"})

    source: Sources = Field(
        "builtin", description="or a mixture: a list of `{name, source, weight}`, and `text_field` if unlike"
    )
    validation: Sources = Field("", description="all of such sources; '': a part of `source` is held out")
    past: tuple[PastData, ...] | None = Field(None, description="set by changes of the run: what was before")
    text_field: str = Field("text", min_length=1, description="key of the text in records")
    tokenizer: str = Field("byte", description="'byte' or the path of a tokenizer.json or tokenizer.model")
    tokenizer_sha256: str = Field("", description="set by the coordinator when it reads the tokenizer file")
    end_token: str = Field("", description="follows each document; '': one with a usual name, else a newline")
    pack: Literal["joined", "documents"] = Field(
        "joined", description="documents: no token attends to another one of its sample"
    )
    separator: int | None = Field(None, ge=0, description="set by the coordinator: the end token")
    validation_batches: int = Field(4, ge=1, le=10_000, description="micro-batches of one validation pass")

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """What is trained; one without a name where `source` is a text."""
        return listed(self.source)

    @property
    def measured(self) -> tuple[DataSource, ...]:
        """What validation is measured on: all of these in `validation`, or the held-out part of these."""
        return listed(self.validation, "validation") or self.sources

    @property
    def all_sources(self) -> tuple[DataSource, ...]:
        """What is trained, and then what is measured where that is no part of it."""
        return self.sources + listed(self.validation, "validation")

    @model_validator(mode="after")
    def _sources_are_sound(self) -> DataSpec:
        if not self.source or self.validation == ():
            raise ValueError(f"there is no data source: use {_KNOWN_SOURCES}")
        places = [each.source for each in self.all_sources]
        mixtures = [each for each in (self.source, self.validation) if not isinstance(each, str)]
        names = [each.name for mixture in mixtures for each in mixture]
        for name in (*places, self.tokenizer, self.end_token):
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                raise ValueError(f"{name!a} is not UTF-8: rename that file")
        if twice := [each for each in names if names.count(each) > 1]:
            raise ValueError(f"two sources have the name '{twice[0]}': each has its own")
        if twice := [each for each in places if places.count(each) > 1]:
            raise ValueError(f"'{twice[0]}' is named twice: it is trained, or all of it is for validation")
        if wrong := [name for name in names if name in _NOT_NAMES]:
            raise ValueError(f"'{wrong[0]}' is no name of a source: each of a mixture has one, such as 'web'")
        if (self.end_token or self.pack == "documents") and self.tokenizer == "byte":
            raise ValueError("the byte tokenizer has no end_token, which pack 'documents' also needs")
        if self.separator is not None and self.pack == "joined":
            raise ValueError("a separator is for pack 'documents'")
        return self
