"""Files with secrets."""

from __future__ import annotations

import stat
from pathlib import Path

from protocol.trust.private_file import write_private


def test_a_private_file_replaces_the_former_file_and_the_rest_of_a_crash(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("old")
    (tmp_path / "key").chmod(0o644)
    (tmp_path / "key.new").write_text("half")
    write_private(tmp_path / "key", b"new")
    assert (tmp_path / "key").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
