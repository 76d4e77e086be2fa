"""Data sources as people write and read them."""

from __future__ import annotations

from protocol.spec.data import DataSpec

_KINDS = ("text", "jsonl", "parquet", "hf", "shards")
_ENDINGS = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


def kind_of_file(name: str) -> str:
    """The kind of source that the ending of a file's name tells; "" if it tells none."""
    unpacked = name.lower().removesuffix(".gz").removesuffix(".zst")
    return next((kind for ending, kind in _ENDINGS.items() if unpacked.endswith(ending)), "")


def likely_source(source: str) -> str:
    """The source that `source`, which names a file without a known kind, is likely to mean; "" for others."""
    kind, _, rest = source.partition(":")
    meant = kind_of_file(rest or kind)
    return f"{meant}:{rest or kind}" if meant and kind not in _KINDS else ""


def sources_text(data: DataSpec) -> str:
    """What is trained, in words."""
    whole = sum(each.weight for each in data.sources) / 100
    named = ((f"{each.weight / whole:.3g} % {each.name} (", each) for each in data.sources)
    return ", ".join(f"{text}{each.source})" if each.name else each.source for text, each in named)
