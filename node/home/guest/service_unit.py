"""A node as a service of its user: the text of a unit of systemd, or of an agent of launchd."""

from __future__ import annotations

import plistlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import ErrorCode, ExitCode, HetnodeError

_UNCLEAN = re.compile(r"[\x00-\x1f\x7f]")
_ENV = "/usr/bin/env"  # systemd refuses a program whose path has a quote, but takes any argument
_RESTART_SECONDS = 30
_MORE_SECONDS = 30  # to save the progress, after the time for the round


@dataclass(frozen=True)
class Service:
    """A node that the machine keeps running.

    Attributes:
        run: the name or the folder of the run, as ``hetnode join`` takes it.
        command: program and arguments.
        folder: the working folder, so that relative paths mean what they mean now.
        drain_seconds: how long the node may take to end.
        environment: variables that the node needs; no secrets.
    """

    run: str
    command: Sequence[str]
    folder: Path
    drain_seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the unit: letters, digits and dashes only. Two nodes of one run, NODE.runs/RUN, have two."""
        run, node = Path(self.run), Path(self.run).absolute().parent
        text = f"{run.name}-{node.stem}" if node.suffix == ".runs" else run.name
        return "hetnode-" + (re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "node")

    def __post_init__(self) -> None:
        for text in (*self.command, str(self.folder), *self.environment.values()):
            if _UNCLEAN.search(text):
                raise HetnodeError(
                    ErrorCode.BAD_OPTION,
                    f"{text!r:.80} has a character that a service cannot have.",
                    "Use paths and options of one line, without control characters.",
                )


def systemd_unit(service: Service) -> str:
    """The text of a systemd user unit."""
    settings = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in sorted(service.environment.items())
    )
    return f"""\
[Unit]
Description=hetnode trains in {_plain(service.run)}
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={_ENV} {" ".join(_quoted(each).replace("$", "$$") for each in service.command)}
WorkingDirectory={_plain(str(service.folder))}
{settings}Restart=on-failure
RestartSec={_RESTART_SECONDS}
RestartPreventExitStatus={ExitCode.USAGE.value} {ExitCode.REFUSED.value}
SuccessExitStatus={ExitCode.INTERRUPTED.value}
KillMode=mixed
TimeoutStopSec={service.drain_seconds + _MORE_SECONDS:.0f}
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def launchd_agent(service: Service) -> bytes:
    """The property list of a launchd agent."""
    return plistlib.dumps(
        {
            "Label": service.name,
            "ProgramArguments": list(service.command),
            "WorkingDirectory": str(service.folder),
            "EnvironmentVariables": dict(service.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_SECONDS,
            "ExitTimeOut": round(service.drain_seconds + _MORE_SECONDS),
            "ProcessType": "Background",
            "Umask": 0o077,
        }
    )


def _quoted(text: str) -> str:
    """One word of systemd. In a command `$` must be doubled, too."""
    escaped = _plain(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _plain(text: str) -> str:
    return text.replace("%", "%%")
