"""Data sets that the ``datasets`` library reads: of the Hugging Face Hub, or of a local folder like one."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from random import uniform
from time import monotonic, sleep
from typing import Any

from node.extras import Extra, needed
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.sources import kind_of_file
from protocol.server.backoff import pause_after

SPLIT = "train"
_ON_HUB = re.compile(r"(?:(?:zip|tar|gzip|bz2|xz|zstd|lz4|7z|rar)://[^:]*::)*hf://[^:]*")

SECONDS_TO_READ, _SECONDS_TO_LIST = 1800.0, 60.0
"""How long the network or the hub may fail, in which the library makes several tries of its own."""
_FIRST_SECONDS, _MOST_SECONDS_BETWEEN = 2.0, 60.0
_TOO_MANY = (408, 429)
_NETWORK_LIBRARIES = frozenset({"httpx", "httpx2", "httpcore", "requests", "urllib3", "aiohttp"})
"""Their errors without a status are those of a connection. Which one is used depends on versions."""

log = logging.getLogger(__name__)

PRESETS: Mapping[str, tuple[str, str | None]] = {
    "dclm": ("mlfoundations/dclm-baseline-1.0-parquet", None),
    "c4": ("allenai/c4", "en"),
    "pile": ("monology/pile-uncopyrighted", None),
}
"""Short names: data set on the hub, configuration. The text of all of them is in the column ``text``."""


@dataclass(frozen=True)
class Shard:
    """One file of a data set. `records` reads it from its beginning, and fetches what it reads.

    Reading raises DATA_UNREADABLE, which names the file. `nbytes` is the size of the file; None where
    the hub does not tell it.
    """

    name: str
    records: Callable[[], Iterator[object]]
    nbytes: int | None = None


def is_hub_name(location: str) -> bool:
    """Whether the library looks for `location` on the hub and nowhere else.

    The library takes an existing path for a local folder, and a name without an owner, such as ``text``, for
    a kind of files in the current folder.
    """
    if location in PRESETS:
        return True
    parts = location.split("/")
    return _is_valid(parts) and len(parts) > 1 and not os.path.exists("/".join(parts[:2]))


def _is_valid(parts: Sequence[str]) -> bool:
    return len(parts) <= 3 and all(parts) and parts[0] not in (".", "..", "~")


def hub_shards(location: str, may_open_files: bool = True) -> Sequence[Shard]:
    """The files of the ``train`` split, in the order of the library. None is opened.

    Args:
        location: ``NAME[/CONFIG]`` on the hub, a local folder, or a name in PRESETS.
        may_open_files: False for a location that the owner of this machine has not named. The page of a data
            set can list any files; then each must be on the hub.

    Raises:
        HetnodeError: DATA_UNREADABLE; MISSING_EXTRA.
    """
    name, config = _hub_name(location)
    with needed(Extra.HF):  # which takes a second, and only this source needs it
        from datasets import load_dataset_builder  # type: ignore[import-untyped]  # noqa: PLC0415

    patience = Patience(f"hf:{location}", _SECONDS_TO_LIST)
    while True:
        try:
            builder = load_dataset_builder(name, config)
            dataset = builder.as_streaming_dataset(split=SPLIT)
            files, outside = _files(builder), _outside_hub(builder)
            sizes = _sizes(files)
            break
        except Exception as error:  # the library, its parsers and its transport raise many types
            if not patience.waits_after(error):
                raise _unreadable(
                    f"hf:{location}",
                    error,
                    f"Check the name and its configuration, that it has a '{SPLIT}' split, and the "
                    f"connection to the Hugging Face Hub (short names are {', '.join(PRESETS)}); or name a "
                    "local folder, or use text:PATH or jsonl:PATH.",
                ) from None
    if outside and not may_open_files:
        raise HetnodeError(
            ErrorCode.DATA_UNREADABLE,
            f"The data hf:{location} lists a file that is not on the hub: {outside[0]}. Nothing was read.",
            "Do not take part in this run, and tell the hub about the data set.",
        )
    names, count = [os.path.basename(file) for file in files], dataset.num_shards
    if len(files) != count:  # archives have more shards than files
        names, sizes = [f"shard {index + 1} of {count}" for index in range(count)], [None] * count
    return [
        Shard(f"{location}, {name}", partial(_records, dataset, index, location, name), nbytes)
        for index, (name, nbytes) in enumerate(zip(names, sizes, strict=True))
    ]


def _files(builder: Any) -> list[str]:
    """The files of the split."""
    return [str(file) for file in (builder.config.data_files or {}).get(SPLIT, [])]


def _sizes(files: Sequence[str]) -> list[int | None]:
    """The size of each file, from the listing of its folder; None for a part of an archive."""
    from datasets import config  # noqa: PLC0415  as in `hub_shards`
    from fsspec import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415

    # With the library's options this is its own file system, which has listed the folders already.
    options = {"hf": {"endpoint": config.HF_ENDPOINT, "token": None}}
    listed: dict[str, dict[str, int | None]] = {}
    found: list[int | None] = []
    for file in files:
        if "::" in file:
            found.append(None)
            continue
        system, path = url_to_fs(file, **options)
        folder = system._parent(path)
        if folder not in listed:
            listed[folder] = {each["name"]: each["size"] for each in system.ls(folder, detail=True)}
        found.append(listed[folder].get(path))
    return found


def _outside_hub(builder: Any) -> list[str]:
    """The files of all splits that are elsewhere: paths of this machine, or other servers."""
    files = chain.from_iterable((builder.config.data_files or {}).values())
    # A file within an archive is named from the inside out: zip://part.txt::hf://datasets/...
    return [str(file) for file in files if not _ON_HUB.fullmatch(str(file))]


def _records(dataset: Any, index: int, location: str, file: str) -> Iterator[object]:
    what = f"hf:{location}, {file}"
    shard, done = dataset.shard(num_shards=dataset.num_shards, index=index), 0
    patience = Patience(what, SECONDS_TO_READ)
    while True:
        try:
            for record in shard.skip(done):
                yield record
                done += 1
                patience.reset()
            return
        except Exception as error:
            if not patience.waits_after(error):
                remedy = (
                    "Start the node again when the Hugging Face Hub answers, or give it a copy of the data "
                    "with --data hf:FOLDER."
                    if _may_pass(error)
                    else "Check that the file is there and whole."
                )
                raise _unreadable(what, error, remedy) from None


class Patience:
    """How long and how often to try again what the network or the hub refuses."""

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self.reset()

    def reset(self) -> None:
        self._tries, self._ends = 0, inf

    def waits_after(self, error: Exception) -> bool:
        """Wait before the next try; False where no time is left, or it would fail like this one."""
        if not _may_pass(error):
            return False
        self._tries += 1
        self._ends = min(self._ends, monotonic() + self._seconds)
        if monotonic() > self._ends:
            return False
        # Nodes that failed together do not come back together.
        seconds = pause_after(self._tries, _FIRST_SECONDS, _MOST_SECONDS_BETWEEN) * uniform(0.5, 1)
        log.warning(
            "the data %s cannot be read now (%s); next try in %.0f s", self._what, _reason(error), seconds
        )
        sleep(seconds)
        return True


def _may_pass(error: BaseException | None) -> bool:
    """Whether the network or a server failed, not the data or their name."""
    found, seen = False, set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if "OfflineMode" in f"{type(error).__name__} {error}":  # the owner of this machine wants it so
            return False
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status in _TOO_MANY or status >= 500
        is_network = type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES
        found |= is_network or isinstance(error, (ConnectionError, TimeoutError))
        error = error.__cause__ or error.__context__
    return found


def _reason(error: Exception) -> str:
    # Some of the library's messages span lines, and some hide what has failed behind another.
    errors = [error] if error.__cause__ is None else [error, error.__cause__]
    return "; ".join(" ".join(f"{type(each).__name__}: {each}".split()).rstrip(".") for each in errors)


def _unreadable(what: str, error: Exception, remedy: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.DATA_UNREADABLE, f"The data {what} cannot be read: {_reason(error)}.", remedy
    )


def _hub_name(location: str) -> tuple[str, str | None]:
    """Split ``NAME[/CONFIG]`` into name and config. An existing local path is a name without config.

    A name on the hub has at most two parts, so a third part is the config. A short name means the same
    everywhere, whatever folders there are.
    """
    if location in PRESETS:
        return PRESETS[location]
    # Path.expanduser would raise for an unknown user; here the path is reported as missing.
    path = Path(os.path.expanduser(location))
    if path.is_file():
        raise HetnodeError(
            ErrorCode.DATA_UNREADABLE,
            f"The data hf:{location} cannot be read: it is a file of this machine, not a folder.",
            f"Use {kind_of_file(path.name) or 'text'}:{location}.",
        )
    if path.exists():
        return str(path), None
    parts = location.split("/")
    if not _is_valid(parts):
        raise HetnodeError(
            ErrorCode.DATA_UNREADABLE,
            f"The data hf:{location} cannot be read: it is neither a local folder nor a valid name on the "
            "hub.",
            "Use hf:FOLDER, hf:NAME, hf:OWNER/NAME or hf:OWNER/NAME/CONFIG.",
        )
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
