"""Files that their hashes name, in a folder or below a URL; none is used before its hash was found right."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from ssl import SSLCertVerificationError
from tempfile import NamedTemporaryFile
from time import monotonic
from urllib.request import Request, urlopen

from platformdirs import user_cache_path

from node.data.files import unreadable
from node.data.hub import SECONDS_TO_READ, Patience
from node.data.tokenizer import has_hash
from protocol.errors import ErrorCode, HetnodeError

MOST_KEPT = 10 * 2**30
"""Bytes of downloads that are kept; they never have more than half of what is free."""
_SILENT_SECONDS, _MOST_WRONG = 30.0, 3


def kept_folder() -> Path:
    return user_cache_path("hetnode") / "shards"


def is_url(place: str) -> bool:
    return place.startswith(("https://", "http://"))


def file_at(base: str, name: str, sha256: str, most: int) -> Path:
    """The file below a folder or URL, which may send `most` bytes. Raises DATA_UNREADABLE, DISK_FULL."""
    path = kept_folder() / sha256 if is_url(base) else Path(base, name)
    if has_hash(path, sha256):
        with suppress(OSError):  # the folder may be read-only
            os.utime(path)
    elif is_url(base):
        try:
            _download(f"{base}/{name}", path, most)
        except OSError as error:
            cause = f"Data cannot be kept in {path.parent}: {error.strerror or error}."
            raise HetnodeError(ErrorCode.DISK_FULL, cause, "Free space, or make it writable.") from None
    else:
        why = f"it is not there, or its sha-256 is not {sha256}"
        raise unreadable(path, why, "Copy the folder again, or prepare the data again.")
    return path


def _download(url: str, path: Path, most: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    patience, wrong, why = Patience(url, SECONDS_TO_READ), 0, Exception()
    with NamedTemporaryFile(dir=path.parent) as part:
        while True:
            digest, _ = hashlib.sha256(), part.truncate(part.seek(0))
            try:
                for piece in _pieces(url, most):
                    digest.update(piece)
                    part.write(piece)
                if digest.hexdigest() == path.name:
                    break
                why, wrong = ConnectionError("its sha-256 is another than the run names"), wrong + 1
            except (ConnectionError, ValueError) as error:
                why = error
            if wrong == _MOST_WRONG or not patience.waits_after(why):
                remedy = "Ask who keeps the data for what 'hetnode data prepare' wrote, or name a copy here:"
                raise unreadable(url, why, f"{remedy} --data shards:FOLDER#sha256=HEX.")
        part.flush()
        path.unlink(missing_ok=True)
        with suppress(FileExistsError):  # another process has it, too
            os.link(part.name, path)
    states = [(each.stat(), each) for each in path.parent.iterdir()]
    whole = sum(state.st_size for state, _ in states)
    for state, each in sorted(states, key=lambda found: found[0].st_mtime):
        if each != path and whole > min(MOST_KEPT, (shutil.disk_usage(path.parent).free + whole) // 2):
            each.unlink(missing_ok=True)
            whole -= state.st_size


def _pieces(url: str, most: int) -> Iterator[bytes]:
    """What the server sends. Raises ConnectionError for what may pass; ValueError."""
    have, ends = 0, monotonic() + SECONDS_TO_READ
    try:
        with urlopen(Request(url, headers={"User-Agent": "hetnode"}), timeout=_SILENT_SECONDS) as answer:
            while piece := answer.read1(2**16):
                have += len(piece)
                if have > most or monotonic() > ends:
                    raise ValueError(f"it has more than {most} bytes, or they come too slowly")
                yield piece
    except (OSError, HTTPException) as error:
        code = getattr(error, "code", 500)
        is_certain = isinstance(getattr(error, "reason", None), SSLCertVerificationError)
        may_pass = not is_certain and (code >= 500 or code in (408, 429))
        raise (ConnectionError if may_pass else ValueError)(str(error)) from None
