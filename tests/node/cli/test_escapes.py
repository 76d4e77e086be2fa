"""What others have written reaches a terminal as text alone: no sequence that moves, hides or renames."""

from __future__ import annotations

import ast
import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table

from node.cli.output import say
from node.command_runner import TerminalConsole
from protocol.server.terminal import VisibleFormatter, visible
from tests.support.commands import PLAIN
from tests.support.paths import ROOT
from tests.support.syntax import syntax

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\x90q\x9c\u202eevil\u2066\u200f\x08\x0d\x7f\u2028"
IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def is_text(shown: str) -> bool:
    return all(letter.isprintable() or letter in "\n\t" for letter in shown)


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs",))))
def test_a_text_keeps_its_length_its_lines_and_what_can_be_read(text: str) -> None:
    shown = visible(text)
    assert is_text(shown)
    assert len(shown) == len(text)
    assert all(other in (one, " ") for one, other in zip(text, shown, strict=True))
    assert visible(shown) == shown


def test_a_console_shows_texts_and_keeps_its_own_colours() -> None:
    for markup in (False, True):
        file = io.StringIO()
        console = TerminalConsole(file=file, force_terminal=True, width=200, color_system="truecolor")
        table = Table("[bold]a[/bold]", title=HOSTILE)
        table.add_row(HOSTILE)
        console.print(f"[red]{HOSTILE}[/red]", table, HOSTILE, markup=markup)
        with Live(HOSTILE, console=console, auto_refresh=False) as live:
            live.update(HOSTILE, refresh=True)
        written = file.getvalue()
        assert "evil" in written
        assert "\x1b[1m" in written
        for part in ("\x1b]0", "\x1b[2J", "\x07", "\x08", "\x9b", "\x90", "\u202e", "\u2066", "\u2028"):
            assert part not in written, part


def test_logs_show_texts(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "%s failed", (HOSTILE,), sys.exc_info())
    text = VisibleFormatter("%(message)s").format(record)
    assert is_text(text)
    assert text.count("evil") >= 2
    assert "\n" in text


def test_output_shows_texts_on_a_terminal_and_every_character_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(HOSTILE)
    assert capsys.readouterr().out == f"{HOSTILE}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    say(HOSTILE)
    assert is_text(capsys.readouterr().out)


def at_a_terminal(*arguments: str, folder: Path) -> str:
    environment = {**os.environ, **PLAIN, "TERM": "xterm", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", IN_A_TERMINAL, sys.executable, "-m", "node", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, env=environment, cwd=folder, input=b"")
    return done.stdout.decode()


def test_files_of_others_at_a_real_terminal(tmp_path: Path) -> None:
    escaped = "".join(f"\\\\u{ord(letter):04x}".replace("\\\\", "\\") for letter in HOSTILE)
    (tmp_path / "run.toml").write_text(f'data.source = "text:{escaped}"\n')
    (tmp_path / "bad.toml").write_text(f'data.source = "{escaped}"\n')
    (tmp_path / "peers.csv").write_bytes(
        b"name,uplink_mbps,downlink_mbps,round_trip_ms,memory_gib,tflops,endpoint\n"
        + b"".join(f"evil\x1b[2J\x07\u202e{at},1,1,1,1,1,x\n".encode() for at in range(2))
    )
    for arguments in (
        ("spec", "show", "run.toml"),
        ("spec", "show", "bad.toml"),
        ("plan", "--peers", "peers.csv"),
    ):
        shown = at_a_terminal(*arguments, folder=tmp_path)
        assert "evil" in shown, arguments
        for part in ("\x1b]", "\x1b[2J", "\x07", "\x08", "\x9b", "\x90", "\u202e", "\u2066", "\u2028"):
            assert part not in shown, (arguments, part)


def test_commands_print_at_one_exit() -> None:
    """Text of others may be anywhere, so nothing of a face writes to a terminal by itself."""
    wrong = []
    for path in sorted((ROOT / "node").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(syntax(path)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            of_stream = called in ("sys.stdout.write", "sys.stderr.write", "logging.Formatter")
            if called in ("print", "Console", "Static", "logging.basicConfig") or of_stream:
                wrong.append(f"{name}: {called}")
    assert wrong == [
        "node/cli/consent.py: sys.stderr.write",  # its own question
        "node/cli/output.py: sys.stdout.write",
        "node/cli/output.py: sys.stderr.write",
        "node/command_runner.py: logging.basicConfig",
    ]
