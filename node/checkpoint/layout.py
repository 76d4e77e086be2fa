"""Names of the files and folders of a round. The main process imports them, so nothing here needs torch."""

from __future__ import annotations

import re
from pathlib import Path

ANY_ROUND = "round-*"
"""Glob of what :func:`round_folder` names."""
EMBEDDING_TENSOR = "emb"
"""The token embedding in a file of stage 0. The state of the outer optimizer for it is named ``emb/...``."""
EMBEDDING_FILE = "embedding.safetensors"


def round_folder(round_number: int) -> str:
    """The name of the folder of a round."""
    return f"round-{round_number:06d}"


def round_of(name: str) -> int | None:
    """The round of which :func:`round_folder` is `name`; None for another name."""
    match = re.fullmatch(r"round-(\d{6,})", name)
    return int(match[1]) if match else None


def rounds_below(root: Path) -> dict[int, Path]:
    """The folders below `root` that :func:`round_folder` names, newest first."""
    found = {
        number: path
        for path in (root.iterdir() if root.is_dir() else ())
        if (number := round_of(path.name)) is not None
    }
    return dict(sorted(found.items(), reverse=True))


def stage_file(stage: int) -> str:
    return f"stage-{stage:02d}.safetensors"
