"""Commands and options that went: the one table of them, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from node.command_runner import bad_option
from protocol.errors import HetnodeError

_SPEC = ("swarm up", "coordinator", "import", "plan", "experiment one")
_JOIN = ("join", "service install")
_FIGURES = "Type 'python -m benchmarks.plan_figures' in a checkout: it draws the figures of the paper."
_VERBOSE = "Give it before the command: hetnode --verbose COMMAND; or set HETNODE_VERBOSE=1."

COMMANDS: Mapping[str, str] = {
    "checkpoint assemble": "'hetnode export --format checkpoint PART PART ... FOLDER' does it.",
    "dashboard": "'hetnode status --dashboard RUN' prints the address.",
    "experiment list": "'hetnode experiment run --list MATRIX.toml' shows the rows and what is left.",
    "invite ensure": "'hetnode invite create --keep 3m --out FILE' does it; give --uses and --expires, too.",
    "receipt check": "'hetnode receipt verify --log FOLDER FILE' counts it again from the log.",
    **{f"plan {name}": _FIGURES for name in ("figure2", "figure3", "scaling")},
}
"""What to do instead, by the words of a command or an argument of it."""

OPTIONS: Mapping[tuple[str, ...], Mapping[str, str]] = {
    _SPEC: {
        "--k": "Give --set link.k=K.",
        "--seed": "Give --set seed=SEED.",
        "--tokenizer": "Give --set data.tokenizer=byte, or the path of a file.",
    },
    ("coordinator",): {
        "--no-relay": "Give --relay none.",
        "--relay-listen": "Give --relay HOST:PORT.",
        "--no-dashboard": "Give --dashboard none.",
        "--alarm-sigma": "Leave it out: 6 robust standard deviations are unusual in every run.",
    },
    ("coordinator", "relay", *_JOIN): {"--verbose": _VERBOSE, "-v": _VERBOSE},
    _JOIN: {
        "--devices": "Give --device all, --device 0,1,2,3 or --device cpu:N.",
        "--config": "Give --expect-spec FILE.",
        "--dial-only": "Give --listen none.",
        "--plain": "Set TERM=dumb.",
    },
}
"""By commands: options of the first pages that went, with what to do instead."""


def refuse_removed(words: Sequence[str]) -> None:
    """Refuse a command line that uses a command or an option of this module's tables.

    Raises HetnodeError BAD_OPTION, which says what to do instead.
    """
    named = [word for word in words if not word.startswith("-")]
    one, two = " ".join(named[:1]), " ".join(named[:2])
    for name in (one, two):
        if name in COMMANDS:
            raise _gone(f"'hetnode {name}'", COMMANDS[name])
    for commands, options in OPTIONS.items():
        if one in commands or two in commands:
            for word in words:
                if (option := word.partition("=")[0]) in options:
                    raise _gone(f"{option} of 'hetnode {one if one in commands else two}'", options[option])


def _gone(what: str, instead: str) -> HetnodeError:
    return bad_option(f"There is no {what} any more.", instead)
