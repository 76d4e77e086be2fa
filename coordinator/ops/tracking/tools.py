"""The tools that draw figures, each behind the same small interface and imported where it is opened."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from coordinator.ops.tracking.figures import TrackedFigures

_PROJECT = "hetnode"


class Tool(StrEnum):
    """The name of a tool is that of its library, and of the extra of this package that has it."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


class Sink(Protocol):
    """Where figures go. Every method may raise whatever its library raises."""

    def send(self, figures: TrackedFigures) -> None: ...

    def flush(self) -> None:
        """Return when all that was sent is kept, as far as the tool tells that."""

    def close(self) -> None: ...


def opened(tool: Tool, folder: Path, run: str) -> Sink:
    """A sink for the run with this id. `folder` is that of its coordinator."""
    return _SINKS[tool](folder, run)


class _TensorBoard:
    """Event files in the folder ``tensorboard``."""

    def __init__(self, folder: Path, run: str) -> None:
        from tensorboard.summary import Writer  # noqa: PLC0415  without torch and tensorflow

        self._writer: Any = Writer(str(folder / "tensorboard"))

    def send(self, figures: TrackedFigures) -> None:
        for name, value in figures.values.items():
            self._writer.add_scalar(name, value, step=figures.round_number, wall_time=figures.at)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run of the project "hetnode". Who it belongs to, and WANDB_MODE, are settings of the library."""

    def __init__(self, folder: Path, run: str) -> None:
        import wandb  # noqa: PLC0415

        # Only the figures of the run: nothing of this machine, its output or its code.
        settings = wandb.Settings(
            host=_PROJECT,
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self._run: Any = wandb.init(
            project=_PROJECT, id=run, name=run, dir=str(folder), resume="allow", settings=settings
        )
        self._run.define_metric("*", step_metric="round")

    def send(self, figures: TrackedFigures) -> None:
        self._run.log({**figures.values, "round": figures.round_number, "time": figures.at})

    def flush(self) -> None:
        """The library keeps a file of its own, and sends it when it can."""

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of the project "hetnode". Where it is kept is a setting of the library."""

    def __init__(self, folder: Path, run: str) -> None:
        import trackio  # noqa: PLC0415

        self._run: Any = trackio.init(
            project=_PROJECT, name=run, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def send(self, figures: TrackedFigures) -> None:
        self._run.log(dict(figures.values), step=figures.round_number)

    def flush(self) -> None:
        """The library keeps what it gets within a second."""

    def close(self) -> None:
        self._run.finish()


_SINKS: dict[Tool, Callable[[Path, str], Sink]] = {
    Tool.TENSORBOARD: _TensorBoard,
    Tool.WANDB: _WeightsAndBiases,
    Tool.TRACKIO: _Trackio,
}
