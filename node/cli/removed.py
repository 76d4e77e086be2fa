"""Commands and options that went: the one table of them, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from node.command_runner import bad_option
from protocol.errors import HetnodeError

_SPEC = ("swarm up", "coordinator", "import", "plan", "experiment one")
_JOIN = ("join", "service install")
_FIGURES = "Type 'python -m benchmarks.plan_figures' in a checkout: it draws the figures of the paper."
_TOKENIZER = "Leave it out, and put the file into the folder of the run: it is found by its hash."
_COMPUTE = "Give --compute {0}=VALUE."
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
    ("import", "plan", "experiment one"): {"--inner-steps": "Give --set inner.steps=H."},
    ("import",): {
        "--data": "Give --set data.source=SOURCE.",
        "--context": "Give --set model.context=L.",
        "--rounds": "Give --set rounds=N.",
        "--replicas": "Give --set swarm.replicas=N.",
        "--pipelines": "Give --set swarm.pipelines=N.",
        "--stages": "Give --set swarm.stages=S.",
    },
    ("plan",): {
        "--microbatches": "Give --set inner.microbatches=N.",
        "--stages": "Give --set swarm.stages=S.",
    },
    ("experiment one",): {
        "--data": "Give --set data.source=SOURCE.",
        "--rounds": "Give --set rounds=N.",
        "--stages": "Give --set swarm.stages=S.",
        "--variation": "Give --set variation.NAME=VALUE.",
        "--validate-every": "Leave it out; a matrix for 'hetnode experiment run' has it.",
    },
    ("experiment run", "experiment one"): {
        f"--{name}": _COMPUTE.format(name.replace("-", "_"))
        for name in ("jobs", "threads", "device", "precision", "resident", "save-every")
    }
    | {
        f"--{no}{name}": f"Give --compute {name.replace('-', '_')}={value}."
        for name in ("compile", "activation-checkpointing")
        for no, value in (("", "true"), ("no-", "false"))
    },
    ("generate", "eval", "export"): {"--tokenizer": _TOKENIZER},
    ("generate",): {
        "--top-k": "Leave it out: the 40 likeliest tokens are sampled; --temperature 0 takes the likeliest."
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
    ("relay", "doctor"): {"--invite-file": "Give the file in the place of the invite."},
    ("relay",): {
        "--join-seconds": "Leave it out; 'timeout 60 hetnode relay ...' ends a relay after a minute."
    },
    ("doctor",): {
        "--preset": "Give the name of the preset in the place of the run.",
        "--threads": "Leave it out: all threads are measured.",
        "--port-mapping": "Leave it out: the router is asked.",
        "--no-port-mapping": "Give --advertise HOST: then the router is not asked.",
    },
    ("credit",): {"--skip": "Give --most N: up to 100,000 peers are shown."},
    ("explain",): {"--events": "Type 'hetnode explain event N...' with the numbers in the answer."},
    ("rollback",): {"--resume": "Type 'hetnode run resume' after the rollback."},
    ("spec show",): {"--config": "Give the file in the place of the preset."},
    ("incident export",): {
        "--to-round": "Leave it out: the file has the whole log.",
        "--why": "Leave it out, and tell it beside the file.",
    },
    ("receipt get",): {"--out": "Write the output to a file: hetnode receipt get RUN > FILE."},
    ("swarm up",): {"--initial": "Give --config FOLDER/run.toml, as 'hetnode import' has written it."},
}
"""By commands: the options that went, with what to do instead."""


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
