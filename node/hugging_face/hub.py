"""Puts an export into a repository of the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from node.extras import Extra, needed, require
from protocol.errors import ErrorCode, HetnodeError

_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_MOST_LETTERS = 400


def check_name(repository: str) -> None:
    """Raise HetnodeError BAD_OPTION unless it is OWNER/NAME, MISSING_EXTRA without the library."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise HetnodeError(
            ErrorCode.BAD_OPTION, f"{repository!r:.80} is no repository.", "Give --hub OWNER/NAME."
        )
    require("huggingface_hub", Extra.HF)


def upload(folder: Path, repository: str, message: str) -> str:
    """Commit the files of `folder` to `repository`, and remove its other weights. Returns the address.

    A repository that does not exist is made, and is private. Where the hub is and with which token are
    settings of its library: HF_ENDPOINT, HF_TOKEN, ``hf auth login``.

    Raises HetnodeError: MISSING_EXTRA; OUTPUT_UNWRITABLE for whatever the library raises.
    """
    with needed(Extra.HF):
        from huggingface_hub import HfApi  # noqa: PLC0415
    hub = HfApi(library_name="hetnode")
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        done = hub.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, delete_patterns=_WEIGHTS
        )
    except Exception as error:
        why = " ".join(str(error).split())[:_MOST_LETTERS].rstrip(".")
        raise HetnodeError(
            ErrorCode.OUTPUT_UNWRITABLE,
            f"The model is in {folder}, but not in {repository} on the hub: {why}.",
            "Log in with 'hf auth login' or HF_TOKEN, as one who may write there.",
        ) from None
    return str(done)
