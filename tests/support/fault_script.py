"""Planned faults of one node: which action strikes at which moment, and the report of those that have struck.

A script is a JSON file, one for each node with all its processes::

    {"report": "fired.jsonl", "faults": [{"at": "matched", "stage": 0, "round_number": 2, "action": "kill"}]}

A fault strikes once. Before it acts, a line about it is on disk in the report. Another process of the
node, or the node after its restart, finds that line and leaves the fault alone. Which moment a node has
reached is told by :mod:`tests.support.fault_hooks`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

FILE_VARIABLE = "HETNODE_TEST_FAULTS"
PID_VARIABLE = "HETNODE_TEST_NODE_PID"
"""Process id of the main process of the node; the main process sets it for its children."""

_LOOK_SECONDS = 0.1


class Moment(StrEnum):
    """Where a fault can strike.

    Moments of an inner step have the number of the step: INNER_STEP and PHASE before the replica decides
    whether that step follows, WARM_UP at forward passes before the first backward pass, FORWARD and BACKWARD
    while they alternate, COOL_DOWN at backward passes after the last forward pass, NORM and APPLY at the end
    of the step. VALIDATE is at a microbatch of the validation. Moments of a round's exchange have their
    stage. CHECKPOINT is while the files of a checkpoint are written.
    """

    INNER_STEP = "inner-step"
    PHASE = "phase"
    WARM_UP = "warm-up"
    FORWARD = "forward"
    BACKWARD = "backward"
    COOL_DOWN = "cool-down"
    NORM = "norm"
    APPLY = "apply"
    VALIDATE = "validate"
    PROPOSED = "proposed"
    MATCHED = "matched"
    SENDING = "sending"
    GATHERED = "gathered"
    DECIDED = "decided"
    APPLIED = "applied"
    CHECKPOINT = "checkpoint"


class Action(StrEnum):
    """What happens.

    To the processes of the node: KILL (SIGKILL), STOP (SIGSTOP of all of them for `seconds`), DELAY (of the
    task that has reached the moment, by `seconds`), FULL (its disk has no room for what is written). To its
    network: PARTITION (nothing leaves or arrives for `seconds`). SKEW: its clock is `seconds` ahead from now
    on. DROP, CORRUPT and DENY are for the hook that has reached the moment: it loses the rest of a payload,
    flips one bit, or reports only its own one.
    """

    KILL = "kill"
    STOP = "stop"
    DELAY = "delay"
    FULL = "full"
    PARTITION = "partition"
    SKEW = "skew"
    DROP = "drop"
    CORRUPT = "corrupt"
    DENY = "deny"


@dataclass(frozen=True)
class Fault:
    """One planned fault. `stage`, `round` and `step` None fit all.

    It strikes the first `times` times that its moment comes, in one process.
    """

    at: Moment
    action: Action
    stage: int | None = None
    round_number: int | None = None
    seconds: float = 0.0
    times: int = 1
    step: int | None = None

    def fits(self, moment: Moment, round_number: int, stage: int | None, step: int | None = None) -> bool:
        planned = ((self.round_number, round_number), (self.stage, stage), (self.step, step))
        return self.at is moment and all(wanted in (None, found) for wanted, found in planned)

    def __str__(self) -> str:
        where = "".join(
            f" {name} {value}"
            for name, value in (("stage", self.stage), ("round", self.round_number), ("step", self.step))
            if value is not None
        )
        return f"{self.action} at {self.at}{where}"


@dataclass(frozen=True)
class Fired:
    """A line of the report: fault number `fault` of the script has struck, at Unix time `time`."""

    fault: int
    at: str
    action: str
    stage: int | None
    round_number: int
    pid: int
    time: float
    seconds: float


class Killed(BaseException):
    """The process has ended. Raised where a test plays the process, because then SIGKILL does not end it."""


class ProcessControl(Protocol):
    """Kills and stops the processes of the node."""

    def kill(self) -> None:
        """End all of them. Does not return in a real process."""

    def stop(self, seconds: float) -> None:
        """Suspend all of them for `seconds`."""

    def pause(self, seconds: float) -> None:
        """Block the caller for `seconds`."""


class Script:
    """The faults of one node.

    Args:
        faults: numbered by their order.
        report: the file of what has fired.
        clock: Unix time.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        report: Path,
        process_control: ProcessControl,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._faults, self._report = tuple(faults), report
        self._process_control, self._clock = process_control, clock
        self._left: dict[int, int] = {}
        self._seen: tuple[int, int] = (0, 0)
        self._in_force: tuple[Fired, ...] = ()

    async def reach(
        self, moment: Moment, round_number: int, stage: int | None = None, step: int | None = None
    ) -> Fault | None:
        """Strike if a fault is planned for this moment. Returns the fault that struck.

        Raises OSError (no space left on the device) for FULL. KILL does not return. STOP and DELAY are over
        when this returns. The caller has to act out DROP, CORRUPT and DENY.
        """
        fault = self._strike(moment, round_number, stage, step)
        if fault is None:
            return None
        if fault.action is Action.DELAY:
            await asyncio.sleep(fault.seconds)
        elif self._act(fault):
            await asyncio.sleep(0)  # the virtual loop runs a killed or suspended node no further than here
        return fault

    def reach_now(self, moment: Moment, round_number: int, stage: int | None = None) -> Fault | None:
        """As :meth:`reach`, where there is no event loop."""
        fault = self._strike(moment, round_number, stage, None)
        if fault is None:
            return None
        if fault.action is Action.DELAY:
            self._process_control.pause(fault.seconds)
        elif self._act(fault) and fault.action is Action.KILL:
            raise Killed
        return fault

    def is_cut_off(self) -> bool:
        """Whether a PARTITION is in force: nothing can leave this node or arrive at it."""
        if not self._may(Action.PARTITION):
            return False
        now = self._clock()
        return any(
            fired.action == Action.PARTITION and now < fired.time + fired.seconds for fired in self._fired()
        )

    def skew(self) -> float:
        """How many seconds the clock of the node is ahead."""
        if not self._may(Action.SKEW):
            return 0.0
        return sum(fired.seconds for fired in self._fired() if fired.action == Action.SKEW)

    def _may(self, action: Action) -> bool:
        """Whether the script has such a fault; without one no call needs to read the report."""
        return any(fault.action is action for fault in self._faults)

    def _act(self, fault: Fault) -> bool:
        """Strike the node's processes, if that is the action."""
        if fault.action is Action.KILL:
            self._process_control.kill()
        elif fault.action is Action.STOP:
            self._process_control.stop(fault.seconds)
        elif fault.action is Action.FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            return False
        return True

    def _strike(self, moment: Moment, round_number: int, stage: int | None, step: int | None) -> Fault | None:
        """The fault that strikes here, which is then in the report."""
        for number, fault in enumerate(self._faults):
            if not fault.fits(moment, round_number, stage, step):
                continue
            if number not in self._left:
                line = Fired(
                    number,
                    fault.at.value,
                    fault.action.value,
                    stage,
                    round_number,
                    os.getpid(),
                    self._clock(),
                    fault.seconds,
                )
                self._left[number] = fault.times if _claim(self._report, line) else 0
            if self._left[number] > 0:
                self._left[number] -= 1
                return fault
        return None

    def _fired(self) -> tuple[Fired, ...]:
        """The report, read again when it has grown."""
        try:
            status = self._report.stat()
        except FileNotFoundError:
            return ()
        if (seen := (status.st_mtime_ns, status.st_size)) != self._seen:
            self._in_force, self._seen = tuple(read_report(self._report)), seen
        return self._in_force


def from_environment() -> Script | None:
    """The script of the node to which this process belongs; None where it has none."""
    file = os.environ.get(FILE_VARIABLE)
    if file is None:
        return None
    os.environ.setdefault(PID_VARIABLE, str(os.getpid()))  # the first process of a node is its main process
    report, faults = parse(Path(file).read_text())
    return Script(faults, report, Signals(int(os.environ[PID_VARIABLE]), report))


def parse(text: str) -> tuple[Path, tuple[Fault, ...]]:
    """The report's path and the faults in a file of faults.

    Raises ValueError, TypeError, KeyError or AttributeError for any other text.
    """
    tree = json.loads(text)
    return Path(tree["report"]), tuple(map(_fault_from, tree["faults"]))


def to_json(report: Path, faults: Sequence[Fault]) -> str:
    """The text that :func:`parse` reads."""
    return json.dumps({"report": str(report), "faults": [asdict(fault) for fault in faults]}, indent=1)


def read_report(report: Path) -> Iterator[Fired]:
    """What has fired, in order."""
    if report.exists():
        for line in report.read_text().splitlines():
            yield Fired(**json.loads(line))


def _fault_from(tree: Mapping[str, Any]) -> Fault:
    unknown = set(tree) - {field.name for field in fields(Fault)}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    return Fault(**{**tree, "at": Moment(tree["at"]), "action": Action(tree["action"])})


def _claim(report: Path, line: Fired) -> bool:
    """Write `line`, durably, unless its fault has fired already."""
    with _locked(report) as descriptor:
        if any(fired.fault == line.fault for fired in read_report(report)):
            return False
        os.write(descriptor, json.dumps(asdict(line)).encode() + b"\n")
        os.fsync(descriptor)
        return True


@contextmanager
def _locked(report: Path) -> Iterator[int]:
    """The report, open for appending, while no other process of the node has it so."""
    descriptor = os.open(report, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Signals:
    """Strikes the real processes of the node whose main process is `main`."""

    main: int
    report: Path

    def kill(self) -> None:
        for pid in (self.main, os.getpid()):
            os.kill(pid, signal.SIGKILL)

    def stop(self, seconds: float) -> None:
        """Another process does this, because a stopped process cannot wake itself."""
        environment = {name: value for name, value in os.environ.items() if name != FILE_VARIABLE}
        command = [sys.executable, "-P", "-m", "tests.support.fault_script"]
        with subprocess.Popen(
            [*command, str(self.main), str(seconds), str(self.report)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        ) as helper:
            helper.communicate()  # returns after this process was stopped and continued

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


def _stop_tree(main: int, seconds: float) -> None:
    """SIGSTOP the process `main` and all below it; SIGCONT them after `seconds`, or when `main` is gone."""
    import psutil  # noqa: PLC0415  only this process needs it

    root, stopped = psutil.Process(main), set[Any]()

    def tree() -> set[Any]:
        found = {root, *root.children(recursive=True)}
        return {process for process in found if process.pid != os.getpid()}

    def signalled(processes: set[Any], signal_number: int) -> set[Any]:
        for process in processes:
            try:
                process.send_signal(signal_number)
            except psutil.NoSuchProcess:
                continue
        return processes

    try:
        while fresh := tree() - stopped:  # a process may have started another one in the meantime
            stopped |= signalled(fresh, signal.SIGSTOP)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
            time.sleep(min(_LOOK_SECONDS, seconds))
    except psutil.NoSuchProcess:
        pass
    finally:
        signalled(stopped, signal.SIGCONT)


if __name__ == "__main__":
    _stop_tree(int(sys.argv[1]), float(sys.argv[2]))
