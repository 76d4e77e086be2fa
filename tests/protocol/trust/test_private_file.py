"""Small files that are replaced as a whole."""

from __future__ import annotations

import resource
import stat
from pathlib import Path

import pytest

from protocol.trust.private_file import write_private, write_whole


def test_a_private_file_replaces_the_former_file_and_the_rest_of_a_crash(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("old")
    (tmp_path / "key").chmod(0o644)
    (tmp_path / "key.new").write_text("half")
    write_private(tmp_path / "key", b"new")
    assert (tmp_path / "key").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_full_disk_leaves_the_former_content(tmp_path: Path) -> None:
    file, limits = tmp_path / "run.toml", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_whole(file, "old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(file, "new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
