"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

from node.command_runner import bad_option
from protocol.trust.public_name import public_name

MEGABIT = 1e6 / 8
"""In bytes."""


def option(help: str, *names: str, **more: Any) -> Any:
    """An option for ``Annotated``; `more` are arguments of :func:`typer.Option`."""
    return typer.Option(*names, help=help, **more)


def panel(name: str) -> Callable[..., Any]:
    """:func:`option` for options that the help shows below `name`."""
    return partial(option, rich_help_panel=name)


network = panel("Network")
guest = panel("A guest on this machine")
Device = Annotated[str, option("Torch device, such as cpu, cuda, cuda:1 or mps. 'auto': the best one here.")]
Threads = Annotated[int, option("CPU threads to compute with; 0 takes all.", min=0)]
RelayPortRange = Annotated[
    str | None,
    network(
        "TCP ports FIRST-LAST of a relay, one for each node behind it. Default: the hundred after its own, "
        "7801-7900 for port 443."
    ),
]
Metrics = Annotated[
    str | None,
    network(
        "HOST:PORT at which Prometheus reads metrics, http://HOST:PORT/metrics; port 0 takes a free one. Who "
        "reaches the port can read them. Default: none are served."
    ),
]
PublicName = Annotated[
    str | None,
    option(
        "Public name of this machine. Everybody who sees the run sees it, with the end of the peer id, and "
        "the log of the run keeps it. '' takes it back. Default: that of the last time; at first none."
    ),
]
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def records_as_options(**left_out: Collection[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command for typer: in place of a parameter whose type is a dataclass stand its fields.

    Annotation and default of a field make the option. Fields that `left_out` names for the parameter keep
    their defaults and are no options of this command.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        records: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
        expanded = {name: _options_of(kind, left_out.get(name, ())) for name, kind in records.items()}

        @wraps(command)
        def call(**given: Any) -> None:
            for name, kind in records.items():
                given[name] = kind(**{field.name: given.pop(field.name) for field in expanded[name]})
            command(**given)

        options = [
            each
            for own in signature(command).parameters.values()
            for each in expanded.get(own.name, [own.replace(annotation=hints[own.name])])
        ]
        call.__signature__ = Signature(  # type: ignore[attr-defined]
            [each.replace(kind=Parameter.KEYWORD_ONLY) for each in options]
        )
        call.__annotations__ = {each.name: each.annotation for each in options}
        return call

    return decorated


def _options_of(record: Any, left_out: Collection[str]) -> list[Parameter]:
    hints = get_type_hints(record, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(record)
        if field.name not in left_out
    ]


def settings_of(given: Iterable[str], option: str) -> dict[str, Any]:
    """Values by name, from texts such as ``link.k=8``: values of TOML, lists of JSON, or else plain text.

    Raises HetnodeError BAD_OPTION.
    """
    found = dict[str, Any]()
    for text in given:
        name, is_pair, value = text.partition("=")
        if not is_pair or not re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)*", name.strip()):
            raise bad_option(f"{option} '{text:.80}' is not NAME=VALUE.", f"Write it like {option} link.k=8.")
        try:
            found[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            found[name.strip()] = _of_json(value)
    return found


def _of_json(text: str) -> Any:
    """The list in `text`, such as messages show it; without one `text` itself."""
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), list):
            return found
    return text


def seconds_of(text: str, option: str) -> float:
    """A duration such as ``90s``, ``15m``, ``24h`` or ``7d``. Raises HetnodeError BAD_OPTION."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])", text.strip())
    if match is None or not float(match[1]):
        raise bad_option(f"{option} '{text}' is not a duration.", "Write it like 90s, 15m, 24h or 7d.")
    return float(match[1]) * _UNITS[match[2]]


def chosen_name(given: str | None) -> str | None:
    """`given` as other peers see it; None stays None. Raises HetnodeError BAD_OPTION."""
    try:
        return given and public_name(given)
    except ValueError as error:
        raise bad_option(
            f"This --name cannot be used: {error}.",
            "Take 1 to 32 letters, digits and spaces; quotes, brackets and < > & are not allowed.",
        ) from None


def port_range(text: str | None) -> range | None:
    """Ports as ``7703-7802``; None without a text. Raises HetnodeError BAD_OPTION."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text.strip())
    if match is None or not 0 < int(match[1]) <= int(match[2]) < 65536:
        raise bad_option(f"--relay-ports '{text}' is not a range of ports.", "Write it like 7703-7802.")
    return range(int(match[1]), int(match[2]) + 1)
