"""Prepared data: the samples of the source itself, and nothing of files that are not right."""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from node.data import prepare as preparing
from node.data import shard_files
from node.data.own import check_own
from node.data.prepare import prepare
from node.data.prepared import PreparedManifest
from node.data.sources import open_source
from node.data.stream import SampleStream, open_stream
from node.data.tokenizer import ByteTokenizer
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from tests.support.certificates import self_signed
from tests.support.shard_server import ShardServer, serving

CONTEXT = 8
FILES = 3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token files of 4 kB."""
    monkeypatch.setattr(preparing, "SHARD_BYTES", 4096)


@pytest.fixture
def source(tmp_path: Path) -> str:
    for number in range(FILES):
        records = ({"text": f"{number}/{n} is a text. " * (1 + n % 5)} for n in range(300))
        lines = "".join(json.dumps(each) + "\n" for each in records)
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / f"{number}.jsonl").write_text(lines)
    return f"jsonl:{tmp_path / 'source'}"


def made(source: str, folder: Path) -> str:
    """The hash of the manifest in `folder`, in which `source` was prepared."""
    return prepare(open_source(source, "text"), "text", ByteTokenizer(), folder, lambda *_: None)


@pytest.fixture
def sha256(source: str, tmp_path: Path) -> str:
    return made(source, tmp_path / "out")


def spec_of(source: str, **data: object) -> RunSpec:
    settings = {"data.source": source, "model.context": CONTEXT, "seed": 5}
    return resolve("nano", overrides=settings | {f"data.{name}": each for name, each in data.items()})


def assert_equal(found: SampleStream, expected: SampleStream) -> None:
    for ordinals in (range(200), [3, 2**20, 5_000, 7]):
        np.testing.assert_array_equal(found.read(ordinals), expected.read(ordinals))
    np.testing.assert_array_equal(found.validation(900), expected.validation(900))


@pytest.mark.parametrize("is_large", [False, True])
def test_the_samples_are_those_of_the_source(
    source: str, tmp_path: Path, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        for module in ("stream", "sources"):
            monkeypatch.setattr(f"node.data.{module}.LARGE", 0)
    sha256 = made(source, tmp_path / "out")
    manifest = PreparedManifest.model_validate_json((tmp_path / "out" / "manifest.json").read_bytes())
    assert len(manifest.parts) == (FILES if is_large else 1)
    assert sum(len(part.shards) for part in manifest.parts) > 2 * FILES
    place = f"shards:{tmp_path / 'out'}#sha256={sha256}"
    assert_equal(open_stream(spec_of(place)), open_stream(spec_of(source)))
    trained = source.replace("source", "source/0.jsonl")
    measured = open_stream(spec_of(trained, validation=place)).validation(900)
    expected = open_stream(spec_of(trained, validation=source)).validation(900)
    np.testing.assert_array_equal(measured, expected)


def test_a_folder_of_a_run_of_others_is_not_opened(source: str, sha256: str, tmp_path: Path) -> None:
    folder = f"shards:{tmp_path / 'out'}#sha256={sha256}"
    with pytest.raises(HetnodeError) as caught:
        open_stream(spec_of(folder), is_own_run=False)
    assert caught.value.code is ErrorCode.DATA_NOT_NAMED
    check_own([folder])
    remote = spec_of(f"shards:/nowhere/manifest.json#sha256={sha256}")
    assert_equal(open_stream(remote, [folder], is_own_run=False), open_stream(spec_of(source)))


def test_a_damaged_folder_is_named(sha256: str, tmp_path: Path) -> None:
    spec = spec_of(f"shards:{tmp_path / 'out' / 'manifest.json'}#sha256={sha256}")
    for each in (tmp_path / "out").glob("*.tokens"):
        each.write_bytes(b"?" + each.read_bytes()[1:])
    with pytest.raises(HetnodeError, match=r"\.tokens .*sha-256"):
        open_stream(spec)


def test_a_manifest_whose_files_are_not_what_it_says_gives_no_sample(sha256: str, tmp_path: Path) -> None:
    """Whoever wrote the specification may lie, too: its hashes are right."""
    out = tmp_path / "out"
    manifest = json.loads((out / "manifest.json").read_text())

    def refused(match: str) -> None:
        text = json.dumps(manifest).encode()
        (out / "manifest.json").write_bytes(text)
        with pytest.raises(HetnodeError, match=match):
            open_stream(spec_of(f"shards:{out}#sha256={hashlib.sha256(text).hexdigest()}"))

    shards = manifest["parts"][0]["shards"]
    honest = dict(shards[0])
    for wrong in (
        {"held_out": honest["held_out"] - 1},
        {"tokens": honest["tokens"] - 4, "documents": honest["documents"] + 1},
    ):
        shards[:] = [honest | wrong] * len(shards)
        refused("not what its manifest says")
    empty = hashlib.sha256(b"").hexdigest()
    (out / f"{empty}.tokens").write_bytes(b"")
    shards[:] = [honest | {"sha256": empty}] * len(shards)
    refused("not what its manifest says")
    shards[:] = [honest | {"tokens": 2**29}] * len(shards)
    refused("not what its manifest says")
    shards[:] = [honest | {"tokens": 2**40}]
    refused("no manifest")
    manifest["version"] = 2
    refused("no manifest of this version")


def test_another_tokenizer_is_refused(sha256: str, tmp_path: Path) -> None:
    path = tmp_path / "out" / "manifest.json"
    text = path.read_text().replace('"separator":[10]', '"separator":[11]').encode()
    path.write_bytes(text)
    with pytest.raises(HetnodeError) as caught:
        open_stream(spec_of(f"shards:{path}#sha256={hashlib.sha256(text).hexdigest()}"))
    assert caught.value.code is ErrorCode.TOKENIZER_MISMATCH


@pytest.mark.parametrize("name", ["shards:/somewhere", "shards:/x#sha256=ABC", "shards:#sha256=" + "0" * 64])
def test_a_place_without_a_hash_is_no_source(name: str) -> None:
    with pytest.raises(HetnodeError):
        spec_of(name)


def test_an_interrupted_preparation_goes_on(source: str, sha256: str, tmp_path: Path) -> None:
    again = tmp_path / "again"

    def stop_after(files: int) -> None:
        def told(_: int, __: int, done: int, ___: int) -> None:
            if done == files:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(open_source(source, "text"), "text", ByteTokenizer(), again, told)

    for files in (1, 4, 5):
        stop_after(files)
        before = {each: each.stat().st_mtime_ns for each in again.glob("*.tokens")}
        with (again / "journal.jsonl").open("a") as journal:
            journal.write('[0,{"sha256":"ab')  # as a crash would leave it
    assert len(before) == 5
    assert made(source, again) == sha256
    assert all(each.stat().st_mtime_ns == then for each, then in before.items())
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert {each.name for each in again.iterdir()} == names
    with pytest.raises(HetnodeError, match="other data"):
        made("builtin", again)


def test_the_command_says_what_a_run_takes(source: str, tmp_path: Path) -> None:
    from click.testing import CliRunner  # noqa: PLC0415
    from typer.main import get_group  # noqa: PLC0415

    from node.cli.data import data_app  # noqa: PLC0415

    out = tmp_path / "new"
    result = CliRunner().invoke(get_group(data_app), ["prepare", source, "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = next(word for word in result.output.split() if word.startswith("shards:/"))
    assert_equal(open_stream(spec_of(found)), open_stream(spec_of(source)))
    assert str(tmp_path) not in (out / "manifest.json").read_text() + (out / "journal.jsonl").read_text()


@pytest.fixture
def server(tmp_path: Path, sha256: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardServer]:
    monkeypatch.setattr(shard_files, "kept_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr("node.data.hub.sleep", lambda _: None)
    with serving(tmp_path / "out") as found:
        yield found


@pytest.mark.parametrize("faults", [[], ["cut"], ["wrong", "short"], [503, 429, "cut"]])
def test_a_server_that_fails_for_a_while_delays_the_data(
    source: str, sha256: str, server: ShardServer, faults: list[int | str], tmp_path: Path
) -> None:
    server.faults = {".tokens": list(faults), ".json": list(faults)}
    spec = spec_of(f"shards:{server.url}/some/manifest.json#sha256={sha256}")
    expected = open_stream(spec_of(source))
    assert_equal(open_stream(spec), expected)
    asked = len(server.asked)
    assert_equal(open_stream(spec), expected)
    assert len(server.asked) == asked, "what was fetched is kept"
    assert server.faults == {".tokens": [], ".json": []}, "each of the faults has happened"
    assert len(list((tmp_path / "kept").iterdir())) == len(list((tmp_path / "out").glob("*.tokens"))) + 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [("wrong", "sha-256"), ("endless", "more than"), (404, "404"), ("/*", "302"), ("file:///x", "302")],
)
@pytest.mark.parametrize("end", [".json", ".tokens"])
def test_a_server_that_lies_gets_no_sample_into_training(
    sha256: str, server: ShardServer, fault: int | str, said: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.data.prepared.MOST_MANIFEST", 2**16)
    server.faults = {end: [fault] * 20}
    with pytest.raises(HetnodeError) as caught:
        open_stream(spec_of(f"shards:{server.url}/some/manifest.json#sha256={sha256}"))
    assert caught.value.code is ErrorCode.DATA_UNREADABLE
    assert f"{server.url}/some/" in caught.value.cause
    assert said in caught.value.cause


def test_a_server_whose_certificate_nobody_has_signed_is_not_asked_again(
    sha256: str, server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = self_signed("localhost", tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setattr("node.data.hub.sleep", lambda _: pytest.fail("it is tried again"))
    place = f"https://localhost:{server.server_port}/manifest.json"
    with pytest.raises(HetnodeError, match="certificate verify failed"):
        open_stream(spec_of(f"shards:{place}#sha256={sha256}"))
    assert not server.asked


def test_a_server_that_the_owner_has_not_named_is_not_asked(sha256: str, server: ShardServer) -> None:
    place = f"shards:{server.url}/manifest.json#sha256={sha256}"
    with pytest.raises(HetnodeError) as caught:
        open_stream(spec_of(place), is_own_run=False)
    assert caught.value.code is ErrorCode.DATA_NOT_NAMED
    assert not server.asked
    assert open_stream(spec_of(place), [place], is_own_run=False).read(range(3)).shape == (3, CONTEXT + 1)


def test_what_was_used_longest_ago_makes_room(
    source: str, sha256: str, server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "MOST_KEPT", 3 * 5000)
    spec = spec_of(f"shards:{server.url}/manifest.json#sha256={sha256}")
    assert_equal(open_stream(spec), open_stream(spec_of(source)))
    assert sum(each.stat().st_size for each in (tmp_path / "kept").iterdir()) <= 3 * 5000
