"""The files of the pages: our own, and plotly's from its installed package. All are kept compressed."""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable

_PLOTLY = "plotly.min.js"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_STYLED = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')


@dataclass
class StaticFile:
    """One file: its type, and its bytes, compressed when they are first asked for.

    `content` is kept from the start on: another version may be installed while this process runs.
    """

    kind: str
    content: bytes
    _packed: bytes = field(default=b"", repr=False)

    def packed(self) -> bytes:
        """gzip. Of plotly it takes a fifth of a second, once."""
        content = self.content  # before the look: another thread may pack it meanwhile
        if not self._packed:
            self._packed, self.content = gzip.compress(content, 6, mtime=0), b""
        return self._packed


class StaticFiles:
    """All files by path, such as ``pages/run.js``.

    Attributes:
        version: changes with every file; a part of their addresses, so that browsers keep them for good.
        styled: ids of the elements with which parts of plotly put styles of their own into a page that has
            none with that id. The policy of our pages forbids it, and the charts need none of them.
    """

    def __init__(self) -> None:
        self._files: dict[str, StaticFile] = {}
        digest = hashlib.sha256(version("plotly").encode())
        for path, file in sorted(_below(files(__package__) / "static", "")):
            content = file.read_bytes()
            digest.update(path.encode() + content)
            self._files[path] = StaticFile(_kind_of(path), content)
        plotly = (files("plotly") / "package_data" / _PLOTLY).read_bytes()
        self.styled = sorted({each.decode() for each in _STYLED.findall(plotly)})
        self._files[_PLOTLY] = StaticFile(_TYPES[".js"], plotly)
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
