"""Processes that a template forks: their input, the report of their end, and what ends with them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.ipc.template import ForkedProcess, Template, TemplateEnded
from tests.support import commands

MODULE = "tests.support.forked_process"
SECONDS = 60.0


@pytest.fixture
def template() -> Template:
    """The one of all tests, which has imported what the children of a node need."""
    return commands.template()


@pytest.fixture
def light_template() -> Iterator[Template]:
    """One without imports, that a test may kill."""
    template = Template.start([])
    yield template
    template.close()


@contextmanager
def forked(template: Template, *arguments: str, **options: Any) -> Iterator[tuple[ForkedProcess, int]]:
    """A process and the read end of its standard output; killed at the end."""
    read, write = os.pipe()
    process = template.fork(MODULE, arguments, stdout=write, **options)
    os.close(write)
    try:
        yield process, read
    finally:
        process.kill()
        process.wait(SECONDS)
        os.close(read)


def output_of(template: Template, *arguments: str, **options: Any) -> str:
    """What a process prints that ends well."""
    with forked(template, *arguments, **options) as (process, read), os.fdopen(os.dup(read)) as output:
        text = output.read()
        assert process.wait(SECONDS) == 0
        return text


def report_of(template: Template, *arguments: str, **options: Any) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(output_of(template, "report", *arguments, **options))
    return report


def line_of(read: int) -> str:
    with os.fdopen(os.dup(read)) as output:
        return output.readline().strip()


def test_a_forked_process_has_what_the_request_names(template: Template, tmp_path: Path) -> None:
    environment = {"ONLY": "this", "TMPDIR": str(tmp_path)}
    report = report_of(template, folder=tmp_path, environment=environment)
    assert report["arguments"] == ["report"]
    assert report["folder"] == str(tmp_path)
    assert report["environment"] == environment
    assert report["temporary"] == str(tmp_path)
    assert report["session"] == report["pid"]


def test_a_forked_process_has_torch_and_can_still_use_it(template: Template) -> None:
    report = report_of(template)
    assert report["has_torch"]
    assert not report["is_cuda_initialized"]
    assert report["threads"] == 1
    assert report["terminates"]
    assert output_of(template, "compute").split() == [str(512.0**3), "2"]


def test_the_first_step_of_a_pipeline_imports_nothing_while_the_round_waits(template: Template) -> None:
    assert output_of(template, "first_step").split() == []


@pytest.mark.parametrize(("chosen", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_torch_sleep_while_they_wait_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, policy: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    template = Template.start([])
    with forked(template, "sleep") as (process, read):
        assert line_of(read) == "sleeping"
        parent = psutil.Process(process.pid).parent()
        assert parent is not None
        assert parent.environ()["OMP_WAIT_POLICY"] == policy
    template.close()


def test_a_forked_process_has_the_named_descriptors_and_no_others(template: Template) -> None:
    pipes = [os.pipe() for _ in range(3)]
    for number, (_, write) in enumerate(pipes):
        os.write(write, f"pipe {number}".encode())
    with forked(template, "sleep"):  # the template holds descriptors for it
        numbers = [read for read, _ in pipes]
        report = report_of(template, *map(str, numbers), descriptors=numbers)
    assert report["read"] == ["pipe 0", "pipe 1", "pipe 2"]
    listing = 1  # /proc/self/fd itself
    assert len(report["descriptors"]) == 3 + len(numbers) + listing
    for pipe in pipes:
        for end in pipe:
            os.close(end)


@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_is_reported(template: Template, status: int) -> None:
    with forked(template, "end_with", str(status)) as (process, _):
        assert process.wait(SECONDS) == status
        assert process.poll() == process.returncode == status


@pytest.mark.parametrize(
    ("error", "status"), [("ValueError", 1), ("KeyboardInterrupt", -signal.SIGINT), ("SystemExit", 0)]
)
def test_an_error_that_main_raises_gives_the_status_that_it_gives_any_program(
    template: Template, error: str, status: int
) -> None:
    with forked(template, "fail", error) as (process, read):
        assert process.wait(SECONDS) == status
        assert line_of(read) == "handlers at exit have run"


def test_a_signal_is_a_negative_status_and_a_process_that_has_ended_gets_none(template: Template) -> None:
    with forked(template, "sleep") as (process, read):
        line_of(read)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.terminate()
        assert process.wait(SECONDS) == -signal.SIGTERM
        process.terminate()


def test_an_unknown_module_fails_that_process_only(template: Template) -> None:
    assert template.fork("no.such.module", stderr=os.open(os.devnull, os.O_WRONLY)).wait(SECONDS) == 1
    assert report_of(template)["arguments"] == ["report"]


async def test_several_tasks_may_wait_for_the_end(template: Template) -> None:
    with forked(template, "sleep") as (process, _):
        waits = [asyncio.create_task(process.wait_async()) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        process.kill()
        assert await asyncio.gather(*waits[1:]) == [-signal.SIGKILL] * 2


def test_forked_processes_end_with_their_template(light_template: Template) -> None:
    with forked(light_template, "sleep") as (process, read):
        line_of(read)
        psutil.Process(process.pid).parent().kill()  # type: ignore[union-attr]
        assert process.wait(SECONDS) == -signal.SIGKILL
        wait_gone([psutil.Process(process.pid)] if psutil.pid_exists(process.pid) else [])
    assert not light_template.is_alive()
    with pytest.raises(TemplateEnded):
        light_template.fork(MODULE)


def test_the_template_ends_after_its_requester_and_the_forked_processes(light_template: Template) -> None:
    with forked(light_template, "sleep") as (process, read):
        line_of(read)
        template = psutil.Process(process.pid).parent()
        assert template is not None
        light_template.close()
        process.terminate()
        # The template has reported the end, so it outlived the process.
        assert process.wait(SECONDS) == -signal.SIGTERM
        wait_gone([template])


def test_a_supervisor_that_signals_all_processes_does_not_end_the_template(light_template: Template) -> None:
    with forked(light_template, "sleep") as (process, read):
        line_of(read)
        template = psutil.Process(process.pid).parent()
        assert template is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            template.send_signal(number)
    assert report_of(light_template)["arguments"] == ["report"]


def test_a_process_may_have_a_template_of_its_own_below_it(template: Template) -> None:
    nested, said = output_of(template, "nest", with_template=True).splitlines()
    report = json.loads(said)
    assert report["has_torch"]
    assert report["parent"] not in (int(nested), report["pid"], os.getpid())


def test_processes_of_an_own_template_end_with_it_and_no_others(template: Template) -> None:
    with forked(template, "nest_sleep", with_template=True) as (process, read):
        line_of(read)
        own, forked_by_it = psutil.Process(process.pid).children(recursive=True)
        own.kill()
        wait_gone([forked_by_it])
        assert process.poll() is None


def test_a_requester_that_was_killed_leaves_no_template() -> None:
    code = "from node.ipc.template import Template; t = Template.start([]); print(flush=True); input()"
    requester = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert requester.stdout is not None
    requester.stdout.readline()
    children = psutil.Process(requester.pid).children()
    assert len(children) == 1
    requester.kill()
    requester.communicate()
    wait_gone(children)


_THREAD = "import threading, time; threading.Thread(target=time.sleep, args=[600], daemon=True).start()"
_CUDA = "import sys, types; sys.modules['torch'] = module = types.ModuleType('torch')\n"
_CUDA += "module.cuda = types.SimpleNamespace(is_initialized=lambda: True)"


@pytest.mark.parametrize(("code", "reason"), [(_THREAD, "thread"), (_CUDA, "CUDA")])
def test_a_module_that_makes_a_fork_unsafe_is_refused(tmp_path: Path, code: str, reason: str) -> None:
    (tmp_path / "unsafe_module.py").write_text(code)
    call = "from node.ipc.template_server import import_modules; import_modules(['unsafe_module'])"
    done = subprocess.run(
        [sys.executable, "-c", call],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert reason in done.stderr


def wait_gone(processes: Sequence[psutil.Process]) -> None:
    """Return when all have ended."""
    for process in processes:
        try:
            process.wait(SECONDS)
        except psutil.NoSuchProcess:
            continue


@pytest.mark.parametrize("limit", ["-S", ""], ids=["soft", "hard"])
def test_a_template_forks_where_few_files_may_be_open(limit: str) -> None:
    """Of 256, it needs none with a high number; a soft limit is raised, as macOS has it."""
    code = (
        "import resource, sys; from node.ipc.template import Template; template = Template.start([]);"
        "print(template.fork('timeit', ['-n1', '-r1']).wait(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    shell = f'ulimit {limit} -n 256 && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    status, soft, hard = done.stdout.split()[-3:]
    assert (status, soft) == ("0", hard), done.stderr
    assert "loop" in done.stdout, done.stderr


def test_a_template_that_imports_ends_with_its_requester() -> None:
    """Its imports take seconds, in which it would keep the requester's outputs open."""
    code = "import os; from node.ipc.template import Template; Template.start(['tests.support.slow_import']);"
    command = [sys.executable, "-c", f"{code} os._exit(7)"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS, check=False)
    assert done.returncode == 7
