"""Fuzzing reaches every decoder with a valid input, and finds what it looks for."""

from __future__ import annotations

import importlib
import mmap
import os
import pkgutil
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.fuzz import Fuzzer
from benchmarks.fuzz_seeds import Target
from benchmarks.mutate import MAX_BYTES, Mutator
from protocol import wire
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb


def test_every_decoder_takes_a_seed_and_some_changed_inputs(tmp_path: Path) -> None:
    # A process of its own: the entry points of the DHT change hivemind for the whole process.
    command = (sys.executable, "-m", "benchmarks.fuzz", "-runs=2000", f"-folder={tmp_path}")
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not list(tmp_path.iterdir())


def test_no_reader_of_messages_is_forgotten() -> None:
    # Their names, because a converter does not know what it was called.
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.walk_packages(wire.__path__, f"{wire.__name__}.")
    ]
    readers = {name for module in modules for name in vars(module) if name.endswith("_from_pb")}
    fuzzed = "".join(path.read_text() for path in Path(benchmarks.__path__[0]).glob("fuzz_*.py"))
    assert len(readers) > 20
    assert not {name for name in readers if not re.search(rf"\b{name}\b", fuzzed)}


def fuzzer(tmp_path: Path, decode: object) -> Fuzzer:
    target = Target("one", decode, (b"seed",))  # type: ignore[arg-type]
    return Fuzzer([target], 1, tmp_path, mmap.mmap(-1, MAX_BYTES + 64))


def test_an_unexpected_exception_is_found_once_and_its_input_is_kept(tmp_path: Path) -> None:
    def decode(data: bytes) -> None:
        if len(data) != 4:
            raise KeyError("a bug")

    found = fuzzer(tmp_path, decode)
    list(found.run(200))
    assert len(found.failures) == 1
    assert "KeyError" in found.failures[0]
    (crash,) = tmp_path.iterdir()
    assert len(crash.read_bytes()) != 4


@pytest.mark.parametrize("refusal", [HetnodeError(ErrorCode.BAD_REQUEST, "no.", ""), ValueError("no")])
def test_a_refusal_is_no_failure(tmp_path: Path, refusal: Exception) -> None:
    def decode(data: bytes) -> None:
        if data != b"seed":
            raise refusal

    found = fuzzer(tmp_path, decode)
    list(found.run(200))
    assert not found.failures
    assert found.outcomes[0].refused > 100


def test_a_decoder_that_takes_no_seed_is_found(tmp_path: Path) -> None:
    def decode(data: bytes) -> None:
        raise ValueError("never")

    found = fuzzer(tmp_path, decode)
    list(found.run(1))
    assert "no seed is valid" in found.failures[0]


def test_an_input_that_ends_the_process_is_kept(tmp_path: Path) -> None:
    current = mmap.mmap(-1, MAX_BYTES + 64)
    if os.fork() == 0:
        target = Target("one", lambda data: os.kill(os.getpid(), signal.SIGKILL), (b"seed",))
        list(Fuzzer([target], 1, tmp_path, current).run(1))
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
    assert current[6:10] == b"seed"


def test_changed_messages_stay_small_and_differ() -> None:
    plan = pb.Plan(epoch=1, replicas=[pb.Replica(members=[pb.Member(peer="p")])]).SerializeToString()
    mutator = Mutator(1)
    found = [mutator.mutated([plan], pb.Plan) for _ in range(500)]
    assert max(map(len, found)) <= MAX_BYTES
    assert len(set(found)) > 250
