"""How a command of a node ends after signals: it drains, then keeps its state, then ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.command_runner import LEAVE, LEAVE_AT_ONCE, bare_host
from protocol.errors import ErrorCode, HetnodeError


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that says "ready", and "draining" when asked to; it ends well at a line from its input."""
    program = """
        import asyncio, sys
        from node import command_runner

        async def main():
            try:
                line = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
                print("ready", flush=True)
                await asyncio.shield(line)
            except asyncio.CancelledError:
                print("cancelled", flush=True)
                await line  # what it keeps
                print("kept", flush=True)
                raise

        begin = lambda: print("draining", flush=True)
        try:
            command_runner.run(main(), command_runner.Draining(begin, float(sys.argv[1]), "words"))
        except command_runner.Interrupted:
            import os
            os._exit(130)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]

    def start(seconds: float) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [*command, str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    started: list[subprocess.Popen[str]] = []
    yield start  # type: ignore[misc]
    for child in started:
        child.kill()
        child.communicate()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT, LEAVE])
def test_the_first_signal_starts_a_drain_that_ends_with_success(process, asked: int) -> None:  # type: ignore[no-untyped-def]
    child = process(1000.0)
    child.send_signal(asked)
    assert said(child) == "draining"
    child.communicate("finished\n", timeout=30)
    assert child.returncode == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, LEAVE])
def test_the_second_signal_ends_the_drain_and_keeps_the_state(process, first: int) -> None:  # type: ignore[no-untyped-def]
    child = process(1000.0)
    child.send_signal(first)
    assert said(child) == "draining"
    child.send_signal(signal.SIGINT)
    assert said(child) == "cancelled"
    child.send_signal(LEAVE_AT_ONCE)  # changes nothing any more
    assert child.communicate("kept\n", timeout=30)[0] == "kept\n"
    assert child.returncode == 130


def test_the_third_signal_ends_it_at_once(process) -> None:  # type: ignore[no-untyped-def]
    child = process(1000.0)
    for words in ("draining", "cancelled"):
        child.send_signal(signal.SIGTERM)
        assert said(child) == words
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 130
    assert said(child) == ""


def test_a_sigterm_after_leave_at_once_does_not_interrupt_what_is_kept(process) -> None:  # type: ignore[no-untyped-def]
    child = process(1000.0)
    child.send_signal(LEAVE_AT_ONCE)
    assert said(child) == "cancelled"
    child.send_signal(signal.SIGTERM)
    assert child.communicate("kept\n", timeout=30)[0] == "kept\n"
    child.wait(30)


def test_the_end_of_its_time_does_not_interrupt_what_it_keeps(process) -> None:  # type: ignore[no-untyped-def]
    child = process(0.3)
    child.send_signal(signal.SIGTERM)
    assert said(child) == "draining"
    child.send_signal(signal.SIGTERM)
    assert said(child) == "cancelled"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.6)  # the time for draining ends in this time
    assert child.communicate("kept\n", timeout=30)[0] == "kept\n"


def test_a_second_leave_signal_changes_nothing(process) -> None:  # type: ignore[no-untyped-def]
    child = process(1000.0)
    child.send_signal(LEAVE)
    assert said(child) == "draining"
    child.send_signal(LEAVE)
    child.communicate("finished\n", timeout=30)
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("seconds", "asked"), [(0.05, signal.SIGTERM), (0.0, LEAVE), (1000.0, LEAVE_AT_ONCE)]
)
def test_without_time_to_drain_it_leaves_in_order(process, seconds: float, asked: int) -> None:  # type: ignore[no-untyped-def]
    child = process(seconds)
    child.send_signal(asked)
    words = said(child)
    if words == "draining":
        words = said(child)
    assert words == "cancelled"
    child.communicate("", timeout=30)
    assert child.returncode == 130


@pytest.mark.parametrize("host", ["example.org", "node_1", "44.10.0.1", "[2001:db8::1]", "2001:db8::1"])
def test_a_name_or_an_address_is_a_host(host: str) -> None:
    assert bare_host(host, "--advertise") == host.strip("[]")


@pytest.mark.parametrize(
    "host", ["https://example.org", "example.org:7700", "-x.org", "a..b", ".org", "a b", "1.2.3", "999.1.1.1"]
)
def test_what_no_resolver_takes_is_no_host(host: str) -> None:
    with pytest.raises(HetnodeError, match="--advertise") as refusal:
        bare_host(host, "--advertise")
    assert refusal.value.code is ErrorCode.BAD_ADDRESS
