"""Resident memory of a worker against what is planned for it, by policy: two rounds on a CPU.

    python -m benchmarks.memory_plan                          # 100M parameters, a minute for each policy
    python -m benchmarks.memory_plan --parameters 300000000

On a CPU card and main memory are one, so the sum is compared: what `protocol.memory` says of a stage on a
CPU, and of moments in main memory what passes through the device. The trainer of each policy is alone in a
process. All must end at the same anchor.

Freed memory is returned at once. In a real swarm a worker on a CPU keeps freed tensors of up to 32 MB in its
inner phases (node.machine.memory): with 100M parameters it is 14 % above the plan after 12 rounds, and 27 %
if it keeps them always, 50 % after 40. One that returns all is 5 % above, and its steps take a fifth longer.
The main process holds 0.26 GB, with 13M parameters and with 100M.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.inner_loop import inner_phase
from benchmarks.resident import CLEAR, layers_of, printed_alone, resident
from benchmarks.tables import Table, machine
from node.core.optimizer.inner import OPTIMIZERS
from node.core.worker.compute import Compute
from node.core.worker.factories import TrainerFactories
from node.core.worker.trainer import Trainer
from node.data.stream import open_stream
from node.moments.host_moments import HOST_OPTIMIZERS
from protocol.memory.needs import BY_PRICE, PIECE, SLOTS, MemoryPolicy, memory_need
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import StageRange

WHOLE, ROUNDS = StageRange(0, 1), 2


def spec_with(parameters: int, optimizer: str = "adamw") -> RunSpec:
    """One stage of about `parameters`, of layers of the 178m preset, and short samples."""
    shape = {"model.vocabulary": 320, "model.context": 256, "swarm.stages": 1}
    shape["model.layers"] = layers_of(parameters)
    work = {"inner.microbatch_size": 2, "inner.microbatches": 2, "inner.steps": 2, "swarm.replicas": 1}
    data = {
        "swarm.pipelines": 0,
        "inner.optimizer": optimizer,
        "data.source": "builtin",
        "data.tokenizer": "byte",
    }
    return resolve("178m", overrides=shape | work | data)


def train(spec: RunSpec, policy: MemoryPolicy) -> str:
    """Two rounds. Returns the digest of the anchor."""
    factories = TrainerFactories(optimizers=HOST_OPTIMIZERS if policy.host_moments else OPTIMIZERS)
    compute = Compute(activation_checkpointing=policy.checkpointing)
    trainer = Trainer(spec, WHOLE, compute, open_stream(spec), factories)
    trainer.connect(None, None)
    digest = ""
    for number in range(1, ROUNDS + 1):
        inner_phase(trainer, number)
        payload = trainer.outer.propose(0)
        assert payload is not None
        digest = trainer.commit(0, number, [(payload, 1.0)], True)
    return digest


def planned(spec: RunSpec, policy: MemoryPolicy) -> int:
    """Bytes of card and main memory together."""
    need = memory_need(spec, WHOLE, 1, "cpu", policy)
    return need.device + policy.host_moments * passing(spec)


def passing(spec: RunSpec) -> int:
    """What goes through the device at once, of moments that are in main memory."""
    model = spec.model
    return 2 * 4 * SLOTS * min(PIECE, model.width * max(model.feed_forward, model.vocabulary))


def measured(parameters: int, optimizer: str = "adamw") -> Table:
    """The table; each policy in a process of its own. Raises NotHere."""
    spec, rows, digests = spec_with(parameters, optimizer), [], set()
    for index, policy in enumerate(BY_PRICE):
        chosen = {"parameters": parameters, "optimizer": optimizer, "policy": index}
        peak, digest = printed_alone("benchmarks.memory_plan", **chosen).split()
        digests.add(digest)
        plan = planned(spec, policy)
        rows.append(
            (str(policy), f"{int(peak) / 1e9:.2f}", f"{plan / 1e9:.2f}", f"{int(peak) / plan - 1:+.1%}")
        )
    if len(digests) != 1:
        raise RuntimeError("The policies ended at different anchors.")
    return Table(
        "Memory of a worker against the plan",
        f"python -m benchmarks.memory_plan --parameters {parameters} --optimizer {optimizer}",
        ("policy", "peak GB", "planned GB", "beside the plan"),
        tuple(rows),
        (
            f"{spec.parameters_of(0) / 1e6:.1f}M parameters on a CPU, {optimizer}; all end at one anchor.",
            f"Beyond a worker that has trained a small model. Measured {machine()}.",
        ),
    )


def table(quick: bool) -> Table:
    return measured(25_000_000 if quick else 100_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--policy", type=int, choices=range(len(BY_PRICE)), help="measure one policy only")
    chosen = parser.parse_args()
    if chosen.policy is None:
        print(measured(chosen.parameters, chosen.optimizer).markdown)
        return
    torch.set_num_threads(1)
    policy = BY_PRICE[chosen.policy]
    train(spec_with(1, chosen.optimizer), policy)
    before = resident("VmRSS")
    CLEAR.write_text("5")
    digest = train(spec_with(chosen.parameters, chosen.optimizer), policy)
    print(resident("VmHWM") - before, digest)


if __name__ == "__main__":
    main()
