"""docs/protocol/vectors: the production code makes them, and the pages alone are enough to compute them."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.vectors import FILES, FOLDER, text_of
from tests.hostile import arithmetic as page
from tests.hostile import wire
from tests.hostile.arithmetic import F32, Tensors

MOST_BYTES = 80_000


def vectors(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def array(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), "<f4").copy()


def shaped(tensors: dict[str, str], shapes: dict[str, Any]) -> Tensors:
    return {name: array(text).reshape(shapes[name.partition("/")[0]]) for name, text in tensors.items()}


def as_hex(tensors: Tensors) -> dict[str, str]:
    return {name: value.astype("<f4").tobytes().hex() for name, value in tensors.items()}


def cases(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", vectors(name)["cases"], ids=lambda case: case.get("name", ""))


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_what_the_production_code_computes(name: str) -> None:
    assert_close(json.loads(text_of(name)), vectors(name))


def assert_close(found: Any, expected: Any) -> None:
    """Equal, but for the last digits of decimal numbers, which differ between processors."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    else:
        assert found == expected


def test_the_files_stay_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MOST_BYTES


def test_identities() -> None:
    found = vectors("identities")
    key = wire.Identity(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(found["seed"])))
    invite, run = wire.Invite.parse(found["invite"]["text"]), found["run"]
    assert (key.peer, wire.tls_name(key.peer)) == (found["peer"], found["tls_name"])
    assert (invite.api, invite.enrollment) == (found["invite"]["api"], found["invite"]["enrollment"])
    spec_hash = hashlib.sha256(found["spec_json"].encode()).hexdigest()
    assert wire.run_id(json.loads(found["spec_json"])["preset"], spec_hash, invite.pin) == run
    descriptor = wire.message("PayloadDescriptor")(**found["descriptor"])
    signed = {
        "enrollment": wire.enrollment(invite.pin, invite.id, b"tls key"),
        "renewal": wire.renewal(invite.pin, b"tls key"),
        "specification": wire.spec(run, found["spec_json"]),
        "plan": wire.plan(run, b"plan"),
        "checkpoint": wire.state(run, b"record"),
        "descriptor": wire.descriptor(descriptor),
        "DHT record": wire.record(run, b"record", 1.5),
    }
    assert {what: key.key.sign(data).hex() for what, data in signed.items()} == found["signatures"]


@cases("parameters")
def test_parameters(case: dict[str, Any]) -> None:
    found = page.initial(case["model"], case["stages"], case["stage"], case["seed"])
    told = [
        [
            name,
            list(value.shape),
            value.ravel()[:3].tobytes().hex(),
            hashlib.sha256(value.tobytes()).hexdigest(),
        ]
        for name, value in found.items()
    ]
    assert told == case["tensors"]
    assert page.digest_of(found) == case["digest"]


def test_a_digest_of_two_chunks() -> None:
    case = vectors("parameters")["digest_of_two_chunks"]
    tensors = {name: np.full(shape, value, F32) for name, (shape, value) in case["tensors"].items()}
    assert page.digest_of(tensors) == case["digest"]


@cases("forward")
def test_forward(case: dict[str, Any]) -> None:
    file = vectors("forward")
    shapes = page.shapes_of(case["model"], 1, 0)
    parameters = {
        name: 8 * value.astype(float) for name, value in page.initial(case["model"], 1, 0, 1).items()
    }
    parameters |= {name: value.astype(float) for name, value in shaped(case["vectors"], shapes).items()}

    def logits_now() -> np.ndarray:
        return page.logits_of(parameters, case["model"], file["ids"], case.get("separator"))

    def loss() -> float:
        return page.loss_of(logits_now(), file["targets"])

    logits = logits_now()
    np.testing.assert_allclose(logits[-1], case["logits"], rtol=file["tol"], atol=1e-6)
    assert loss() == pytest.approx(case["loss"], rel=file["tol"])
    for name, expected in case["gradient_norms"].items():
        if parameters[name].ndim == 1:  # differences of the loss: one is enough to see a wrong gradient
            squares, values = 0.0, parameters[name]
            for i in range(values.size):
                ends = []
                for sign in (1, -1):
                    values[i] += sign * 1e-5
                    ends.append(loss())
                    values[i] -= sign * 1e-5
                squares += ((ends[0] - ends[1]) / 2e-5) ** 2
            assert math.sqrt(squares) == pytest.approx(expected, rel=1e-3, abs=1e-8)


def test_samples() -> None:
    file = vectors("samples")
    for order in file["orders"]:
        found = [[*page.window_of(n, order["size"], order["seed"])] for n in range(len(order["windows"]))]
        assert found == order["windows"]
    case = file["jsonl"]
    texts = [f"document {n}: {'abcdefgh' * (n % 3)}\n" for n in range(45)]
    held_out = [n for n in range(45) if page.is_held_out(n, 20)]
    assert held_out == case["held_out"]
    trained = page.windows_of([text for n, text in enumerate(texts) if n not in held_out], case["context"])
    for ordinal, window in case["samples"].items():
        _, at = page.window_of(int(ordinal), len(trained), case["seed"])
        assert trained[at].decode() == window
    kept = page.windows_of([texts[n] for n in held_out], case["context"])
    assert [kept[page.window_of(n, len(kept), 0)[1]].decode() for n in range(3)] == case["validation"]
    blocks = page.blocks_of("".join(f"line {n}\n" for n in range(1000)))
    assert [len(each) for each in blocks] == file["text"]["block_lengths"]
    streamed = file["streamed"]
    for number, order in enumerate(streamed["turns"]):
        assert [[*turn] for turn in page.turns_of(streamed["nbytes"], streamed["seed"], number)] == order
    mixture = file["mixture"]
    for n, sample in enumerate(mixture["samples"], mixture["first"]):
        assert [*page.sample_of(n, mixture["source"], mixture["past"], mixture["seed"])] == sample


def test_the_ordinals_of_a_plan() -> None:
    plan, start, found = vectors("samples")["plan"], 0, []
    start = plan["first_sample"]
    for number in range(plan["from_round"], plan["from_round"] + 2):
        for index, microbatches in plan["replicas"]:
            count = plan["steps"] * (microbatches or plan["microbatches"]) * plan["microbatch_size"]
            found.append([number, index, start, start + count])
            start += count
    assert found == plan["ranges"]


def test_inner_steps() -> None:
    file = vectors("inner_step")
    total, inner = file["total_steps"], file["inner"]
    assert [page.rate_of(inner, step, total) for step in range(total)] == pytest.approx(file["rates"])
    values, moments = shaped(file["parameters"], file["shapes"]), dict[str, Any]()
    for count, step in enumerate(file["steps"], 1):
        page.adamw(values, shaped(step["gradients"], file["shapes"]), moments, count, step["rate"], inner)
        for name, expected in step["after"].items():
            np.testing.assert_allclose(values[name], expected, rtol=file["tol"])


@pytest.mark.parametrize("case", vectors("payload")["cases"], ids=lambda case: case["codec"])
def test_payloads(case: dict[str, Any]) -> None:
    shapes, data = vectors("payload")["shapes"], bytes.fromhex(case["payload"])
    assert (page.codec_of(case["outer"]), len(data)) == (case["codec"], case["nbytes"])
    found = {name: np.zeros(math.prod(shape), F32) for name, shape in shapes.items()}
    for name, (indices, values, *_) in page.decode(shapes, case["outer"], data).items():
        found[name][indices] = values
    assert as_hex(found) == case["decoded"]


@cases("outer_step")
def test_outer_steps(case: dict[str, Any]) -> None:
    shapes, outer = vectors("outer_step")["shapes"], {"learning_rate": 1.0, **case["outer"]}
    committed = shaped(case["anchor"], shapes)
    if outer.get("optimizer") == "nesterov":
        committed |= {f"{name}/momentum": np.zeros_like(value) for name, value in committed.items()}
    for each in case["rounds"]:
        payloads = [page.decode(shapes, outer, bytes.fromhex(data)) for data in each["payloads"]]
        norms = [page.norm_of(payload) for payload in payloads]
        assert (norms, page.scales_of(norms, outer.get("clip", 8.0))) == (each["norms"], each["scales"])
        committed = page.outer_step(committed, payloads, case["weights"], outer)
        assert as_hex(committed) == each["after"]
        assert page.digest_of(committed) == each["digest"]


@pytest.mark.parametrize("case", vectors("outer_step")["projections"], ids=lambda case: f"k={case['k']}")
def test_projections(case: dict[str, Any]) -> None:
    basis = page.span_of(case["width"], case["k"], case["seed"])
    assert basis.tolist() == case["basis"]
    assert as_hex({"": page.projected(array(case["weight"]).reshape(case["width"], -1), basis)}) == {
        "": case["projected"]
    }


def test_error_feedback() -> None:
    file = vectors("error_feedback")
    shapes, outer = page.shapes_of(file["model"], 1, 0), {"learning_rate": 1.0, **file["outer"]}
    anchor = {name: np.zeros(shape, F32) for name, shape in shapes.items()}
    error: Tensors = dict(anchor)
    beta = F32(outer["error_decay"])
    for step in file["steps"]:
        assert as_hex(error) == step["error_before"]
        local = shaped(step["local_before"], shapes)
        own = page.decode(shapes, outer, bytes.fromhex(step["payload"]))
        learned = {name: beta * error[name] + (anchor[name] - local[name]) for name in anchor}
        sent = {name: np.zeros(value.size, F32) for name, value in anchor.items()}
        for name, (indices, values, *_) in own.items():
            sent[name][indices] = values
            most = np.abs(learned[name].ravel())
            assert all(value in learned[name].ravel() for value in values)
            assert np.abs(values).max() == most.max()
        if step["what"] != "abort":
            others = [page.decode(shapes, outer, bytes.fromhex(data)) for data in step["others"]]
            payloads = [own, *others] if step["what"] == "commit" else others
            moved = page.outer_step(anchor, payloads, [1.0] * len(payloads), outer)
            if step["what"] == "commit":
                share = F32(1 - page.scales_of([page.norm_of(each) for each in payloads], 8.0)[0])
                for name, value in sent.items():
                    pending = learned[name].ravel() - value
                    error[name] = (pending + share * value).reshape(shapes[name])
                local = dict(moved)
            else:
                local = {name: local[name] + (moved[name] - anchor[name]) for name in anchor}
            anchor = moved
        for kind, tensors in (("anchor", anchor), ("local", local), ("error", error)):
            assert as_hex(tensors) == step[kind], f"{kind} after {step['what']}"


def test_links() -> None:
    file = vectors("links")
    basis = page.basis_of(file["basis"]["width"], file["basis"]["seed"])
    np.testing.assert_allclose(basis, file["basis"]["columns"], rtol=1e-5)
    u, table = basis[:, : file["table"]["k"]], array(file["table"]["table"]).reshape(3, 4)
    np.testing.assert_allclose(table - table @ u @ u.T, file["table"]["perpendicular"], atol=1e-5)
    for *frame, shift in file["shifts"]:
        assert page.shift_of(frame) == shift
    for each in file["formats"]:
        expected = [math.nan if value is None else value for value in each["decoded"]]
        found = page.unpacked(each["dtype"], bytes.fromhex(each["bytes"]), file["shape"], file["frame"])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    snapshot = file["snapshot"]
    header = b'{"dtype":"bf16","tensors":[["snapshot",[3,4]]]}\n'
    data = bytes.fromhex(snapshot["bytes"])
    assert hashlib.sha256(header + hashlib.sha256(data).digest()).hexdigest() == snapshot["digest"]
    np.testing.assert_allclose(page.unpacked("bf16", data, (3, 4), ()), array(snapshot["table"]), rtol=2**-8)
