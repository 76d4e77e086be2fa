"""What the operator tells the readers of a run, in three text files of the coordinator's folder.

Where it has no samples, those that members told last take their place.

``about.md`` has a title, its first line that begins with #, and a description. ``samples.txt`` has texts of
the model, the newest last; ``downloads.txt`` a link in each line, with its label behind it. All are read anew
for each reader, and shown as text: nothing in them is HTML.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coordinator.ops.dashboard.queries import shown
from protocol.status import ModelEvaluation
from protocol.wire.run_page import MOST_TITLE

ABOUT_FILE, SAMPLES_FILE, DOWNLOADS_FILE = "about.md", "samples.txt", "downloads.txt"
_MOST_DOWNLOADS = 20
_LINK = re.compile(r"(https?://[^\s\"'<>\\]{1,500})(?:\s+(.*))?")
_MOST_BYTES = 8192
"""Of each file: the last of samples.txt, else the first. No more is read, however large a file is."""

_WRAPPED = re.compile(r"(?<!\n)\n(?![\n#>*-])")
"""The end of a line within a paragraph: the next line is no item of a list, and no heading."""


@dataclass(frozen=True)
class DownloadLink:
    """A link to a checkpoint of the run, or to another file."""

    url: str
    label: str


@dataclass(frozen=True)
class About:
    """The words of the operator; "" for each that is not there."""

    title: str = ""
    description: str = ""
    samples: str = ""
    downloads: tuple[DownloadLink, ...] = ()


def read_about(folder: Path) -> About:
    """What the files in `folder` say now. A file that is missing, or no text, says nothing or what it can."""
    title, lines = "", []
    for line in _text(folder / ABOUT_FILE, newest=False).splitlines():
        if not title and line.startswith("#"):
            title = shown(line.strip("# \t"), MOST_TITLE)
        else:
            lines.append(shown(line, _MOST_BYTES))
    samples = (shown(line, _MOST_BYTES) for line in _text(folder / SAMPLES_FILE, newest=True).splitlines())
    links = map(_LINK.fullmatch, map(str.strip, _text(folder / DOWNLOADS_FILE, newest=False).splitlines()))
    downloads = [DownloadLink(found[1], shown(found[2] or found[1], MOST_TITLE)) for found in links if found]
    description = _WRAPPED.sub(" ", "\n".join(lines).strip())
    return About(title, description, "\n".join(samples).strip("\n"), tuple(downloads[:_MOST_DOWNLOADS]))


def samples_text(evaluations: Iterable[ModelEvaluation]) -> str:
    """The samples of the first evaluation that has any; "" without one."""
    newest = next((each for each in evaluations if each.samples), None)
    if newest is None:
        return ""
    texts = [f"After round {newest.round_number}:", *(each.prompt + each.text for each in newest.samples)]
    return "\n\n".join("\n".join(map(shown, text.split("\n"))) for text in texts)


def _text(path: Path, newest: bool) -> str:
    """The text at the beginning of a file, or at its end from the beginning of a line."""
    try:
        # A pipe under this name must not keep all readers waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                return ""
            begin = max(0, about.st_size - _MOST_BYTES) if newest else 0
            file.seek(begin)
            text = file.read(_MOST_BYTES).decode("utf-8-sig", "replace")
    except (OSError, ValueError):
        return ""
    return text.partition("\n")[2] or text if begin else text
