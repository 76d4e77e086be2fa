"""hetnode without the libraries of its extras: what needs none of them works, the rest names the extra."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable
from pathlib import Path

import pytest

from node.cli.doctor_checks import Severity, check_libraries
from node.data.stream import open_stream
from node.data.tokenizer import FileTokenizer, find_tokenizer, load_tokenizer
from node.experiment.harness import run_tasks
from node.experiment.tokenizers import train_bpe
from node.extras import Extra, require_for_data, require_tool
from node.hugging_face.tokenizer import byte_definition, tokenizer_files
from node.net.enrollment import enroll
from node.net.joining import require_libraries
from node.net.waiting import CoordinatorWait
from node.security.identity import open_identity
from node.views import run_history
from protocol.errors import ErrorCode, ExitCode, HetnodeError
from protocol.spec.data import DataSpec
from protocol.spec.sections import ModelSpec
from tests.builders import spec_of
from tests.support.coordinator_process import Running, running
from tests.support.hidden_libraries import HIDE, LIBRARIES
from tests.support.paths import ROOT

HUB, FILE = {"data__source": "hf:owner/name"}, {"data__tokenizer": "tokenizer.json"}


@pytest.fixture
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library of an extra is installed."""
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)


def _plot(folder: Path) -> None:
    run_history.plot_losses(run_history.history_of([]), "title", folder / "loss.png")


USES: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda folder: open_stream(spec_of(**HUB)), "datasets", "hf"),
    (lambda folder: FileTokenizer(byte_definition().encode()), "tokenizers", "hf"),
    (lambda folder: FileTokenizer(b"\n\x0e"), "sentencepiece", "hf"),
    (lambda folder: train_bpe(folder / "bpe.json", 300, "builtin", "text"), "tokenizers", "hf"),
    (_plot, "matplotlib", "plots"),
    (lambda folder: require_tool("wandb"), "wandb", "wandb"),
    (lambda folder: run_tasks(folder, ["arc_easy"], "cpu", 0), "lm_eval", "eval"),
]


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize(
    ("use", "library", "extra"), USES, ids=["data", "tokenizer", "model", "training", "plot", "tool", "tasks"]
)
def test_each_use_of_a_missing_library_names_the_extra(
    use: Callable[[Path], object], library: str, extra: str, tmp_path: Path
) -> None:
    with pytest.raises(HetnodeError) as missing:
        use(tmp_path)
    assert missing.value.code is ErrorCode.MISSING_EXTRA
    assert f"library {library} " in missing.value.cause
    assert f"pip install 'hetnode[{extra}]'" in missing.value.remedy
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("_bare")
def test_a_tokenizer_file_that_exists_is_not_called_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_definition())
    with pytest.raises(HetnodeError) as missing:
        load_tokenizer(DataSpec(tokenizer=str(path)))
    assert missing.value.code is ErrorCode.MISSING_EXTRA


@pytest.mark.usefixtures("_bare")
def test_bytes_and_local_text_need_no_library(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some lines\n" * 4000)
    stream = open_stream(spec_of(data__source=f"text:{tmp_path}"))
    assert stream.read(range(2)).shape[0] == 2
    assert find_tokenizer(DataSpec()) is None
    tokenizer = load_tokenizer(DataSpec())
    files = tokenizer_files(tokenizer, {}, ModelSpec())  # type: ignore[arg-type]
    assert files["tokenizer.json"].decode() == byte_definition()


@pytest.mark.usefixtures("_bare")
def test_what_this_machine_has_in_place_of_the_named_data_decides() -> None:
    require_for_data(DataSpec(source="hf:owner/name"), ["text:here"])
    require_for_data(DataSpec(source="text:there"))
    for data, sources, tokenizer in (
        (DataSpec(source="hf:owner/name"), None, None),
        (DataSpec(validation="hf:owner/name"), None, None),
        (DataSpec(), ["text:here", "hf:owner/name"], None),
        (DataSpec(), ["parquet:here"], None),
        (DataSpec(), ["jsonl:here.jsonl.zst"], None),
        (DataSpec(tokenizer="there.json"), None, None),
        (DataSpec(tokenizer="there.json"), None, "here.json"),
    ):
        with pytest.raises(HetnodeError, match="missing-extra"):
            require_for_data(data, sources, tokenizer)


async def _members(run: Running) -> int:
    return len((await run.status()).peers)


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize("data", [HUB, FILE], ids=["hub", "tokenizer"])
async def test_a_machine_without_the_library_for_the_data_joins_no_run(
    data: dict[str, str], tmp_path: Path
) -> None:
    spec = spec_of(**data)
    async with running(spec, tmp_path / "run") as run:
        credentials = await enroll(await run.invite(), open_identity(tmp_path / "peer.key"), 10)
        with pytest.raises(HetnodeError) as missing:
            await require_libraries(credentials, (), None, CoordinatorWait(10))
        assert missing.value.code is ErrorCode.MISSING_EXTRA
        assert await _members(run) == 0
    (found,) = check_libraries(spec)
    assert (found.subject, found.severity) == ("data", Severity.WARNING)
    assert "hetnode[hf]" in found.remedy


@pytest.mark.usefixtures("_bare")
async def test_a_machine_without_libraries_may_join_a_run_that_needs_none(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path / "run") as run:
        credentials = await enroll(await run.invite(), open_identity(tmp_path / "peer.key"), 10)
        await require_libraries(credentials, (), None, CoordinatorWait(10))
    assert not check_libraries(spec_of())


async def test_the_node_process_ends_with_the_message_before_it_joins(tmp_path: Path) -> None:
    async with running(spec_of(**HUB), tmp_path / "run") as run:
        (tmp_path / "invite").write_text(f"{(await run.invite()).encode()}\n")
        code = f"{HIDE}from node.__main__ import main\nmain()\n"
        options = ["--invite-file", str(tmp_path / "invite"), "--folder", str(tmp_path / "node")]
        options += ["--identity", str(tmp_path / "peer.key"), "--device", "cpu", "--no-measure"]
        node = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, "join", *options, stdout=PIPE, stderr=STDOUT
        )
        output, _ = await node.communicate()
        assert node.returncode == ExitCode.STATE, output.decode()
        assert "[missing-extra]" in output.decode()
        assert await _members(run) == 0


def test_the_extras_are_those_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {extra.label for extra in Extra} == package["optional-dependencies"].keys() - {"test"}
