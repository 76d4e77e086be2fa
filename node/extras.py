"""Libraries that only some uses of hetnode need: the extras of the package, such as ``hetnode[hf]``.

Modules import them where they use them, inside :func:`needed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.util import find_spec
from typing import Any

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.data import DataSpec


class Extra(Enum):
    """An extra of the package: its name, and what it is for."""

    DASHBOARD = ("dashboard", "the pages of the coordinator's dashboard")
    HF = ("hf", "data of the Hugging Face Hub and tokenizer files")
    EVAL = ("eval", "tasks of lm-evaluation-harness")
    PANDAS = ("pandas", "tables of a run")
    TENSORBOARD = ("tensorboard", "charts of TensorBoard")
    WANDB = ("wandb", "charts of Weights & Biases")
    TRACKIO = ("trackio", "charts of Trackio")
    PLOTS = ("plots", "plots and figures")
    S3 = ("s3", "object stores")

    def __init__(self, label: str, purpose: str) -> None:
        self.label = label
        self.purpose = purpose


@contextmanager
def needed(extra: Extra) -> Iterator[None]:
    """Around the import of a library of `extra`. Raises HetnodeError MISSING_EXTRA if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _missing(str(error.name), extra) from None


def require(library: str, extra: Extra) -> None:
    """Raise HetnodeError MISSING_EXTRA if `library` of `extra` is not installed. Imports nothing."""
    if not _is_installed(library):
        raise _missing(library, extra)


def pyplot() -> Any:
    """matplotlib.pyplot for files, without a display. Raises HetnodeError MISSING_EXTRA."""
    with needed(Extra.PLOTS):
        import matplotlib  # noqa: PLC0415 - a second, which most commands need not wait
    matplotlib.use("Agg")
    from matplotlib import pyplot as for_files  # noqa: PLC0415

    return for_files


_OF_DASHBOARD = ("chartkick", "jinja2", "starlette", "uvicorn")


def can_serve_dashboard() -> bool:
    """Whether the libraries of the dashboard are installed."""
    return all(map(_is_installed, _OF_DASHBOARD))


def require_for_dashboard() -> None:
    """Raise HetnodeError MISSING_EXTRA if this machine lacks a library of the dashboard."""
    for library in _OF_DASHBOARD:
        require(library, Extra.DASHBOARD)


def require_tool(name: str) -> None:
    """Raise HetnodeError MISSING_EXTRA if the library `name`, with an extra of its own, is not installed."""
    require(name, next(extra for extra in Extra if extra.label == name))


def can_read_all_data() -> bool:
    """Whether the libraries for every source of data and every tokenizer are installed."""
    return all(map(_is_installed, ("datasets", "tokenizers", "sentencepiece")))


def require_for_data(
    data: DataSpec, sources: Iterable[str] | None = None, tokenizer: str | None = None
) -> None:
    """Raise HetnodeError MISSING_EXTRA if this machine lacks a library that reads the data of a run.

    Args:
        sources: where the same data is on this node; None: as in `data`.
        tokenizer: the path of the run's tokenizer file on this node; None: ``data.tokenizer``.
    """
    for named in sources or [each.source for each in data.all_sources]:
        if named.lower().startswith("hf:"):
            require("datasets", Extra.HF)
        if named.lower().startswith("parquet:") or named.lower().endswith(".zst"):
            require("pyarrow", Extra.HF)
    if (tokenizer or data.tokenizer) != "byte":
        require("tokenizers", Extra.HF)
    if (tokenizer or data.tokenizer).endswith(".model"):
        require("sentencepiece", Extra.HF)


def _is_installed(library: str) -> bool:
    return find_spec(library) is not None


def _missing(library: str, extra: Extra) -> HetnodeError:
    return HetnodeError(
        ErrorCode.MISSING_EXTRA,
        f"The library {library} is not installed on this machine; {extra.purpose} need it.",
        f"Install it: pip install 'hetnode[{extra.label}]'.",
    )
