"""Every source keeps one contract: equal ordinals give equal samples, each epoch has every window once."""

from __future__ import annotations

import gzip
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import tokenizers

from node.data.hub import Shard
from node.data.sources import Document, open_source
from node.data.stream import SampleStream, open_stream
from node.data.streamed import Samples
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

CONTEXT = 31
LINES_PER_DOCUMENT = 8
DOCUMENTS = 130
REAL_PATH = sysconfig.get_path


def _document(number: int) -> str:
    lines = range(number * LINES_PER_DOCUMENT, (number + 1) * LINES_PER_DOCUMENT)
    return "".join(f"<{line:06d}>\n" for line in lines)


def _builtin(folder: Path) -> str:
    for number in range(DOCUMENTS):
        path = folder / f"package{number % 7}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(_document(number))
    return "builtin"


def _text_file(folder: Path) -> str:
    (folder / "corpus.txt").write_text("".join(map(_document, range(DOCUMENTS))))
    return f"text:{folder / 'corpus.txt'}"


def _text_folder(folder: Path) -> str:
    for number in range(DOCUMENTS):
        (folder / f"{number:03d}.txt").write_text(_document(number))
    return f"text:{folder}"


def _records(numbers: range) -> str:
    return "".join(json.dumps({"text": _document(n), "other": n}) + "\n" for n in numbers)


def _jsonl_file(folder: Path) -> str:
    (folder / "corpus.jsonl").write_text(_records(range(DOCUMENTS)))
    return f"jsonl:{folder / 'corpus.jsonl'}"


def _hf_jsonl(folder: Path) -> str:
    (folder / "a.jsonl").write_text(_records(range(70)))
    (folder / "b.jsonl").write_text(_records(range(70, DOCUMENTS)))
    return f"hf:{folder}"


def _hf_parquet(folder: Path) -> str:
    import pyarrow.parquet  # noqa: PLC0415  collecting the tests needs none of it

    table = pyarrow.table({"text": [_document(n) for n in range(DOCUMENTS)]})
    pyarrow.parquet.write_table(table, folder / "corpus.parquet", row_group_size=50)
    return f"hf:{folder}"


SOURCES = {
    "builtin": _builtin,
    "text file": _text_file,
    "text folder": _text_folder,
    "jsonl": _jsonl_file,
    "hf jsonl": _hf_jsonl,
    "hf parquet": _hf_parquet,
}


def _spec(source: str, **overrides: Any) -> RunSpec:
    return resolve("nano", overrides={"data.source": source, "model.context": CONTEXT, **overrides})


@pytest.fixture(scope="module", autouse=True)
def _caches_stay_in_a_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=list(SOURCES))
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunSpec]:
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "builtin":
            patch.setattr(sysconfig, "get_path", lambda name: str(folder))
        yield _spec(SOURCES[request.param](folder))


@pytest.fixture(scope="module")
def stream(spec: RunSpec) -> SampleStream:
    return open_stream(spec)


def _text(windows: Samples) -> list[str]:
    return [bytes(window.astype(np.uint8)).decode() for window in windows]


def _lines(windows: Samples) -> set[int]:
    """Numbers of the lines that stand whole in one of the windows."""
    return {int(number) for window in _text(windows) for number in re.findall(r"<(\d{6})>", window)}


def _windows_of(documents: Iterator[Document], held_out: bool) -> set[str]:
    text = "".join(document.text + "\n" for document in documents if document.held_out is held_out)
    return {text[i : i + CONTEXT + 1] for i in range(0, len(text) - CONTEXT, CONTEXT)}


def test_samples_are_int32_windows_of_one_token_more_than_the_context(stream: SampleStream) -> None:
    for windows in (stream.read(range(5)), stream.validation(5)):
        assert windows.shape == (5, CONTEXT + 1)
        assert windows.dtype == np.int32
    assert stream.read([]).shape == (0, CONTEXT + 1)


def test_equal_ordinals_give_equal_samples_in_any_order(stream: SampleStream) -> None:
    windows = stream.read(range(40))
    for ordinals in ([7, 3, 3, 39], range(12, 20), [0], [39], [38], range(40)):
        np.testing.assert_array_equal(stream.read(ordinals), windows[list(ordinals)])


def test_a_fresh_stream_resumes_where_another_left_off(spec: RunSpec, stream: SampleStream) -> None:
    expected = stream.read(range(110))[100:]
    np.testing.assert_array_equal(open_stream(spec).read(range(100, 110)), expected)


def test_validation_is_fixed_and_undisturbed_by_training(stream: SampleStream) -> None:
    first = stream.validation(4)
    stream.read(range(50))
    np.testing.assert_array_equal(stream.validation(4), first)
    np.testing.assert_array_equal(stream.validation(2), first[:2])


def test_validation_text_never_appears_in_training_samples(stream: SampleStream) -> None:
    trained, held_out = _lines(stream.read(range(1200))), _lines(stream.validation(200))
    assert held_out
    assert trained
    assert not trained & held_out


def test_each_epoch_gives_every_window_of_its_documents_once(spec: RunSpec, stream: SampleStream) -> None:
    source = open_source(spec.data.source, spec.data.text_field)
    held_out = _windows_of(source.documents(), True)
    assert set(_text(stream.validation(len(held_out)))) == held_out
    training = _windows_of(source.documents(), False)
    windows = _text(stream.read(range(2 * len(training))))
    assert set(windows[: len(training)]) == set(windows[len(training) :]) == training


@pytest.mark.parametrize("counts", [[300, 310, 305, 297], [20, 900, 3, 150]], ids=["equal", "uneven"])
def test_an_epoch_over_several_files_has_every_window_once_and_shuffled(
    tmp_path: Path, counts: list[int]
) -> None:
    first = 0
    for number, count in enumerate(counts):
        (tmp_path / f"{number}.jsonl").write_text(_records(range(first, first + count)))
        first += count
    spec = _spec(f"hf:{tmp_path}")
    training = _windows_of(open_source(spec.data.source, "text").documents(), False)
    windows = _text(open_stream(spec).read(range(2 * len(training))))
    epochs = windows[: len(training)], windows[len(training) :]
    assert [Counter(epoch) for epoch in epochs] == [Counter(training)] * 2
    assert epochs[0] != epochs[1]
    lines = [int(found[1]) for found in (re.search(r"<(\d{6})>", window) for window in windows) if found]
    distances = [abs(one - other) for one, other in pairwise(lines)]
    assert median(distances) > first * LINES_PER_DOCUMENT / 10, "neighbours are not of one place"
    resumed = open_stream(spec).read(range(len(training) - 5, len(training) + 5))
    assert _text(resumed) == windows[len(training) - 5 : len(training) + 5]


def test_a_source_that_expands_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(_records(range(1)).encode() * 20_000))
    monkeypatch.setattr("node.data.stream.LARGE", 2**17)
    error = _failure(f"hf:{tmp_path}")
    assert error.code is ErrorCode.DATA_UNREADABLE
    assert "expand" in error.cause


def test_negative_ordinals_are_refused(stream: SampleStream) -> None:
    with pytest.raises(ValueError, match="ordinal -1"):
        stream.read([-1])


def test_loaded_windows_are_visited_out_of_their_order(tmp_path: Path) -> None:
    windows = _text(open_stream(_spec(_jsonl_file(tmp_path))).read(range(20)))
    assert windows != sorted(windows)


def test_another_seed_shuffles_training_but_not_validation(tmp_path: Path) -> None:
    source = _text_file(tmp_path)
    one, two = open_stream(_spec(source, seed=1)), open_stream(_spec(source, seed=2))
    assert (one.read(range(20)) != two.read(range(20))).any()
    np.testing.assert_array_equal(one.validation(5), two.validation(5))


def test_a_node_may_keep_the_data_elsewhere(tmp_path: Path) -> None:
    here = open_stream(_spec("text:/not/on/this/node.txt"), own=[_text_file(tmp_path)])
    there = open_stream(_spec(_text_file(tmp_path)))
    np.testing.assert_array_equal(here.read(range(10)), there.read(range(10)))


@pytest.mark.parametrize("kind", ["text", "hf"])
def test_a_tokenizer_file_fills_the_windows_with_its_ids(tmp_path: Path, kind: str) -> None:
    words = {f"<{line:06d}>": line for line in range(DOCUMENTS * LINES_PER_DOCUMENT)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({**words, "</s>": len(words)}, unk_token="</s>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "corpus").mkdir()
    source = {"text": _text_folder, "hf": _hf_parquet}[kind](tmp_path / "corpus")
    overrides = {
        "model.vocabulary": 2000,
        "model.context": 8,
        "data.tokenizer": str(tmp_path / "tokenizer.json"),
    }
    windows = open_stream(_spec(source, **overrides)).read(range(20))
    within = windows[:, 1:] == windows[:, :-1] + 1
    ends = windows == len(words)
    assert ends.any()
    assert (within | ends[:, 1:] | ends[:, :-1]).all()


def test_the_real_library_is_a_corpus_without_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", REAL_PATH)  # the fixture of the module may be in use
    library = Path(sysconfig.get_path("stdlib"))
    documents = list(open_source("builtin", "text").documents())
    texts = {document.text for document in documents}
    assert (library / "argparse.py").read_text(encoding="utf-8") in texts
    assert sum(map(len, texts)) > 5_000_000
    assert 0.02 < sum(document.held_out for document in documents) / len(documents) < 0.1
    samples = open_stream(resolve("tiny")).read(range(8))
    assert samples.shape == (8, 129)


def test_the_library_skips_tests_packages_and_what_is_not_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for skipped in ("test", "site-packages", "dist-packages", "unittest/tests", "idlelib/idle_test"):
        (tmp_path / skipped).mkdir(parents=True)
        (tmp_path / skipped / "module.py").write_text("skipped")
    (tmp_path / "broken.py").write_bytes(b"\xff\xff")
    (tmp_path / "notes.txt").write_text("skipped")
    (tmp_path / "unittest" / "kept.py").write_text("kept")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert [document.text for document in open_source("builtin", "text").documents()] == ["kept"]


def test_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"line {i} {'x' * (i % 90)}\n" for i in range(5000)) + "y" * 200_000
    (tmp_path / "a.txt").write_text(text)
    blocks = [document.text for document in open_source(f"text:{tmp_path}", "text").documents()]
    assert "".join(blocks) == text
    assert sum(not block.endswith("\n") for block in blocks) == sum("y" in block for block in blocks)


def _failure(source: str, **overrides: Any) -> HetnodeError:
    with pytest.raises(HetnodeError) as caught:
        open_stream(_spec(source, **overrides))
    return caught.value


@pytest.mark.parametrize("kind", ["text", "jsonl", "hf"])
@pytest.mark.parametrize("path", ["/no/such/place", "./no/such/place", "~nobody-at-all/file"])
def test_a_missing_path_is_unreadable_and_named(kind: str, path: str) -> None:
    error = _failure(f"{kind}:{path}")
    assert error.code is ErrorCode.DATA_UNREADABLE
    assert path.removeprefix("./") in error.cause
    assert error.remedy


@pytest.mark.parametrize("kind", ["text", "jsonl", "hf"])
def test_an_empty_folder_is_unreadable(tmp_path: Path, kind: str) -> None:
    error = _failure(f"{kind}:{tmp_path}")
    assert error.code is ErrorCode.DATA_UNREADABLE
    assert str(tmp_path) in error.cause


def test_text_that_is_not_utf8_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    error = _failure(f"text:{tmp_path}")
    assert error.code is ErrorCode.DATA_UNREADABLE
    assert "latin.txt" in error.cause


@pytest.mark.parametrize(
    "line",
    [b'{"text": "cut', b'{"body": "other key"}', b'{"text": 5}', b"[]", b'"text"', b"\xff", b"[" * 100_000],
)
def test_a_bad_json_line_is_named_by_file_and_line(tmp_path: Path, line: bytes) -> None:
    good = json.dumps({"text": "fine " * 100}).encode()
    (tmp_path / "corpus.jsonl").write_bytes(b"\n".join([good, b"", good, line, good]))
    error = _failure(f"jsonl:{tmp_path}")
    assert error.code is ErrorCode.DATA_UNREADABLE
    assert "corpus.jsonl, line 4" in error.cause


def test_the_text_may_stand_under_another_key(tmp_path: Path) -> None:
    record = json.dumps({"body": "some text " * 20}) + "\n"
    (tmp_path / "corpus.jsonl").write_text(record * 4)
    for source in (f"jsonl:{tmp_path}", f"hf:{tmp_path}"):
        assert open_stream(_spec(source, **{"data.text_field": "body"})).read([0]).shape == (1, CONTEXT + 1)
        assert _failure(source).code is ErrorCode.DATA_UNREADABLE


def test_a_lone_surrogate_in_json_is_read_as_a_question_mark(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "' + "a\\ud800" * 40 + '"}\n' + _records(range(4)))
    assert "a?a?" in "".join(_text(open_stream(_spec(f"jsonl:{tmp_path}")).read(range(30))))


@pytest.mark.parametrize("name", ["owner/name", "name", "owner/name/config"])
def test_the_hub_out_of_reach_is_unreadable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    error = _failure(f"hf:no-such-{name}")
    assert error.code is ErrorCode.DATA_UNREADABLE
    assert f"no-such-{name}" in error.cause
    assert "text:PATH" in error.remedy


@pytest.mark.parametrize("name", ["a/b/c/d", "a//b", "/"])
def test_what_is_no_hub_name_is_refused_without_asking_the_hub(name: str) -> None:
    assert _failure(f"hf:{name}").code is ErrorCode.DATA_UNREADABLE


@pytest.mark.parametrize("kind", ["text", "jsonl", "hf"])
@pytest.mark.parametrize(("documents", "split"), [(1, "validation"), (0, "training")])
def test_too_little_data_is_reported_with_numbers(
    tmp_path: Path, kind: str, documents: int, split: str
) -> None:
    text = "enough for one sample but there is no second document to hold out" * documents
    name, content = ("a.txt", text) if kind == "text" else ("a.jsonl", json.dumps({"text": text}) + "\n")
    (tmp_path / name).write_text(content)
    error = _failure(f"{kind}:{tmp_path}")
    assert error.code is ErrorCode.DATA_TOO_SMALL
    assert split in error.cause
    assert re.search(rf"has [01] tokens; one sample needs {CONTEXT + 1}", error.cause)


def test_a_hub_data_set_is_streamed_and_not_loaded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    def records() -> Iterator[object]:
        nonlocal taken
        while True:  # without end: only what is read is fetched
            taken += 1
            yield {"text": "a short document\n" * 20}

    shards = [Shard("owner/name, only", records)]
    monkeypatch.setattr("node.data.sources.hub_shards", lambda _location, _files: shards)
    stream = open_stream(_spec("hf:owner/name"))
    stream.read(range(4))
    assert 0 < taken < 2000
