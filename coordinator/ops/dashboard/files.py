"""The files of the pages: our own, and Chart.js from an installed package. All are kept compressed."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable

_CHARTS = "Chart.bundle.js"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass
class StaticFile:
    """One file: its type, and its bytes, compressed when they are first asked for.

    `content` is kept from the start on: another version may be installed while this process runs.
    """

    kind: str
    content: bytes
    _packed: bytes = field(default=b"", repr=False)

    def packed(self) -> bytes:
        """gzip, made once."""
        content = self.content  # before the look: another thread may pack it meanwhile
        if not self._packed:
            self._packed, self.content = gzip.compress(content, 6, mtime=0), b""
        return self._packed


class StaticFiles:
    """All files by path, such as ``pages/run.js``.

    Attributes:
        version: changes with every file; a part of their addresses, so that browsers keep them for good.
    """

    def __init__(self) -> None:
        self._files: dict[str, StaticFile] = {}
        digest = hashlib.sha256(version("chartkick").encode())
        for path, file in sorted(_below(files(__package__) / "static", "")):
            content = file.read_bytes()
            digest.update(path.encode() + content)
            self._files[path] = StaticFile(_kind_of(path), content)
        library = files("chartkick") / "django" / "static" / "chartkick" / _CHARTS
        self._files[_CHARTS] = StaticFile(_TYPES[".js"], library.read_bytes())
        self.version = digest.hexdigest()[:16]

    def get(self, path: str) -> StaticFile | None:
        return self._files.get(path)


def _below(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = []
    for each in folder.iterdir():
        if each.is_dir():
            found += _below(each, f"{prefix}{each.name}/")
        elif f".{each.name.rpartition('.')[2]}" in _TYPES:
            found.append((prefix + each.name, each))
    return found


def _kind_of(path: str) -> str:
    return _TYPES[f".{path.rpartition('.')[2]}"]
