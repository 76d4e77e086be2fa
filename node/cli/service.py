"""``hetnode service``: a node that this machine keeps running, also after a restart."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from node import command_runner
from node.cli.join import join
from node.command_runner import TerminalConsole, bad_option
from node.here.nodes import nodes_here
from node.home.guest.hours import parse_hours
from node.home.guest.service_unit import Service, launchd_agent, systemd_unit
from node.security import credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust import invite
from protocol.trust.private_file import write_private
from protocol.trust.short_id import named_by

service_app = typer.Typer(
    help="A node that this machine keeps running, also after a restart.", no_args_is_help=True
)

_KEPT_VARIABLES = ("CUDA_VISIBLE_DEVICES", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
_IS_MAC = sys.platform == "darwin"

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Of the service. Default: the only one that is installed."),
]


@service_app.command("install", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def install(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="The name of a run that this machine is in, or its folder.")],
) -> None:
    """Keep this machine's node of RUN running: it starts with the machine, and again after a failure.

    Takes the options of 'hetnode join' after RUN. An invite is a secret and no part of a service: type
    'hetnode join INVITE' once before.
    """
    command_runner.configure_logging()
    service = _service(run, context.args)
    file = _folder() / (service.name + _ending())
    text = launchd_agent(service) if _IS_MAC else systemd_unit(service).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, text)
    try:
        if _IS_MAC:
            _tell("launchctl", "bootstrap", f"gui/{os.getuid()}", str(file))
        else:
            _tell("systemctl", "--user", "daemon-reload")
            _tell("systemctl", "--user", "enable", "--now", file.name)
    except HetnodeError:
        _remove(file)
        raise
    console = TerminalConsole(highlight=False, soft_wrap=True)
    console.print(f"{service.name} runs, and starts again with this machine: {file}", markup=False)
    shows = f"launchctl print gui/{os.getuid()}/" if _IS_MAC else "systemctl --user status "
    console.print(f"this shows how it does: {shows}{file.stem}", markup=False)
    if not _IS_MAC and not _lingers():
        console.print(
            f"it ends when you log out, until you type: loginctl enable-linger {getpass.getuser()}",
            markup=False,
        )


@service_app.command("uninstall")
def uninstall(name: Name = None) -> None:
    """End the service in order, and remove it. The node keeps its folder and its place in the run."""
    command_runner.configure_logging()
    file = _installed(name)
    try:
        if _IS_MAC:
            _tell("launchctl", "bootout", f"gui/{os.getuid()}", str(file))
        else:
            _tell("systemctl", "--user", "disable", "--now", file.name)
    finally:
        _remove(file)  # also where no session can be told: it would start again with the machine
    if not _IS_MAC:
        _tell("systemctl", "--user", "daemon-reload")
    TerminalConsole(highlight=False).print(f"{file.stem} is removed", markup=False)


def _remove(file: Path) -> None:
    """Remove the file of a service, and what makes it start with the machine."""
    for each in (file, *_folder().glob(f"*.wants/{file.name}")):
        each.unlink(missing_ok=True)


def _service(run: str, options: Sequence[str]) -> Service:
    """The service of `run` with these options of ``hetnode join``. Raises BAD_OPTION, NO_CREDENTIALS."""
    if invite.is_invite(run) or any(
        invite.is_invite(each) or each.startswith("--invite") for each in options
    ):
        raise bad_option(
            "An invite is a secret, and a service is started with its name in plain sight.",
            "Type 'hetnode join INVITE' once; then 'hetnode service install RUN'.",
        )
    runs = {node.run for node in nodes_here()}
    run = run if credentials.exist(Path(run)) else named_by(run, runs, "runs")
    if not credentials.exist(Path(run)) and run not in runs:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"This machine holds no credentials for the run {run!r:.80}.",
            "Type 'hetnode join INVITE' once; then 'hetnode service install RUN'.",
        )
    command = (sys.executable, "-P", "-m", __package__.removesuffix(".cli"), "join", run, *options)
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return Service(run, command, Path.cwd(), _drain_seconds([run, *options]), kept)


def _drain_seconds(arguments: list[str]) -> float:
    """Of ``hetnode join`` with `arguments`. Raises BAD_OPTION; other wrong usage is typer's to report."""
    app = typer.Typer(add_completion=False)
    app.command("join")(join)
    command = typer.main.get_command(app)
    assert not isinstance(command, TyperGroup), "an application with one command is that command"
    options = command.make_context("hetnode join", arguments).params
    if options["hours"]:
        parse_hours(options["hours"])
    return float(options["drain_seconds"])


def _folder() -> Path:
    if _IS_MAC:
        return Path.home() / "Library" / "LaunchAgents"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def _ending() -> str:
    return ".plist" if _IS_MAC else ".service"


def _installed(name: str | None) -> Path:
    """The file of the service that `name` means. Raises BAD_OPTION."""
    found = sorted(_folder().glob(f"hetnode-*{_ending()}"))
    if name is not None:
        name = named_by(name, [file.stem.removeprefix("hetnode-") for file in found], "services")
    meant = [file for file in found if name is None or file.stem in (name, f"hetnode-{name}")]
    if len(meant) == 1:
        return meant[0]
    names = ", ".join(file.stem for file in found)
    which = "" if name is None else f" {name}"
    cause = "Several services are installed." if meant else f"No service{which} is installed."
    remedy = f"Name one of these: {names}." if names else "'hetnode service install RUN' installs one."
    raise bad_option(cause, remedy)


def _lingers() -> bool:
    """Whether services of this user run while it is not logged in."""
    try:
        said = _tell("loginctl", "show-user", getpass.getuser(), "--property=Linger")
    except HetnodeError:
        return False
    return said.strip() == "Linger=yes"


def _tell(*command: str) -> str:
    """What the tool has said. Raises HetnodeError SERVICE_FAILED."""
    if shutil.which(command[0]) is None:
        raise _failed(f"This machine has no {command[0]}.")
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    if done.returncode:
        raise _failed(f"'{' '.join(command)}' failed: {done.stderr.strip() or done.returncode}.")
    return done.stdout


def _failed(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.SERVICE_FAILED,
        cause,
        "Check that this user has a session of systemd or launchd; or run 'hetnode join' under another "
        "supervisor.",
    )
