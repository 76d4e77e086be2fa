"""The key in the folder of a coordinator, by which the folder is known as such."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import ErrorCode, HetnodeError

if TYPE_CHECKING:
    from node.security.identity import Identity

log = logging.getLogger(__name__)

_KEY = "identity.key"
_TEXTS = {"about.md", "samples.txt", "downloads.txt"}
_BEFORE_A_RUN = {"run.toml", "tokenizer.json", "initial", "logs", "lost+found", *_TEXTS}
"""Names in the folder of a coordinator that has not started yet."""


def warn_of_other_files(folder: Path) -> None:
    """Log that `folder`, in which no coordinator was yet, holds files of others."""
    others = {each.name for each in folder.iterdir()} - _BEFORE_A_RUN if folder.is_dir() else set[str]()
    if others and not (folder / _KEY).exists():
        log.warning("%s holds other files, such as %s: those of the run come to them", folder, min(others))


def open_coordinator_key(folder: Path) -> Identity:
    """The key of the coordinator in `folder`. Raises RUN_FOLDER_IN_USE while another coordinator has it."""
    from node.security.identity import open_identity  # noqa: PLC0415

    try:
        return open_identity(folder / _KEY)
    except HetnodeError as error:
        if error.code is not ErrorCode.ALREADY_ACTIVE:
            raise
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"Another coordinator runs in the folder {folder}.",
            "Stop it, or give this one another --folder.",
        ) from None
