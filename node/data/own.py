"""What the owner of a machine has named with ``--data``: where this machine has the sources of a run.

A text is ``NAME=SOURCE`` for a source of a mixture (for others ``data=`` or ``validation=``), a SOURCE that
the run names, too, or ANY. A SOURCE that the run does not name is a copy of the one without a name with which
the run began. A place that the run names is that source, also where it was named for another one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from node.data.sources import names_files, not_named, open_source
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.sources import sources_text
from protocol.spec.data import SOURCE_NAME, DataSource, DataSpec

ANY = "any"
"""Every path that the run names, now or after a change."""
UNNAMED = "data"
"""The name of a source that has none."""


def option_for(source: DataSource) -> str:
    """What --data says of a source that is where the run says it."""
    return f"{source.name}={source.source}" if source.name else source.source


def named(text: str) -> tuple[str, str]:
    """The name of the source, or "", and where it is."""
    name, is_named, place = text.partition("=")
    return (name, place) if is_named and re.fullmatch(SOURCE_NAME, name) else ("", text)


def check_own(own: Sequence[str]) -> None:
    """Refuse what the owner cannot mean.

    Raises HetnodeError: DATA_UNREADABLE if one of `own` is no source, or names a file or folder that does not
    exist; BAD_OPTION for two places of one name.
    """
    found = dict[str, str]()
    for name, place in map(named, own):
        if name and found.setdefault(name, place) != place:
            cause = f"--data says that {name} is {found[name]}, and {place}."
            raise HetnodeError(ErrorCode.BAD_OPTION, cause, "Name one place of each source.")
        if name or place != ANY:
            open_source(place, "")


def location_of(source: DataSource, data: DataSpec, own: Sequence[str], is_own_run: bool) -> tuple[str, bool]:
    """Where this machine has `source` of the run, and whether its owner has named that.

    Raises HetnodeError BAD_OPTION where it cannot be told which of several of `own` is meant.
    """
    places = dict(map(named, own))
    if (name := source.name or UNNAMED) in places:
        return places[name], True
    if source.source in (place for _, place in map(named, own)):
        return source.source, True
    plain = [place for name, place in map(named, own) if not name and place != ANY]
    began = data.past[0].source if data.past else data.source
    copies = [each for each in plain if all(each != one.source for one in data.all_sources)]
    if source.source == began and copies:
        if len(set(copies)) > 1:
            cause = f"--data names {' and '.join(copies)}, and the run has {sources_text(data)}."
            raise HetnodeError(ErrorCode.BAD_OPTION, cause, "Give one, or give each as NAME=SOURCE.")
        return copies[0], True
    return source.source, is_own_run or (ANY in own and names_files(source.source))


def checked_locations(data: DataSpec, own: Sequence[str], is_own_run: bool) -> list[tuple[str, bool]]:
    """:func:`location_of` of all sources. Raises DATA_NOT_NAMED for a path that the owner has not named."""
    found = [location_of(each, data, own, is_own_run) for each in data.all_sources]
    lacking = [
        source
        for source, (place, may_open_files) in zip(data.all_sources, found, strict=True)
        if not may_open_files and names_files(place)
    ]
    if lacking:
        places = " and ".join(each.source for each in lacking)
        raise not_named(f"its data from {places}", "--data", *map(option_for, lacking))
    return found
