"""A matrix file becomes trials, whose keys depend only on what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from node.data.tokenizer import check_tokenizer, load_tokenizer
from node.experiment.matrix import (
    MatrixFile,
    MatrixRow,
    build_matrix,
    fraction_of,
    read_matrix_file,
    tokenizers_of,
)
from node.experiment.runner import tokenizer_path, train_tokenizers
from node.experiment.tokenizers import tokenizer_file, train_bpe
from node.experiment.trial import Mode, Planned, Trial, trial_in_mode
from node.experiment.variation import Variation
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from tests.support.experiment_results import MATRIX, matrix_of, result_of
from tests.support.paths import ROOT

REPRODUCTION = ROOT / "benchmarks" / "reproduction"


def nano(**overrides: Any) -> RunSpec:
    return resolve("nano", overrides=overrides)


def test_a_mode_says_which_replicas_there_are() -> None:
    shapes = {
        (mode, fraction): (trial.spec.swarm.replicas, trial.spec.swarm.pipelines)
        for mode, fraction in [
            (Mode.SPARSELOCO, None),
            (Mode.UNIFORM, None),
            (Mode.HETEROGENEOUS, None),
            (Mode.HETEROGENEOUS, 0.25),
            (Mode.DATA_PARALLEL, None),
            (Mode.DATA_PARALLEL, 0.5),
        ]
        for trial in [trial_in_mode(nano(), mode, 4, fraction)]
    }
    assert list(shapes.values()) == [(4, 0), (0, 4), (2, 2), (1, 3), (4, 0), (2, 2)]


def test_data_parallel_training_has_as_many_steps_in_rounds_of_one() -> None:
    usual = nano(**{"outer.overlap": 1, "outer.merge": "radial"})
    trial = trial_in_mode(usual, Mode.DATA_PARALLEL, 4)
    assert trial.spec.total_steps == usual.total_steps == trial.spec.rounds
    assert (trial.spec.inner.steps, trial.spec.outer.dense, trial.spec.outer.overlap) == (1, True, 0)
    assert trial.spec.outer.merge == "mean", "replicas with equal gradients send equal payloads"
    assert trial.variation.average_gradients


@pytest.mark.parametrize(
    ("mode", "fraction"),
    [(Mode.UNIFORM, 0.5), (Mode.HETEROGENEOUS, 0.3), (Mode.HETEROGENEOUS, 1.0), (Mode.SPARSELOCO, 1.0)],
)
def test_a_fraction_that_a_mode_cannot_have_is_refused(mode: Mode, fraction: float) -> None:
    with pytest.raises(ValueError, match="replicas"):
        trial_in_mode(nano(), mode, 4, fraction)


def test_the_key_follows_what_is_computed_and_nothing_else() -> None:
    trial = Trial(nano())
    assert trial.key == Trial(nano(), Variation()).key
    others = [Trial(nano(seed=1)), Trial(nano(**{"link.k": 4})), Trial(nano(), Variation(full_weight=2))]
    assert len({trial.key, *(other.key for other in others)}) == 4


def test_key_and_line_know_a_tokenizer_by_its_hash_and_no_absolute_path(tmp_path: Path) -> None:
    def trial(folder: str, sha256: str) -> Trial:
        data = {"data.tokenizer": f"{folder}/bpe.json", "data.tokenizer_sha256": sha256}
        return Trial(nano(**data, **{"data.source": f"text:{tmp_path}/corpus.txt"}))

    here, there, other = trial("/a", "1" * 64), trial("/b", "1" * 64), trial("/a", "2" * 64)
    assert here.key == there.key != other.key
    line = result_of(Planned(here, "here", Mode.UNIFORM, 1), 1.0).line
    assert "/a" not in line
    assert str(tmp_path) not in line
    again = Trial(RunSpec.from_json(json.dumps(json.loads(line)["spec"])))
    assert again.key == here.key


@pytest.mark.parametrize("name", ["bpe-1024", "bpe.v2"])
def test_the_name_of_a_tokenizer_in_a_line_is_the_same_when_it_is_read_again(name: str) -> None:
    data = {"data.tokenizer": f"/a/{name}.json", "data.tokenizer_sha256": "1" * 64}
    trial = Trial(nano(**data))
    assert trial.portable_spec["data"]["tokenizer"] == name
    assert Trial(RunSpec.from_json(json.dumps(trial.portable_spec))).key == trial.key


def test_an_experiment_starts_from_the_seed() -> None:
    imported = nano(initial=["0" * 64] * nano().swarm.stages)
    with pytest.raises(ValueError, match="an experiment starts from the seed"):
        trial_in_mode(imported, Mode.SPARSELOCO, 2)


@pytest.mark.parametrize(
    ("mode", "changes", "words"),
    [
        (Mode.UNIFORM, {"replicas_by_round": [[1, 3]]}, "more replicas"),
        (Mode.SPARSELOCO, {"grassmann_every": 1}, "need links"),
    ],
)
def test_a_variation_that_the_replicas_cannot_have_is_refused(
    mode: Mode, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        trial_in_mode(nano(), mode, 2, changes=changes)


@pytest.mark.parametrize("change", [{"weight_projection": True}, {"grassmann_every": 1}])
def test_what_follows_compressed_links_needs_some(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="need links"):
        trial_in_mode(nano(**{"link.k": 0}), Mode.UNIFORM, 2, changes=change)


def test_a_basis_onto_which_outputs_are_projected_stays() -> None:
    with pytest.raises(ValueError, match="grassmann_every changes the basis"):
        trial_in_mode(nano(**{"inner.optimizer": "muon"}), Mode.UNIFORM, 2, changes={"grassmann_every": 1})


def test_a_trial_in_several_tables_is_run_once_and_seeds_go_one_after_the_other(tmp_path: Path) -> None:
    matrix = matrix_of(tmp_path)
    assert [(planned.name, planned.seed) for planned in matrix.trials] == [
        (name, seed) for seed in (0, 1) for name in ("sparseloco", "uniform 1/4", "uniform 1/8", "frozen")
    ]
    wide = matrix.tables[0].row("uniform 1/4")
    assert wide.trials[0].trial == matrix.tables[1].row("uniform").trials[0].trial
    assert (wide.k, matrix.tables[0].row("sparseloco").k) == (8, None)


def test_data_parallel_rows_have_their_own_fields_of_the_spec(tmp_path: Path) -> None:
    own = "data_parallel = { inner.learning_rate = 0.5, inner.clip_norm = 2.0 }\n[[table]]"
    rows = (
        '\n[[table.row]]\nname = "base"\nmode = "data-parallel"\n'
        '\n[[table.row]]\nname = "slow"\nmode = "data-parallel"\nspec = { inner.learning_rate = 0.1 }\n'
    )
    table = matrix_of(tmp_path, MATRIX.replace("[[table]]", own, 1) + rows).tables[-1]
    inner = {row.name: row.trials[0].trial.spec.inner for row in table.rows}
    assert {name: inner[name].learning_rate for name in ("base", "slow")} == {"base": 0.5, "slow": 0.1}
    assert [inner[name].clip_norm for name in ("base", "slow", "frozen")] == [2.0, 2.0, 1.0]
    assert inner["frozen"].learning_rate == nano().inner.learning_rate


def test_a_matrix_may_be_narrowed_to_tables_and_seeds(tmp_path: Path) -> None:
    matrix = matrix_of(tmp_path)
    assert [planned.name for planned in matrix.narrowed(["ablation"], [1]).trials] == ["uniform", "frozen"]
    with pytest.raises(HetnodeError, match=r"--table one of: orderings, ablation") as caught:
        matrix.narrowed(["table-9"], [])
    assert caught.value.code is ErrorCode.BAD_OPTION


def test_k_over_d_reads_as_people_write_it() -> None:
    assert [fraction_of(k, 128) for k in (0, 16, 2, 62, 128)] == ["1", "1/8", "1/64", "62/128", "1"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("replicas = 2", "replicas = 2\nrounds = 3"), ["rounds"]),
        (("[[table.row]]", "[[table.row]]\nwidth = 3"), ["table.0.row.0.width"]),
        (('preset = "nano"', 'preset = "giant"'), ["giant"]),
        (("k = [8, 4]", "k = [8, 64]"), ["orderings", "uniform", "link.k 64"]),
        (("adaptation = false", "adaption = false"), ["ablation", "frozen", "variation.adaption"]),
        (('mode = "sparseloco"', 'mode = "sparseloco"\nk = 8'), ["sparseloco", "no replica has links"]),
        (('mode = "sparseloco"', 'mode = "sparseloco"\nfraction = 0.5'), ["sparseloco", "fraction"]),
        (('mode = "sparseloco"', 'mode = "dense"'), ["table.0.row.0.mode"]),
        (('baseline = "uniform"', 'baseline = "best"'), ["ablation", "'best'"]),
        (('name = "frozen"', 'name = "uniform"'), ["ablation", "two rows"]),
        (('name = "ablation"', 'name = "orderings"'), ["two tables"]),
        (('name = "frozen"', 'name = "frozen"\ntokenizer = "bpe"'), ["frozen", "[tokenizers.bpe]"]),
        (
            (
                "[[table]]",
                "[tokenizers.bpe]\nvocabulary = 300\n[[table]]\n"
                'tokenizer = "bpe"\nspec = { data.source = "text:other" }',
            ),
            ["tokenizer 'bpe'", "data.source"],
        ),
        (("adaptation = false", "basis_every = 2"), ["ablation", "frozen", "basis_every"]),
        (("adaptation = false", "k_by_round = [[1, 40]]"), ["frozen", "k_by_round"]),
        (("inner.microbatches = 1", "inner.micro = 1"), ["inner.micro"]),
        (("seeds = [0, 1]", "seeds = [0, 1"), ["matrix.toml"]),
    ],
)
def test_what_is_wrong_with_a_matrix_is_named(
    tmp_path: Path, change: tuple[str, str], words: list[str]
) -> None:
    with pytest.raises(HetnodeError) as caught:
        matrix_of(tmp_path, MATRIX.replace(*change, 1 if "[tokenizers" in change[1] else -1))
    assert caught.value.code in (ErrorCode.BAD_MATRIX, ErrorCode.UNKNOWN_PRESET)
    assert all(word in caught.value.cause for word in words), caught.value.cause


@pytest.mark.parametrize("file", sorted(REPRODUCTION.glob("*.toml")), ids=lambda file: file.stem)
def test_the_matrices_of_the_project_are_valid_and_all_their_trials_differ(file: Path) -> None:
    matrix = build_matrix(file, read_matrix_file(file), {})
    assert matrix.trials
    assert all(len(row.trials) == len(matrix.seeds) for table in matrix.tables for row in table.rows)


@pytest.mark.parametrize("file", sorted(REPRODUCTION.glob("*.toml")), ids=lambda file: file.stem)
def test_what_goes_beyond_the_paper_sends_no_more_than_what_it_is_compared_with(file: Path) -> None:
    for table in build_matrix(file, read_matrix_file(file), {}).tables:
        if table.name.startswith("beyond"):
            for row in table.rows:
                assert token_bytes(row) <= token_bytes(table.row(row.baseline)), (table.name, row.name)


def test_links_that_are_compared_with_bf16_send_no_more_bytes() -> None:
    file = REPRODUCTION / "dithered.toml"
    for table in build_matrix(file, read_matrix_file(file), {}).tables:
        [bf16] = [row for row in table.rows if row.name.startswith("bf16")]
        for row in table.rows:
            if row.name != "no links":
                assert token_bytes(row) <= token_bytes(bf16), (table.name, row.name)


def token_bytes(row: MatrixRow) -> int:
    """Bytes of a token over one link, there and back."""
    link = next(iter(row.trials.values())).trial.spec.link
    return sum(link.token_bytes(link.k))


def with_tokenizer(folder: Path, vocabulary: int = 300, corpus: str = "corpus.txt") -> MatrixFile:
    """The matrix, where one row has a tokenizer that is trained on a file in `folder`."""
    text = "\n".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(2000))
    (folder / corpus).write_text(text, encoding="utf-8")
    matrix = (
        MATRIX.replace("replicas = 2", f"replicas = 2\ntokenizers.bpe.vocabulary = {vocabulary}")
        .replace("inner.microbatches = 1", f'inner.microbatches = 1, data.source = "text:{folder / corpus}"')
        .replace('name = "frozen"', 'name = "frozen"\ntokenizer = "bpe"')
    )
    (folder / "matrix.toml").write_text(matrix)
    return read_matrix_file(folder / "matrix.toml")


@pytest.mark.parametrize("change", [{"vocabulary": 310}, {"corpus": "other.txt"}])
def test_another_vocabulary_or_source_is_another_tokenizer(tmp_path: Path, change: dict[str, Any]) -> None:
    before = with_tokenizer(tmp_path)
    old = train_tokenizers(before, tmp_path)
    planned = build_matrix(tmp_path, before, old).tables[1].row("frozen").trials[0]
    results = [result_of(planned, 2.0)]
    assert tokenizers_of(before, results).keys() == {"bpe"}
    after = with_tokenizer(tmp_path, **change)
    assert tokenizers_of(after, results) == {}
    new = train_tokenizers(after, tmp_path)["bpe"]
    assert new.vocabulary == change.get("vocabulary", 300)
    assert new.path != old["bpe"].path
    assert old["bpe"].path.exists()


def test_a_text_that_does_not_give_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HetnodeError, match="bpe needs 60000 ids") as caught:
        train_tokenizers(with_tokenizer(tmp_path, 60_000), tmp_path)
    assert caught.value.code is ErrorCode.BAD_MATRIX


def test_only_the_tokenizers_of_the_chosen_tables_are_trained(tmp_path: Path) -> None:
    read = with_tokenizer(tmp_path)
    assert train_tokenizers(read, tmp_path, ["orderings"]) == {}
    assert train_tokenizers(read, tmp_path, ["ablation"]).keys() == {"bpe"}
    assert train_tokenizers(read, tmp_path, ["orderings"]).keys() == {"bpe"}


def test_a_tokenizer_is_the_same_whenever_it_is_trained_and_pinned_by_its_hash(tmp_path: Path) -> None:
    read, file, corpus = with_tokenizer(tmp_path), tmp_path / "matrix.toml", tmp_path / "corpus.txt"
    found = train_tokenizers(read, tmp_path)
    assert (
        found["bpe"]
        == tokenizer_file(tokenizer_path(tmp_path, read, "bpe"))
        == train_tokenizers(read, tmp_path)["bpe"]
    )
    again = train_bpe(tmp_path / "again.json", 300, f"text:{corpus}", "text")
    assert (again.sha256, again.vocabulary) == (found["bpe"].sha256, 300)
    planned = build_matrix(file, read, found).tables[1].row("frozen").trials[0]
    assert planned.trial.spec.model.vocabulary == 300
    assert load_tokenizer(planned.trial.spec.data).sha256 == found["bpe"].sha256
    # Who only has the results knows the trials all the same.
    known = tokenizers_of(read, [result_of(planned, 2.0)])
    assert build_matrix(file, read, known).tables[1].row("frozen").trials[0].trial.key == planned.trial.key
    assert build_matrix(file, read, {}).tables[1].row("frozen").trials[0].trial.key != planned.trial.key


def test_a_tokenizer_of_the_matrix_tells_where_documents_end(tmp_path: Path) -> None:
    with_tokenizer(tmp_path)
    file = tmp_path / "matrix.toml"
    named = 'tokenizer = "bpe"'
    file.write_text(file.read_text().replace(named, f'{named}\nspec.data.pack = "documents"'))
    read = read_matrix_file(file)
    found = train_tokenizers(read, tmp_path)
    spec = build_matrix(tmp_path, read, found).tables[1].row("frozen").trials[0].trial.spec
    assert check_tokenizer(spec).separator.tolist() == [spec.data.separator]
