"""The real library uploads an export to a server that speaks as the hub does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.hugging_face.hub import check_name, upload
from protocol.errors import ErrorCode, HetnodeError
from tests.support.hub_uploads import TOKEN, hub_for_uploads


def test_an_export_is_one_commit_and_former_weights_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    cache = str(tmp_path / "cache")  # else the library writes below this user's home
    monkeypatch.setattr("huggingface_hub.constants.AGENT_HARNESSES_PATH", cache, raising=False)
    export = tmp_path / "export"
    export.mkdir()
    for name, text in {"config.json": "{}", "model.safetensors": "weights", "README.md": "# A model"}.items():
        (export / name).write_text(text)
    with hub_for_uploads() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        hub.files = {"model-00001-of-00002.safetensors": b"former", "notes.txt": b"of a person"}
        hub.refusals = 1
        with pytest.raises(HetnodeError) as refused:
            upload(export, "owner/name", "round 2")
        assert refused.value.code is ErrorCode.OUTPUT_UNWRITABLE
        assert TOKEN not in str(refused.value)
        assert upload(export, "owner/name", "round 4").startswith(f"{hub.endpoint}/owner/name/commit/")
    assert hub.private == {"owner/name": True}
    assert hub.commits == ["round 4"]
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md", "notes.txt"}
    assert hub.files["model.safetensors"] == b"weights"
    assert json.loads(hub.files["config.json"]) == {}


@pytest.mark.parametrize("name", ["", "name", "a/b/c", "../name x", "a/b\n"])
def test_what_is_no_repository_is_refused_before_anything_is_written(name: str) -> None:
    with pytest.raises(HetnodeError) as refused:
        check_name(name)
    assert refused.value.code is ErrorCode.BAD_OPTION
