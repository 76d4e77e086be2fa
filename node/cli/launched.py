"""``hetnode join`` as one of the processes that torchrun has started on the hosts of one peer."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from node import command_runner
from node.ipc.launch import Launch, launch_of
from node.ipc.template import own_template
from node.measure.hardware import available_threads
from protocol.roles import RoleWish

if TYPE_CHECKING:
    from node.cli.join import JoinOptions
    from node.ipc.leader import Leader

_DECIDED_BY_LEADER = (
    *("run", "role", "data", "tokenizer", "initial", "sharded", "precision", "compile"),
    *("activation_checkpointing", "memory_limit"),
)
_FOLLOWER_MODULES = ("torch", "node.worker.worker")


def launch_for(chosen: JoinOptions) -> Launch | None:
    """The launcher's rank for this process; None without a launcher. Raises HetnodeError BAD_OPTION."""
    launch = launch_of(os.environ)
    if launch is None:
        return None
    if chosen.devices is not None:
        raise command_runner.bad_option(
            "--devices contradicts the environment of torchrun, which starts a process for each device.",
            "Leave out --devices; or start 'hetnode join' without torchrun.",
        )
    if chosen.role is not RoleWish.REPLICA:
        raise command_runner.bad_option(
            "Only a full replica can have several processes, as the environment of torchrun demands.",
            "Give --role replica; or unset RANK and WORLD_SIZE.",
        )
    return launch


def leader_for(chosen: JoinOptions, launch: Launch) -> Leader:
    """The leader of the processes of `launch`, not yet begun."""
    from node.ipc.leader import Leader  # noqa: PLC0415

    return Leader(launch, chosen.device, _choices(chosen), chosen.sharded)


def follow_leader(chosen: JoinOptions, launch: Launch, lifeline: int | None) -> None:
    """Run the worker of this rank until the leader has ended. Raises as :func:`node.ipc.follower.follow`."""
    own_template(_FOLLOWER_MODULES)  # imports torch while this process imports the rest

    from node.ipc.follower import follow  # noqa: PLC0415

    threads = chosen.threads or available_threads()
    command_runner.run(follow(launch, chosen.device, _choices(chosen), threads), lifeline)


def dismiss_followers(leader: Leader) -> None:
    """Let the followers end, as there is nothing to do."""

    async def dismiss() -> None:
        async with leader:
            await leader.gather()

    command_runner.run(dismiss())


def _choices(chosen: JoinOptions) -> dict[str, str]:
    """The options that the leader decides for all, as text. An invite is a secret: a hash stands for it."""
    from hashlib import sha256  # noqa: PLC0415

    hidden = replace(chosen, run=sha256((chosen.run or "").encode()).hexdigest()[:8])
    return {name: str(getattr(hidden, name)) for name in _DECIDED_BY_LEADER}
