"""A whole swarm of real processes on this machine, from a program or a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hetnode.runs import OpenedRun
from node.folder import disk_errors_reported, make_usable
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve, to_toml
from protocol.spec.run import RunSpec
from protocol.trust.private_file import write_whole

if TYPE_CHECKING:
    from protocol.status import RunStatus


def local_swarm(
    preset: str | None = None,
    folder: str | Path | None = None,
    *,
    config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> RunningSwarm:
    """A swarm on this machine, as ``hetnode swarm up`` starts it; it runs within a ``with`` block.

    Args:
        preset: such as "nano"; None is that of `config`, or "tiny".
        folder: an empty or a new one; None makes one below ./runs.
        config: a run file.
        settings: by their full names, such as ``{"rounds": 5, "link.k": 8}``.

    Raises:
        HetnodeError: BAD_SPEC and others of a specification, RUN_FOLDER_IN_USE; errors of the data.
    """
    from node.data.tokenizer import pinned  # noqa: PLC0415

    file = Path(config) if config is not None else None
    spec = pinned(resolve(preset, file, settings), file)
    return RunningSwarm(spec, prepare_new_run(spec, Path(folder) if folder is not None else None, file))


@dataclass(repr=False, eq=False)
class RunningSwarm:
    """The processes of one swarm, from the begin of a ``with`` block to its end, whatever ends it.

    They live in an event loop of a thread of their own, so the block may be in a program that has one, as
    notebooks do. They also end when this process ends. All methods may be called while the swarm runs.

    Attributes:
        spec: of the run. `folder`: of the run, as ``hetnode swarm up`` leaves one.
        status: the newest, about twice a second; None before the first.
    """

    spec: RunSpec
    folder: Path
    status: RunStatus | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _end: Callable[[], object] | None = None
    _failure: BaseException | None = None
    _has_ended: bool = False
    _is_finished: bool = False

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeError("This swarm has run; start another with hetnode.local_swarm().")
        write_whole(self.folder / "run.toml", to_toml(self.spec))
        self._thread = threading.Thread(target=self._run, name="hetnode swarm", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._has_ended)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._thread is not None
        if self._end is not None:
            self._end()
        self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure

    @property
    def round_number(self) -> int:
        """Rounds that are decided at every stage."""
        if self._is_finished:
            return self.spec.rounds
        return self.status.rounds_decided if self.status is not None else 0

    @property
    def losses(self) -> dict[int, float]:
        """The newest validation loss (nats per token) of each replica; none before the first."""
        from node.views.run_history import history_of, read_events  # noqa: PLC0415

        found = history_of(read_events(self.folder / "metrics.jsonl"))
        return {replica.index: replica.last for replica in found.replicas}

    def history(self, table: str = "replica_rounds") -> Any:
        """As :meth:`hetnode.OpenedRun.history`."""
        return OpenedRun(self.folder).history(table)

    def wait(self, round_number: int | None = None, timeout: float | None = None) -> Self:
        """Wait until that round is decided, or with None until the run is finished.

        Returns this swarm, which prints its losses. Raises TimeoutError after `timeout` seconds; HetnodeError
        where the swarm has failed, or BAD_OPTION where it has ended without that round.
        """

        def is_over() -> bool:
            return self._has_ended or (round_number is not None and self.round_number >= round_number)

        with self._changed:
            if not self._changed.wait_for(is_over, timeout):
                raise TimeoutError(f"{self} after {timeout} seconds")
        if self._failure is not None:
            raise self._failure
        if round_number is not None and self.round_number < round_number:
            cause = f"The swarm has ended after round {self.round_number}, before round {round_number}."
            raise HetnodeError(ErrorCode.BAD_OPTION, cause, f"The run has {self.spec.rounds} rounds.")
        return self

    def __repr__(self) -> str:
        losses = ", ".join(f"replica {index} {loss:.4f}" for index, loss in self.losses.items())
        return f"round {self.round_number} of {self.spec.rounds}: val. loss {losses or 'not known yet'}"

    def _run(self) -> None:
        """The thread: run the swarm to its end, and keep why it failed."""
        from node.ipc.template import close_own_template  # noqa: PLC0415

        try:
            with suppress(asyncio.CancelledError), asyncio.Runner() as runner:
                runner.run(self._swarm())
        except BaseException as error:
            self._failure = error
        close_own_template()  # with it the last process has ended
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    async def _swarm(self) -> None:
        from node.local_swarm import keep_model, run_swarm  # noqa: PLC0415

        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end() -> None:
            with suppress(RuntimeError):  # the loop is closed: it has ended
                loop.call_soon_threadsafe(task.cancel)

        with self._changed:
            self._end = end
            self._changed.notify_all()
        place = self.folder / "run.toml"
        await run_swarm(self.spec, place, self.folder, "127.0.0.1:0", self._told, lambda _: None)
        if status := keep_model(self.spec, self.folder):
            raise HetnodeError(
                ErrorCode.SWARM_PROCESS_FAILED,
                f"The parts of the model were not put together: the export ended with status {status}.",
                f"'hetnode export --format checkpoint' takes the folders below {self.folder / 'nodes'}.",
            )
        self._is_finished = True

    def _told(self, status: RunStatus) -> None:
        with self._changed:
            self.status, self.spec = status, status.spec
            self._changed.notify_all()


def prepare_new_run(spec: RunSpec, folder: Path | None, config: Path | None) -> Path:
    """Check the data and the given parameters before any process starts. Returns the run folder.

    Raises HetnodeError: RUN_FOLDER_IN_USE, those of the data, INITIAL_UNAVAILABLE.
    """
    from node.data.declared import CONFIG_FILE, as_file, declared_beside  # noqa: PLC0415
    from node.data.stream import open_stream  # noqa: PLC0415
    from node.data.tokenizer import FileTokenizer, find_tokenizer, load_tokenizer  # noqa: PLC0415
    from node.ipc.modules import COMMAND_MODULES  # noqa: PLC0415
    from node.ipc.template import own_template  # noqa: PLC0415

    own_template(COMMAND_MODULES)  # imports torch and the transport while the data is checked
    own_tokenizer = find_tokenizer(spec.data, config)
    open_stream(spec, tokenizer=own_tokenizer)
    start = config.parent if config else None
    require_given(spec, start)
    folder = _new_run_folder(spec, folder)
    link_given(spec, folder, start)
    if own_tokenizer is not None:  # nodes look for it in the run folder, and so do later commands
        kept = load_tokenizer(spec.data, own_tokenizer)
        assert isinstance(kept, FileTokenizer)
        write_whole(folder / kept.file_name, kept.content)
        write_whole(folder / CONFIG_FILE, as_file(declared_beside(Path(own_tokenizer), kept)))
    return folder


def require_given(spec: RunSpec, folder: Path | None) -> None:
    """Raise INITIAL_UNAVAILABLE where a run starts from given parameters that `folder` does not have."""
    if spec.initial is not None:  # otherwise torch need not be imported
        from node.checkpoint.initial import require_initial  # noqa: PLC0415

        require_initial(spec, folder)


def link_given(spec: RunSpec, folder: Path, start: Path | None) -> None:
    """Have the nodes of the swarm in `folder` find the parameters in `start`; None leaves it as it is."""
    from node.local_swarm import initial_of  # noqa: PLC0415

    link = initial_of(folder)
    if spec.initial is None or start is None or start.resolve() == link.resolve():
        return
    with disk_errors_reported(link):
        link.unlink(missing_ok=True)
        link.symlink_to(start.resolve())


def _new_run_folder(spec: RunSpec, folder: Path | None) -> Path:
    """An empty folder for a new run. Raises HetnodeError RUN_FOLDER_IN_USE."""
    if folder is None:
        folder = next(path for i in count(1) if not (path := Path("runs") / f"{spec.preset}-{i}").exists())
    if any(make_usable(folder).iterdir()):
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"The run folder {folder} is not empty.",
            f"Go on with its run with --resume {folder}, or give another --folder.",
        )
    return folder
