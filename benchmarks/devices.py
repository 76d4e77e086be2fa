"""How much memory each rank of a full replica takes, over one, two and four ranks on the CPU.

    python -m benchmarks.devices           # 71 million parameters, some minutes
    python -m benchmarks.devices --quick   # 19 million parameters

Each rank is a real worker process. It builds its part of the model, trains one inner step, and commits one
round with its own payload. On a GPU parameters, gradients and moments would be in the GPU's memory, and the
outer state in main memory.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.tables import NotHere, Table
from node.core.model.shapes import parameter_count
from node.core.train.pipeline import Pipeline
from node.ipc.channel import Child
from node.ipc.rank_channels import RankChannels
from node.ipc.ranks import DeviceList
from node.ipc.stored_payload import StoredPayload, sha256_of
from node.ipc.worker_calls import BeginRound, Build, Commit, ComputeOptions, Connect, LocalData, Propose
from node.ipc.worker_client import WorkerClient
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Member, PeerId, Plan, Replica, StageRange

_MB = 1e6
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Held:
    """Bytes of one rank.

    Attributes:
        libraries: that training loads, beyond what the process starts with.
        trained: after a round, beyond the libraries; gradients are freed.
        peak: the most at any time, beyond the libraries.
    """

    libraries: int
    trained: int
    peak: int


def spec_of(quick: bool) -> RunSpec:
    """A model of equal blocks with a small vocabulary."""
    return _of_width(512 if quick else 1024)


def _of_width(width: int) -> RunSpec:
    model = {"model.width": width, "model.layers": 16, "model.heads": 4, "model.context": 64}
    inner = {"inner.steps": 1, "inner.microbatches": 4, "inner.microbatch_size": 1}
    return resolve("nano", overrides={**model, **inner, "swarm.stages": 8, "link.k": 0})


async def measured(spec: RunSpec, ranks: int, sharded: bool) -> list[Held]:
    """What each rank holds."""
    async with AsyncExitStack() as stack:
        worker = await DeviceList(("cpu",) * ranks).start(ranks, stack)
        assert isinstance(worker.channel, RankChannels)
        pids = [each.pid for each in worker.channel.ranks if isinstance(each, Child)]
        stages = StageRange(0, spec.swarm.stages)
        started = [_resident(pid) for pid in pids]
        await _round(worker, _of_width(64), stages, sharded)  # loads the libraries that training needs
        before = [_resident(pid) for pid in pids]
        await _round(worker, spec, stages, sharded)
        after, most = [_resident(pid) for pid in pids], [_peak(pid) for pid in pids]
    found = zip(started, before, after, most, strict=True)
    return [Held(second - first, third - second, peak - second) for first, second, third, peak in found]


async def _round(worker: WorkerClient, spec: RunSpec, stages: StageRange, sharded: bool) -> None:
    """Build the model, train one inner step, and commit one round."""
    await worker.call(Build(spec, stages, LocalData(ComputeOptions(sharded=sharded))))
    replica = Replica(0, (Member(PeerId("peer"), stages, ""),), ())
    await worker.call(Connect(None, None))
    await worker.call(BeginRound(1, range(spec.samples_per_round())))
    pipeline = Pipeline(spec, Plan(1, 1, 0, (replica,), "benchmark"), replica, 0, worker, None, None)
    await pipeline.inner_step(1, 0)
    for stage in stages:
        payload = await worker.call(Propose(stage))
        assert payload is not None
        await worker.call(Commit(stage, 1, (StoredPayload(sha256_of(payload)),), (1.0,), 0))


def _resident(pid: int) -> int:
    # Pages that only this process has: those of the imported libraries are shared.
    return int(psutil.Process(pid).memory_full_info().uss)


def _peak(pid: int) -> int:
    """The most that was resident at once, without the pages that are shared."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    high = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    info = psutil.Process(pid).memory_full_info()
    return high - (info.rss - int(info.uss))


def table(quick: bool) -> Table:
    """One row for each number of ranks."""
    if not _STATUS.exists():
        raise NotHere("it reads /proc")
    spec = spec_of(quick)
    parameters = sum(parameter_count(spec, stage) for stage in range(spec.swarm.stages))
    rows, one, most = [], 1, 1
    for ranks, sharded in ((1, False), (2, False), (2, True), (4, True)):
        held = asyncio.run(measured(spec, ranks, sharded))
        libraries, trained, peak = (
            max(getattr(each, name) for each in held) for name in ("libraries", "trained", "peak")
        )
        if ranks == 1:
            one, most = trained, peak
        rows.append(
            (
                str(ranks),
                "sharded" if sharded else "replicated",
                f"{libraries / _MB:.0f}",
                *(f"{trained / _MB:.0f}", f"{trained / one:.2f}"),
                *(f"{peak / _MB:.0f}", f"{peak / most:.2f}"),
            )
        )
    return Table(
        f"Memory of each rank, {parameters / 1e6:.0f} million parameters",
        "python -m benchmarks.devices" + " --quick" * quick,
        ("ranks", "parameters", "libraries, MB", "after a round, MB", "of one", "peak, MB", "of one"),
        tuple(rows),
        (
            "The largest of all ranks. Figures after the libraries are beyond what these take.",
            "Parameters, moments, anchor and error feedback: 20 bytes for each parameter. The peak adds "
            "gradients, the pending proposal, and the blocks that are whole while they compute.",
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.devices",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true")
    print(table(parser.parse_args(arguments).quick).markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
