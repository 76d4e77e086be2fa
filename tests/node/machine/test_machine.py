"""The device that a member chooses, and the limits that its owner sets."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from node.core.optimizer.inner import OPTIMIZERS
from node.core.worker import compute as computing
from node.core.worker.compute import Compute
from node.ipc.worker_calls import AUTO_DEVICE, CheckDevice, ComputeOptions, DeviceInfo, FormGroup, Precision
from node.machine.devices import check_device, gpu_name
from node.machine.machine import OwnMachine
from node.moments.host_moments import HOST_OPTIMIZERS
from node.ranks.group import RankGroup
from protocol.errors import ErrorCode, HetnodeError
from protocol.memory.needs import BY_PRICE, members_left, memory_need
from protocol.run_files.resolve import resolve
from protocol.spec.fixed import MEMORY_RESERVE
from protocol.types import StageRange
from tests.support.running_replica import spec_of


def test_a_compiler_that_is_not_there_is_said_before_anything_counts_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computing, "BACKEND", "nonsense")
    with pytest.raises(HetnodeError) as refused:
        OwnMachine().check_device(CheckDevice(ComputeOptions("cpu", compile=True)))
    assert refused.value.code is ErrorCode.DEVICE_UNAVAILABLE
    assert "--no-compile" in refused.value.remedy
    assert "torch.compile" in refused.value.cause


def test_the_best_device_that_works_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = DeviceInfo("cpu", "cpu", Precision.FP32)
    assert OwnMachine().check_device(CheckDevice(ComputeOptions("cpu"))) == usual
    assert check_device(Compute("cpu", precision=Precision.BF16)).precision is Precision.BF16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_device(Compute(AUTO_DEVICE)) == usual
    # A driver without a device: torch has no CUDA here, or the device is gone.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Compute, "open", _only_the_cpu_works)
    assert check_device(Compute(AUTO_DEVICE)) == usual
    with pytest.raises(HetnodeError):
        check_device(Compute("cuda"))


@pytest.mark.parametrize("device", ["mps", "xpu", "gpu", "cuda:77"])
def test_a_device_that_is_not_there_is_said_in_a_few_words(device: str) -> None:
    """torch itself lists all backends that it knows."""
    with pytest.raises(HetnodeError) as refused:
        check_device(Compute(device))
    assert device in refused.value.cause
    assert len(refused.value.cause) < 300
    assert "--device cpu" in refused.value.remedy


def _only_the_cpu_works(compute: Compute) -> torch.device:
    if compute.device != "cpu":
        raise HetnodeError(ErrorCode.DEVICE_UNAVAILABLE, "It does not work.", "Use another one.")
    return torch.device("cpu")


def test_a_memory_limit_holds_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held(Exception):
        """Ends the build, which needs the device."""

    def hold(_: float, device: torch.device) -> None:
        raise Held(str(device))

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2e9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", hold)
    monkeypatch.setattr("node.machine.machine.form_group", lambda *_: RankGroup())
    monkeypatch.setattr(Compute, "open", lambda self: torch.device(self.device))
    machine = OwnMachine()
    machine.form_group(FormGroup(1, 2, "cuda:1", "127.0.0.1", 1))
    options = ComputeOptions("cuda:0", memory_limit=10**9)  # the node has the device of rank 0
    with pytest.raises(Held, match="cuda:1"):
        machine.place(spec_of(), StageRange(0, 4), options)


@pytest.mark.parametrize(
    ("name", "hip", "expected"),
    [
        ("NVIDIA H100", None, "NVIDIA H100"),
        ("AMD Radeon RX 7900 XTX", "6.2", "AMD Radeon RX 7900 XTX, ROCm 6.2"),
        ("", "6.2", "gfx1100, ROCm 6.2"),
    ],
)
def test_people_see_which_gpu_it_is(
    monkeypatch: pytest.MonkeyPatch, name: str, hip: str | None, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    found = SimpleNamespace(gcnArchName="gfx1100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert gpu_name(torch.device("cuda")) == expected


def test_stages_that_lack_room_on_their_device_take_the_cheapest_way_that_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec, stages = resolve("178m"), StageRange(1, 2)
    free = DeviceInfo("cuda:0", "a card", Precision.BF16, 0)
    monkeypatch.setattr("node.machine.machine.memory_in_use", lambda _: 0)
    monkeypatch.setattr("node.machine.machine.check_device", lambda _: free)
    caplog.set_level(logging.INFO)
    for policy in BY_PRICE:
        need = memory_need(spec, stages, members_left(spec, stages), "cuda", policy)
        free = replace(free, free_bytes=round(need.device / (1 - MEMORY_RESERVE)) + 2)
        compute, is_sharded, optimizers = OwnMachine().place(spec, stages, ComputeOptions("cuda:0"))
        assert (compute.activation_checkpointing, is_sharded) == (policy.checkpointing, False)
        assert optimizers is (HOST_OPTIMIZERS if policy.host_moments else OPTIMIZERS)
        assert f"GB of main memory; {policy}" in caplog.records[-1].message


def test_what_was_asked_for_stays_and_the_limit_of_the_owner_holds() -> None:
    spec, stages = resolve("nano"), StageRange(0, 2)
    asked = ComputeOptions("cpu", activation_checkpointing=True)
    assert OwnMachine().place(spec, stages, asked)[0].activation_checkpointing
    assert not OwnMachine().place(spec, stages, ComputeOptions("cpu"))[0].activation_checkpointing
    with pytest.raises(HetnodeError, match="above --memory-limit") as refused:
        OwnMachine().place(spec, stages, ComputeOptions("cpu", memory_limit=10**5))
    assert refused.value.code is ErrorCode.BAD_OPTION
