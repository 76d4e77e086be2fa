"""Peaks of resident memory where the state of a stage is made, written, served, fetched, loaded and exported.

    python -m benchmarks.state_memory                        # a stage of 100M parameters, some minutes
    python -m benchmarks.state_memory --parameters 25000000

The stage is one of the middle, of matrices alone. "Peak" is what an operation needs beyond what was resident
before it, "kept" what stays resident after it, both in bytes for each parameter of the stage. Nothing is
trained: gradients are random numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.resident import CLEAR, LAYER, layers_of, printed_alone, resident
from benchmarks.tables import Table, machine
from node.checkpoint import global_model, parts
from node.checkpoint.download import CheckpointDownload
from node.checkpoint.initial import InitialAnchors
from node.checkpoint.transfer import CheckpointServer, fetch_checkpoint
from node.core.model.init import initial_parameters
from node.core.model.shapes import parameter_shapes
from node.core.worker.trainer import Trainer
from node.hugging_face.export import export
from node.hugging_face.weights import DTYPES
from protocol.math.digest import header_of, size_of
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Part, PeerId, StageRange, StateRecord

STAGE, PAYLOADS, ROUND = 1, 8, 1


def spec_with(parameters: int) -> RunSpec:
    """Three stages, of which the one in the middle has about `parameters`."""
    shape = {
        "model.vocabulary": 320,
        "model.layers": 3 * layers_of(parameters),
        "swarm.stages": 3,
        "link.embedding_every": 1,
    }
    return resolve("178m", overrides=shape | {"data.source": "builtin", "data.tokenizer": "byte"})


class Meter:
    """The peaks of one process, by operation.

    Attributes:
        rows: operation, peak and rest of each, in bytes for each of `parameters`.
    """

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self.rows: list[tuple[str, float, float]] = []

    @contextmanager
    def measuring(self, operation: str) -> Iterator[None]:
        """Add a row for the block."""
        self._trim()
        before = resident("VmRSS")
        CLEAR.write_text("5")
        yield
        peak = resident("VmHWM") - before
        self._trim()
        kept = resident("VmRSS") - before
        self.rows.append((operation, peak / self._parameters, kept / self._parameters))

    def _trim(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def warm_up(work: Callable[[RunSpec, Path, Meter], None]) -> None:
    """Load all code that `work` uses."""
    with tempfile.TemporaryDirectory() as folder:
        work(spec_with(LAYER), Path(folder), Meter(1))


def of_training(spec: RunSpec, folder: Path, meter: Meter) -> None:
    """A member through a round and a checkpoint, and one that starts again or joins."""
    with meter.measuring("build the stage"):
        trainer = Trainer(spec, StageRange(STAGE, STAGE + 1))
    others = other_payloads(trainer)
    trainer.begin_round(1, range(spec.samples_per_round(1)))
    generator = torch.Generator().manual_seed(0)
    with meter.measuring("inner step"):
        for parameter in trainer.parameters(STAGE).values():
            parameter.grad = torch.empty_like(parameter).normal_(generator=generator)
        trainer.apply(0, 1.0)
    with meter.measuring("propose"):
        payload = trainer.outer.propose(STAGE)
    assert payload is not None
    outcome = [(each, 1.0) for each in (payload, *others)]
    with meter.measuring(f"screen and commit of {PAYLOADS} payloads"):
        assert not any(trainer.outer[STAGE].screen([each for each, _ in outcome]))
        digest = trainer.commit(STAGE, ROUND, outcome, mine_included=True)
    with meter.measuring("digest"):
        assert trainer.outer[STAGE].digest() == digest
    written = folder / "checkpoint" / f"round-{ROUND:06}"
    with meter.measuring("write a checkpoint"):
        trainer.write_checkpoint(written, ROUND)
    del trainer
    trainer = Trainer(spec, StageRange(STAGE, STAGE + 1))
    with meter.measuring("restore at a start"):
        assert trainer.restore(folder / "checkpoint") is not None
    assert trainer.outer[STAGE].digest() == digest
    del trainer
    trainer = Trainer(spec, StageRange(STAGE, STAGE + 1))
    part, fetched = parts.find(folder / "checkpoint", STAGE, Part.STAGE, ROUND), folder / "fetched"
    assert part is not None
    with fetched.open("wb") as file:
        file.writelines(parts.pieces(part, range(part.nbytes), 1 << 20))
    with meter.measuring("load what was fetched"):
        assert trainer.load_part(STAGE, Part.STAGE, ROUND, fetched) == digest


def other_payloads(trainer: Trainer) -> list[bytes]:
    """What other replicas have learned in the first round."""
    found = []
    for seed in range(1, PAYLOADS):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in trainer.parameters(STAGE).values():
                parameter.add_(torch.empty_like(parameter).normal_(std=1e-4, generator=generator))
        payload = trainer.outer.propose(STAGE)
        assert payload is not None
        found.append(payload)
        trainer.outer.forget_error(STAGE)
    return found


def of_transfer(spec: RunSpec, folder: Path, meter: Meter) -> None:
    """A donor and a joiner in one process, and the anchor before round 1."""
    global_model.write(folder / "donor" / "round-000000", spec, 0, {STAGE: initial_parameters(spec, STAGE)})
    manifest = global_model.verify(folder / "donor" / "round-000000").manifest
    server = CheckpointServer(folder / "donor")
    shapes = parameter_shapes(spec, STAGE)

    async def fetch() -> None:
        async def ask(donor: str, index: int, size: int) -> bytes:
            found = await server.find(STAGE, Part.STAGE, 0)
            assert found is not None
            return b"".join([piece async for piece in server.pieces(found, index)])

        holders = PeerId("a"), PeerId("b")
        record = StateRecord("run", STAGE, Part.STAGE, 0, manifest.stages[STAGE].anchor_digest, holders)
        into = folder / "incoming"
        donors = dict.fromkeys(holders, STAGE)
        download = CheckpointDownload(record, donors, size_of(shapes), header_of(shapes), into)
        await fetch_checkpoint(download, holders, 600.0, ask)

    with meter.measuring("serve and fetch, in one process"):
        asyncio.run(fetch())
    anchors = InitialAnchors(spec, None, (STAGE,))
    with meter.measuring("write the anchor before round 1"):
        anchors.write(folder / "initial", STAGE)


def of_export(spec: RunSpec, folder: Path, meter: Meter) -> None:
    """All stages of a model in three folders, put together and exported."""
    places = [folder / f"part-{stage}" for stage in range(spec.swarm.stages)]
    for stage, place in enumerate(places):
        parameters = initial_parameters(spec, stage)
        global_model.write(place, spec, 0, {stage: parameters})
        del parameters
    with meter.measuring("put the stages of a model together"):
        global_model.assemble(places, folder / "whole")
    with meter.measuring("export the model"):
        export(global_model.verify(folder / "whole"), folder / "hf", DTYPES["bf16"], 5 << 30)


GROUPS: dict[str, Callable[[RunSpec, Path, Meter], None]] = {
    "training": of_training,
    "transfer": of_transfer,
    "export": of_export,
}


def measured(parameters: int) -> Table:
    """The table; each group in a process of its own. Raises NotHere."""
    rows: list[tuple[str, ...]] = []
    for group in GROUPS:
        printed = printed_alone("benchmarks.state_memory", parameters=parameters, group=group)
        rows += [tuple(line.split("\t")) for line in printed.splitlines()]
    count = spec_with(parameters).parameters_of(STAGE)
    return Table(
        "Memory for the state of a stage",
        f"python -m benchmarks.state_memory --parameters {parameters}",
        ("operation", "peak bytes a parameter", "kept"),
        tuple(rows),
        (
            f"A stage of {count / 1e6:.1f}M parameters with AdamW; export: of a model of three such stages.",
            f"Measured {machine()}.",
        ),
    )


def table(quick: bool) -> Table:
    return measured(25_000_000 if quick else 100_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--group", choices=GROUPS, help="print the rows of one group only")
    arguments = parser.parse_args()
    if arguments.group is None:
        print(measured(arguments.parameters).markdown)
        return
    torch.set_num_threads(1)
    work, spec = GROUPS[arguments.group], spec_with(arguments.parameters)
    warm_up(work)
    meter = Meter(spec.parameters_of(STAGE))
    with tempfile.TemporaryDirectory() as folder:
        work(spec, Path(folder), meter)
    for operation, peak, kept in meter.rows:
        print(f"{operation}\t{peak:.2f}\t{kept:.2f}")


if __name__ == "__main__":
    main()
