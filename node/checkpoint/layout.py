"""Names of the files and folders of a round. The main process imports this module, so it avoids torch."""

from __future__ import annotations

import re
from pathlib import Path

ANY_ROUND = "round-*"
"""Glob that matches the names from :func:`round_folder`."""
EMBEDDING_TENSOR = "emb"
"""The name of the token embedding in a file of stage 0. Its optimizer state is named ``emb/...``."""
EMBEDDING_FILE = "embedding.safetensors"


def round_folder(round_number: int) -> str:
    """The name of the folder of a round."""
    return f"round-{round_number:06d}"


def round_of(name: str) -> int | None:
    """The round of a folder name from :func:`round_folder`; None for other names."""
    match = re.fullmatch(r"round-(\d{6,})", name)
    return int(match[1]) if match else None


def rounds_below(root: Path) -> dict[int, Path]:
    """The round folders below `root`, newest first."""
    paths = root.iterdir() if root.is_dir() else ()
    found = {each: path for path in paths if (each := round_of(path.name)) is not None}
    return dict(sorted(found.items(), reverse=True))


def stage_file(stage: int) -> str:
    return f"stage-{stage:02d}.safetensors"
