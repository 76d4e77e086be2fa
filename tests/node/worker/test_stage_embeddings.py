"""Stage embeddings: a token table for the input of every stage after the first."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from coordinator.placement.cost_model import stage_parameters
from node.checkpoint.global_model import Checkpoint
from node.experiment.evaluate import ForwardMode, evaluate
from node.generate import whole_model
from node.hugging_face.architecture import require_published
from node.model.init import initial_parameters
from node.model.shapes import embedding_name, parameter_count
from node.worker.trainer import Trainer
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import StageRange
from tests.support.running_replica import RunningReplica, spec_of

pytestmark = pytest.mark.usefixtures("one_thread")

OPTION = {"model.stage_embeddings": True}


def tables_of(spec: RunSpec) -> list[str]:
    return [embedding_name(spec, stage) for stage in range(1, spec.swarm.stages)]


def test_the_run_begins_as_one_without_them_and_its_tables_are_zero() -> None:
    spec, plain = spec_of(**OPTION), spec_of()
    assert spec.hash != plain.hash
    for stage in range(spec.swarm.stages):
        initial, expected = initial_parameters(spec, stage), initial_parameters(plain, stage)
        own = {embedding_name(spec, stage)} if stage else set()
        assert initial.keys() - expected.keys() == own
        assert all(torch.equal(initial[name], value) for name, value in expected.items())
        assert not any(initial[name].any() for name in own)
        assert parameter_count(spec, stage) == stage_parameters(spec, stage)


def test_a_table_is_named_after_its_layer_for_every_number_of_members() -> None:
    spec = resolve(overrides={**OPTION, "model.layers": 6, "swarm.stages": 3})
    assert tables_of(spec) == ["emb_2", "emb_4"]


async def test_they_are_trained_alike_in_full_replicas_and_in_uncompressed_pipelines() -> None:
    trained, spec = [], spec_of(**OPTION, **{"inner.steps": 3})
    for members in (1, 2, 4):
        async with AsyncExitStack() as stack:
            replica = RunningReplica(spec, members, k=0)
            await replica.start(stack)
            loss = await replica.inner_phase(1, 0)
            parameters = {name: value.detach().clone() for name, value in replica.parameters().items()}
            trained.append((loss, parameters))
    (loss, expected), *others = trained
    assert all(expected[name].any() for name in tables_of(spec))
    for other_loss, parameters in others:
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_they_do_not_decay() -> None:
    spec = spec_of(**OPTION, **{"inner.weight_decay": 0.5})
    trainer = Trainer(spec, StageRange(1, 2))
    table = trainer.parameters(1)[embedding_name(spec, 1)]
    with torch.no_grad():
        table.fill_(1.0)
    for parameter in trainer.parameters(1).values():
        parameter.grad = torch.zeros_like(parameter)
    trainer.begin_round(1, range(spec.samples_per_round()))
    trainer.apply(0, 1.0)
    assert torch.equal(table, torch.ones_like(table))


def test_evaluation_adds_them(tmp_path: Path) -> None:
    spec = spec_of(**OPTION)
    text = tmp_path / "text"
    text.write_text("A text of some length. " * 200)
    stages = {stage: initial_parameters(spec, stage) for stage in range(spec.swarm.stages)}
    without = Checkpoint(spec, 0, {stage: dict(named) for stage, named in stages.items()})
    stages[1][embedding_name(spec, 1)] = torch.randn(spec.model.vocabulary, spec.model.width)
    with_table = Checkpoint(spec, 0, stages)
    ids = torch.arange(spec.model.context)[None] % spec.model.vocabulary
    assert not torch.allclose(whole_model(with_table)(ids), whole_model(without)(ids))
    for mode in ForwardMode:
        found = [
            evaluate(model, f"text:{text}", mode=mode, batches=2).loss for model in (with_table, without)
        ]
        assert found[0] != found[1]  # to the last bit the same if the table is not added


def test_transformers_has_no_such_model() -> None:
    require_published(spec_of().model)
    with pytest.raises(HetnodeError, match="stage_embeddings") as refused:
        require_published(spec_of(**OPTION).model)
    assert refused.value.code is ErrorCode.UNSUPPORTED_MODEL
