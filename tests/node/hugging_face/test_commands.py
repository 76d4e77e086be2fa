"""The commands import, export and evaluate together, and a swarm that starts from an import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel

from node.checkpoint import global_model
from node.data.tokenizer import check_tokenizer
from node.experiment.evaluate import Evaluation, ForwardMode, evaluate
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve, to_toml
from tests.support.hugging_face import imported, output_of


def test_the_tokenizer_of_the_folder_is_the_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = WordLevel({"[UNK]": 0, "def": 1}, unk_token="[UNK]")
    RawTokenizer(words).save(str(folder / "tokenizer.json"))
    output_of("import", "hf", "--out", "new", "--preset", "nano")
    spec = resolve(file=Path("new/run.toml"))
    assert spec.data.tokenizer == "tokenizer.json"
    assert spec.data.tokenizer_sha256 == check_tokenizer(spec, "new/tokenizer.json").sha256
    output_of("import", "hf", "--out", "bytes", "--preset", "nano", "--set", "data.tokenizer=byte")
    assert resolve(file=Path("bytes/run.toml")).data.tokenizer == "byte"
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").unlink()
    with pytest.raises(HetnodeError, match=r"data\.tokenizer") as caught:
        output_of("import", "hf", "--out", "none", "--preset", "nano")
    assert caught.value.code is ErrorCode.TOKENIZER_UNREADABLE


def test_the_commands_work_together(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = run.parent
    events = [
        {"event": "measurement", "round": 3, "replica": 0, "complete": True, "validation_loss": 2.125}
        | {"tokens": 777, "link_bytes_sent": 0, "link_bytes_dense": 0}
        | {"payload_bytes": 0, "payload_bytes_dense": 0}
    ]
    (place / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    output_of("export", place, "hf", "--shard-size", "0.1MB")
    assert output_of("generate", "hf", "--tokens", "2").startswith("def ")
    card = Path("hf/README.md").read_text()
    assert "| 0 | 2.1250 |" in card
    assert "| tokens seen | 777 |" in card
    assert "--config new/run.toml" in output_of(
        "import", "hf", "--out", "new", "--preset", "nano", "--set", "link.k=4"
    )
    found = [
        json.loads(output_of("eval", model, "--batches", "8", "--json")) for model in (place, "hf", "new")
    ]
    assert found[0]["loss"] == found[2]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    assert (found[0]["tokens"], found[0]["mode"]) == (8 * 2 * 64, "uncompressed")
    assert "bits per byte" in output_of("eval", "new", "--batches", "1", "--mode", "compressed")


def test_what_is_no_number_is_null_in_json(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.experiment.evaluate.evaluate", lambda *_: Evaluation(1e9, 5, 0))
    found = json.loads(output_of("eval", run, "--json"))
    assert (found["loss"], found["perplexity"], found["bits_per_byte"]) == (1e9, None, None)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("export", "{run}", "x", "--dtype", "int3"), ErrorCode.BAD_OPTION, "int3"),
        (("export", "{run}", "x", "--shard-size", "big"), ErrorCode.BAD_OPTION, "big"),
        (("import", "{hf}", "--out", "x", "--preset", "178m"), ErrorCode.BAD_SPEC, "Give --set link.k"),
        (("export", ".", "x"), ErrorCode.CHECKPOINT_MISSING, "no checkpoint"),
        (("import", ".", "--out", "x"), ErrorCode.UNSUPPORTED_MODEL, "config.json"),
        (("import", ".", "--out", "{run}"), ErrorCode.BAD_OPTION, "not empty"),
        (
            ("import", ".", "--out", "x", "--config", "given.toml", "--set", "link.k=8"),
            ErrorCode.BAD_OPTION,
            "settled",
        ),
        (("eval", "{run}", "--split", "some"), ErrorCode.BAD_OPTION, "held-out, all"),
        (("eval", "{run}", "--mode", "some"), ErrorCode.BAD_OPTION, "compressed"),
        (("swarm", "up", "--config", "given.toml"), ErrorCode.CHECKPOINT_MISSING, "no checkpoint"),
    ],
)
def test_wrong_options_are_refused_in_words(
    run: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: ErrorCode,
    word: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("given.toml").write_text(to_toml(resolve("nano", overrides={"initial": ["0" * 64, "1" * 64]})))
    with pytest.raises(HetnodeError, match=word) as caught:
        output_of(*(argument.format(run=run, hf=folder) for argument in arguments))
    assert caught.value.code is code
    assert not Path("x").exists()


def test_data_that_may_have_no_end_needs_a_number_of_batches(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.experiment.evaluate.is_streamed", lambda _: True)
    with pytest.raises(HetnodeError, match="--batches") as caught:
        output_of("eval", run)
    assert caught.value.code is ErrorCode.BAD_OPTION


@pytest.mark.slow
@pytest.mark.swarm
def test_a_real_swarm_starts_at_the_imported_models_loss(folder: Path, tmp_path: Path) -> None:
    spec = imported(folder, tmp_path / "new", rounds=2)
    command = [sys.executable, "-m", "node", "swarm", "up", "--config", "new/run.toml", "--folder", "swarm"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr
    events = map(json.loads, (tmp_path / "swarm" / "metrics.jsonl").read_text().splitlines())
    began = {
        event["replica"]: event["validation_loss"]
        for event in events
        if event["event"] == "measurement" and event["complete"] and event["round"] == 0
    }
    model = global_model.read(tmp_path / "new" / "checkpoint")
    for replica, mode in enumerate((ForwardMode.UNCOMPRESSED, ForwardMode.COMPRESSED)):
        found = evaluate(model, "builtin", mode=mode, batches=spec.data.validation_batches)
        assert began[replica] == pytest.approx(found.loss, rel=1e-5)
