"""The production code against independent float64 references; see vectors/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from node.core.model.stage import Stage
from node.core.optimizer.adamw import AdamW
from node.generate import next_token_loss
from protocol.math.outer_step import apply_update
from protocol.math.payload_layout import TensorLayout
from protocol.math.subspace import (
    ReceivingEnd,
    SendingEnd,
    perpendicular_table,
)
from protocol.math.topk import SparseTensor, sparsify
from protocol.spec.outer import OuterSpec
from protocol.spec.run import RunSpec
from tests.support.reference import (
    assert_close,
    chain_step,
    f64,
    gradients_of,
    parameters_of,
    stages_of,
    vectors,
)

PROJECTION = vectors("projection")
TINY = vectors("tiny_model")
SPARSELOCO = vectors("sparseloco")
ROUND = vectors("tiny_outer_step")
COMM = vectors("tiny_outer_step_comm")


@pytest.mark.parametrize("case", PROJECTION["cases"], ids=lambda case: f"k={case['k']}")
def test_link_projects_as_the_reference(case: dict[str, Any]) -> None:
    tolerance = PROJECTION["tol"]
    ids = torch.tensor(PROJECTION["ids"])
    sender = SendingEnd(case["k"], f64(case["U"]))
    receiver = ReceivingEnd(case["k"], f64(case["U"]), f64(PROJECTION["TE"]))
    assert_close(receiver.perpendicular_vd, case["T_perp"], tolerance)

    wire = sender.compress_forward(f64(PROJECTION["X"]))
    assert_close(wire, case["X_tilde"], tolerance)
    assert_close(receiver.expand_forward(wire, ids), case["X_hat"], tolerance)

    wire = receiver.compress_backward(f64(PROJECTION["grad_X_hat"]))
    assert_close(wire, case["grad_tilde"], tolerance)
    assert_close(sender.expand_backward(wire), case["grad_X"], tolerance)


def test_one_embedding_table_equals_the_adaptation_of_its_two_parts() -> None:
    reference = vectors("te_adaptation")
    tolerance = reference["tol"]
    basis, table = f64(reference["U"]), f64(reference["TE_init"])
    end = ReceivingEnd(basis.shape[1], basis, table)
    assert_close(end.perpendicular_vd, reference["T_perp_init"], tolerance)
    for step in reference["steps"]:
        (table,) = apply_update(
            {"emb": table}, [{"emb": _dense(step["update"])}], [1.0], OuterSpec()
        ).values()
        end.refresh(table)
        assert_close(table, step["TE_after"], tolerance)
        assert_close(end.perpendicular_vd, step["T_perp_after"], tolerance)
        assert_close(table - end.perpendicular_vd, step["T_S_after"], tolerance)


def _dense(nested: Any) -> SparseTensor:
    return SparseTensor(None, f64(nested).flatten())


@pytest.mark.parametrize(
    "run",
    [run for run in SPARSELOCO["runs"] if run["layout"] == "flat"],
    ids=lambda run: f"{run['short_chunk_rule']}-{run['outer_lr']}",
)
def test_sparse_rounds_with_error_feedback_follow_the_reference(run: dict[str, Any]) -> None:
    tolerance, beta = SPARSELOCO["tol"], SPARSELOCO["beta"]
    outer = OuterSpec(
        learning_rate=run["outer_lr"],
        error_decay=beta,
        chunk=run["chunk"],
        top_k=run["k"],
        quantizer="none",
    )
    anchor = {name: f64(value) for name, value in SPARSELOCO["theta_init"].items()}
    errors = [{name: torch.zeros_like(value) for name, value in anchor.items()} for _ in range(2)]
    assert len(run["steps"]) == SPARSELOCO["T"]
    for step, pseudo_gradients in zip(run["steps"], SPARSELOCO["pseudo_gradients"], strict=True):
        payloads = []
        for replica, error in enumerate(errors):
            sent = {}
            for name in anchor:
                error[name] = beta * error[name] + f64(pseudo_gradients[replica][name])
                sent[name] = _sparse(error[name], outer, run["short_chunk_rule"])
                sent[name].add_to(error[name].view(-1), -1.0)
                _assert_sent(
                    sent[name], step["selected"][replica][name], step["sent_values"][replica][name], tolerance
                )
                assert_close(error[name], step["error_after"][replica][name], tolerance)
            payloads.append(sent)
        moved = apply_update(anchor, payloads, [1.0, 1.0], outer)
        for name, value in moved.items():
            mean_update = (anchor[name] - value) / outer.learning_rate
            assert_close(mean_update, step["mean_update"][name], tolerance)
            assert_close(value, step["theta_after"][name], tolerance)
        anchor = moved


def _sparse(tensor: Tensor, outer: OuterSpec, short_chunk_rule: str) -> SparseTensor:
    """What is sent of `tensor`: of a short last chunk a share of k, or with the rule "clip" k values."""
    if short_chunk_rule == "prop":
        return sparsify(tensor, TensorLayout(tuple(tensor.shape), outer))
    flat, rest = tensor.reshape(-1), tensor.numel() % outer.chunk
    clipped = outer.model_copy(update={"chunk": max(rest, 1), "top_k": min(outer.top_k, rest)})
    cut = len(flat) - rest
    sent = [
        (start, sparsify(part, TensorLayout((len(part),), rule)))
        for start, part, rule in ((0, flat[:cut], outer), (cut, flat[cut:], clipped))
        if len(part)
    ]
    indices = [start + each.indices_s for start, each in sent if each.indices_s is not None]
    return SparseTensor(torch.cat(indices), torch.cat([each.codes_s for _, each in sent]))


def _assert_sent(sent: SparseTensor, selected: list[int], values: list[float], tolerance: float) -> None:
    assert sent.indices_s is not None
    indices, order = sent.indices_s.sort()
    assert indices.tolist() == selected
    assert_close(sent.values_s[order], values, tolerance)


def _tiny_spec() -> RunSpec:
    config = TINY["config"]
    return RunSpec.model_validate(
        {
            "model": {
                "vocabulary": config["vocab"],
                "width": config["d"],
                "layers": config["layers"],
                "heads": config["heads"],
                "feed_forward": config["ffn"],
                "context": config["seq"],
                "rope_base": config["rope_base"],
                "norm_epsilon": config["eps"],
            },
            "link": {"k": config["k"]},
            "swarm": {"stages": config["stages"]},
        }
    )


def _tiny_stages(parameters: Mapping[str, Any]) -> list[Stage]:
    stages = stages_of(_tiny_spec())
    with torch.no_grad():
        for name, parameter in parameters_of(stages).items():
            parameter.copy_(torch.as_tensor(parameters[name], dtype=torch.float64))
    return stages


def _tiny_link(mode: str, table: Tensor) -> tuple[SendingEnd, ReceivingEnd]:
    basis = f64(TINY["U"])
    k = 0 if mode == "full" else basis.shape[1]
    return SendingEnd(k, basis), ReceivingEnd(k, basis, table)


@pytest.mark.parametrize("mode", ["full", "compressed"])
def test_model_in_two_stages_matches_loss_logits_gradients_and_boundary(mode: str) -> None:
    expected, tolerance = TINY[mode], TINY["tol"]
    stages = _tiny_stages(TINY["params"])
    assert list(parameters_of(stages)) == TINY["param_order"]
    table = f64(TINY["params"]["emb"])
    assert_close(perpendicular_table(table, f64(TINY["U"])), TINY["T_perp"], tolerance)
    loss, logits, (boundary,) = chain_step(
        [[stage] for stage in stages],
        [_tiny_link(mode, table)],
        torch.tensor(TINY["input_ids"]),
        torch.tensor(TINY["target_ids"]),
    )
    assert_close(loss, expected["loss"], tolerance)
    assert_close(logits, expected["logits"], tolerance)
    seen = {
        "X": boundary.x,
        "X_tilde": boundary.wire,
        "X_hat": boundary.x_hat,
        "grad_X_hat": boundary.grad_x_hat,
        "grad_tilde": boundary.grad_wire,
        "grad_X": boundary.grad_x,
    }
    for name, value in expected["boundary"].items():
        assert_close(seen[name], value, tolerance)
    gradients = gradients_of(stages)
    assert gradients.keys() == expected["grads"].keys()
    for name, gradient in gradients.items():
        assert_close(gradient, expected["grads"][name], tolerance)


def test_whole_round_of_a_full_and_a_pipeline_replica_matches() -> None:
    options, tolerance = ROUND["options"], ROUND["tol"]
    outer = OuterSpec(
        learning_rate=options["outer_lr"],
        error_decay=options["beta"],
        chunk=options["chunk"],
        top_k=options["k"],
        quantizer="none",
    )
    anchor = {name: f64(TINY["params"][name]) for name in TINY["param_order"]}
    payloads, last_error = [], {}
    for replica, mode in enumerate(["full", "compressed"]):
        local = _inner_phase(replica, mode, anchor)
        sent, last_error = {}, {}
        for name, parameter in local.items():
            assert_close(parameter, ROUND["theta_local"][replica][name], tolerance)
            error = anchor[name] - parameter.detach()
            sent[name] = _sparse(error, outer, options["short_chunk_rule"])
            sent[name].add_to(error.view(-1), -1.0)
            last_error[name] = error
            _assert_sent(
                sent[name], COMM["selected"][replica][name], COMM["sent_values"][replica][name], tolerance
            )
        payloads.append(sent)
    for name, error in last_error.items():
        assert_close(error, COMM["error_after_replica1"][name], tolerance)

    after = apply_update(anchor, payloads, [1.0, 1.0], outer)
    for name, value in after.items():
        assert_close(value, ROUND["theta_after"][name], tolerance)
    t_perp = perpendicular_table(after["emb"], f64(TINY["U"]))
    assert_close(t_perp, ROUND["T_perp_after"], tolerance)
    assert_close(after["emb"] - t_perp, ROUND["T_S_after"], tolerance)
    for when, parameters in [("before", anchor), ("after", after)]:
        for mode in ["full", "compressed"]:
            expected = ROUND["loss_on_batch_replica0_step0"][f"{when}_{mode}"]
            assert_close(_loss(parameters, mode, ROUND["data"][0][0]), expected, tolerance)


def _inner_phase(replica: int, mode: str, anchor: dict[str, Tensor]) -> dict[str, Tensor]:
    """H AdamW steps of one replica from the anchor; its parameters afterwards."""
    options, tolerance = ROUND["options"], ROUND["tol"]
    assert options["decayed"] == "all 2-D tensors except emb"
    assert options["grad_clip"] is None
    stages = _tiny_stages(anchor)
    link = _tiny_link(mode, anchor["emb"])
    local = parameters_of(stages)
    decayed = [item for item in local.items() if item[1].dim() == 2 and item[0] != "emb"]
    plain = [item for item in local.items() if item[1].dim() == 1 or item[0] == "emb"]
    optimizer = AdamW(
        [
            {"params": decayed, "weight_decay": options["weight_decay"]},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=options["lr"][0],
        betas=tuple(options["betas"]),
        eps=options["adam_eps"],
    )
    for step in range(options["H"]):
        for group in optimizer.param_groups:
            group["lr"] = options["lr"][step]
        tokens = torch.tensor(ROUND["data"][replica][step])
        optimizer.zero_grad()
        loss, _, _ = chain_step([[stage] for stage in stages], [link], tokens[:, :-1], tokens[:, 1:])
        assert_close(loss, ROUND["inner_losses"][replica][step], tolerance)
        optimizer.step()
    return dict(local)


def _loss(parameters: dict[str, Tensor], mode: str, nested_tokens: Any) -> Tensor:
    first, last = _tiny_stages(parameters)
    sender, receiver = _tiny_link(mode, parameters["emb"])
    tokens = torch.tensor(nested_tokens)
    ids = tokens[:, :-1]
    with torch.no_grad():
        x = receiver.expand_forward(sender.compress_forward(first(ids)), ids)
        return next_token_loss(last(x), tokens[:, 1:])
