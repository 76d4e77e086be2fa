"""Bad input at the command line: one message with code, cause and remedy, and the documented status."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from protocol.trust.invite import Invite
from tests.support.commands import hetnode, run
from tests.support.ports import free_port


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    """A port where no process listens."""
    return free_port()


def check(result: subprocess.CompletedProcess[str], status: int, code: str, *words: str) -> None:
    assert result.returncode == status, result.stderr
    assert f"[{code}]" in result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("line", "status", "code", "words"),
    [
        ("swarm up --preset giant", 2, "unknown-preset", ("giant", "tiny")),
        ("swarm up --set link.k=4096", 2, "bad-spec", ("4096", "128")),
        ("swarm up --set link.k", 2, "bad-option", ("--set", "NAME=VALUE")),
        ("swarm up --set link.q=1", 2, "bad-spec", ("link.q",)),
        ("swarm up --stages 9", 2, "bad-spec", ("9", "4")),
        ("swarm up --data text:/no/such/file.txt", 3, "data-unreadable", ("/no/such/file.txt",)),
        ("spec show none.toml", 2, "bad-spec", ("none.toml",)),
        ("coordinator --folder run --metrics 7790", 4, "bad-address", ("--metrics", "7790")),
        ("coordinator --folder run --listen localhost", 4, "bad-address", ("localhost",)),
        ("coordinator --folder run --advertise http://host", 4, "bad-address", ("--advertise", "http://")),
        ("coordinator --folder run --advertise host:7700", 4, "bad-address", ("--advertise", "host:7700")),
        ("join a-run --advertise host:7700", 4, "bad-address", ("--advertise", "host:7700")),
        ("relay a-run --advertise a/b", 4, "bad-address", ("--advertise", "a/b")),
        ("join a-run --metrics 7790", 4, "bad-address", ("--metrics", "7790")),
        ("join a-run --relay ::1:7703", 4, "bad-address", ("--relay", "::1:7703")),
        ("join a-run --role stage --folder /proc/nowhere", 2, "bad-option", ("/proc/nowhere",)),
        ("join --identity key", 2, "bad-option", ("INVITE",)),
        ("join --invite-file none", 2, "bad-option", ("none",)),
        ("join tiny-000000000000", 7, "no-credentials", ("tiny-000000000000",)),
        ("join tiny-000000000000 --identity key", 7, "no-credentials", ("tiny-000000000000",)),
        ("status tiny-000000000000", 7, "no-credentials", ("tiny-000000000000",)),
        ("status --dashboard nowhere", 7, "no-credentials", ("nowhere",)),
        ("generate .", 3, "checkpoint-missing", ("no checkpoint",)),
    ],
)
def test_bad_input_is_one_message_and_makes_nothing(
    tmp_path: Path, line: str, status: int, code: str, words: tuple[str, ...]
) -> None:
    check(hetnode(*line.split(), folder=tmp_path), status, code, *words)
    assert {path.name for path in tmp_path.iterdir()} <= {"key", "key.lock"}


def test_a_run_file_that_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[model\n")
    check(hetnode("spec", "show", "run.toml", folder=tmp_path), 2, "bad-spec", "run.toml")


def test_a_port_in_use(busy_port: int, tmp_path: Path) -> None:
    """The folder that was made is its owner's alone."""
    result = hetnode("coordinator", "--listen", f"127.0.0.1:{busy_port}", "--folder", str(tmp_path / "run"))
    check(result, 4, "port-in-use", str(busy_port))
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0


def test_other_files_in_the_folder_of_a_coordinator_are_named(busy_port: int, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    taken = ("--listen", f"127.0.0.1:{busy_port}", "--folder", str(tmp_path))
    check(hetnode("coordinator", *taken), 4, "port-in-use", "thesis.tex")


def test_a_metrics_port_in_use(busy_port: int, tmp_path: Path) -> None:
    """It is refused before a connection is opened, and it is named."""
    taken = ("--metrics", f"127.0.0.1:{busy_port}")
    result = hetnode("coordinator", *taken, "--listen", "127.0.0.1:0", "--folder", str(tmp_path / "run"))
    check(result, 4, "port-in-use", str(busy_port), "--metrics")
    invite = Invite("127.0.0.1:1", "127.0.0.1:1", bytes(32), "00" * 6, bytes(16)).encode()
    own = ("--identity", str(tmp_path / "key"), "--folder", str(tmp_path / "node"))
    check(hetnode("join", invite, *taken, *own), 4, "port-in-use", str(busy_port), "--metrics")


def test_a_coordinator_that_is_not_there(closed_port: int, tmp_path: Path) -> None:
    address = f"127.0.0.1:{closed_port}"
    invite = Invite(address, address, bytes(32), "00" * 6, bytes(16)).encode()
    result = hetnode(
        *("join", invite, "--role", "stage", "--join-seconds", "1"),
        *("--identity", str(tmp_path / "key"), "--folder", str(tmp_path / "node")),
    )
    check(result, 4, "coordinator-unreachable", str(closed_port))


def test_an_invite_with_a_letter_wrong_is_refused_and_not_repeated(tmp_path: Path) -> None:
    invite = Invite("h:1", "h:2", bytes(32), "00" * 6, bytes(16)).encode()
    wrong = invite[:30] + ("A" if invite[30] != "A" else "B") + invite[31:]
    result = hetnode("join", wrong, "--identity", str(tmp_path / "key"))
    check(result, 2, "bad-invite", "hetnode invite create")
    assert wrong not in result.stderr
    (tmp_path / "invite").write_text("not an invite")
    result = hetnode("join", "--invite-file", str(tmp_path / "invite"), "--identity", str(tmp_path / "key"))
    check(result, 2, "bad-invite")


def test_a_role_that_is_none_is_wrong_usage() -> None:
    result = hetnode("join", "a-run", "--role", "boss")
    assert result.returncode == 2
    assert "boss" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    result = hetnode("swarm", "up", "--preset", "nano", "--folder", str(tmp_path / "run"))
    check(result, 7, "run-folder-in-use", str(tmp_path / "run"))


@pytest.mark.parametrize("command", [("swarm", "up"), ("coordinator",)])
@pytest.mark.parametrize("place", ["file", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, command: tuple[str, ...], place: str) -> None:
    (tmp_path / "file").touch()
    result = hetnode(
        *command, "--preset", "nano", "--folder", str(tmp_path / place), "--listen", "127.0.0.1:0"
    )
    check(result, 2, "bad-option", "--folder", place)


def test_a_device_that_is_not_there_is_noticed_before_joining(closed_port: int, tmp_path: Path) -> None:
    result = hetnode(
        *("join", f"127.0.0.1:{closed_port}", "--role", "stage", "--device", "cuda:77"),
        *("--identity", str(tmp_path / "key"), "--folder", str(tmp_path / "node")),
    )
    check(result, 7, "device-unavailable", "cuda:77")


def test_a_corrupt_checkpoint_is_called_corrupt(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "manifest.json").write_text("{}")
    result = hetnode("generate", str(tmp_path), "--prompt", "precious words")
    check(result, 3, "checkpoint-corrupt")
    assert "precious words" not in result.stdout


def test_ctrl_c_while_modules_load_ends_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "node", "--version"], stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    while b"typer" not in (line := process.stderr.readline()):
        assert line, "the command's modules were never loaded"
    process.send_signal(signal.SIGINT)
    said = process.stderr.read()
    assert process.wait(30) == ExitCode.INTERRUPTED
    assert said.endswith(b"interrupted\n")
    assert b"Traceback" not in said


@pytest.mark.parametrize(
    ("line", "completed"),
    [("hetnode jo", {"join"}), ("hetnode run p", {"pause"}), ("hetnode join --up", {"--upload-limit"})],
)
def test_a_shell_completes_commands_and_options(line: str, completed: set[str]) -> None:
    asked = {"_HETNODE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    assert set(run("node.__main__", environment={**os.environ, **asked}).stdout.split()) == completed


def test_the_command_alone_says_how_to_begin() -> None:
    shown = hetnode().stderr
    head = " ".join(shown.partition("Options:")[0].split())
    assert "'hetnode swarm up'" in head
    assert "'hetnode join INVITE'" in head
    done = run("node.__main__", environment={**os.environ, "COLUMNS": "80", "TERM": "dumb"})
    assert max(map(len, done.stderr.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("--relay", "none", "--relay-ports", "7803-7900"), "--relay-ports"),
        (("--relay", "none", "--relay-uplink", "200"), "--relay-uplink"),
        (("--one-port", "--relay", "none"), "--one-port"),
        (("--one-port", "--relay", "127.0.0.1:0"), "--one-port"),
        (("--one-port", "--enrolment-port", "7701"), "--one-port"),
        (("--listen", "0.0.0.0:7700"), "--advertise"),
    ],
)
def test_options_that_exclude_each_other_make_no_folder(
    tmp_path: Path, options: tuple[str, ...], wrong: str
) -> None:
    result = hetnode("coordinator", *options, "--folder", str(tmp_path / "run"))
    check(result, 2, "bad-option", wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [("status", 2, "bad-option"), ("join tiny", 7, "no-credentials"), ("health", 7, "no-credentials")],
)
def test_a_user_without_a_home_gets_the_same_messages(
    tmp_path: Path, line: str, status: int, code: str
) -> None:
    """As in a container that runs as a number: no HOME, and no entry of the user."""
    without = (
        "import os, pwd, sys\n"
        "for name in ('HOME', 'XDG_DATA_HOME', 'XDG_CONFIG_HOME'): os.environ.pop(name, None)\n"
        "pwd.getpwuid = lambda uid: {}[uid]\n"
        "from node.__main__ import main; main()"
    )
    command = [sys.executable, "-c", without, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    check(done, status, code)


def test_a_command_that_computes_leaves_the_processor_to_others_while_it_waits() -> None:
    """The variable must be set before torch is imported; what the user has set stays."""
    code = (
        "import os, sys; sys.argv[1:] = ['--version']; from node.cli.main import main\n"
        "try: main()\n"
        "finally: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    for given in ({}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        environment = {name: each for name, each in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )
        assert done.stdout.split()[-2:] == [given.get("OMP_WAIT_POLICY", "PASSIVE"), "False"]
