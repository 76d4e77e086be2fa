"""``hetnode join`` as one of the processes that torchrun has started on the hosts of one peer."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from node import command_runner
from node.hosts.launch import Launch, launch_of
from node.ipc.modules import WORKER
from node.ipc.template import own_template
from node.measure.hardware import available_threads
from protocol.roles import RoleWish

if TYPE_CHECKING:
    from node.hosts.leader import Leader

T = TypeVar("T")
Result = TypeVar("Result")
_DECIDED_BY_LEADER = (
    *("role", "data", "tokenizer", "initial", "sharded", "precision", "compile"),
    *("activation_checkpointing", "memory_limit"),
)
_FOLLOWER_MODULES = ("torch", WORKER, f"{__package__}.store_process")


def launch_for(role: RoleWish | None, several_devices: bool) -> Launch | None:
    """The launcher's rank for this process; None without a launcher. Raises HetnodeError BAD_OPTION."""
    launch = launch_of(os.environ)
    if launch is None:
        return None
    if several_devices:
        raise command_runner.bad_option(
            "Several devices contradict the environment of torchrun, which starts a process for each device.",
            "Name one with --device, or leave it out; or start 'hetnode join' without torchrun.",
        )
    if role is not RoleWish.REPLICA:
        raise command_runner.bad_option(
            "Only a full replica can have several processes, as the environment of torchrun demands.",
            "Give --role replica; or unset RANK and WORLD_SIZE.",
        )
    return launch


def leader_for(launch: Launch, device: str, sharded: bool | None, options: Mapping[str, object]) -> Leader:
    """The leader of the processes of `launch`, not yet begun; `options` are all of the command."""
    from node.hosts.leader import Leader  # noqa: PLC0415

    return Leader(launch, device, _choices(options), sharded)


def follow_leader(launch: Launch, device: str, threads: int, options: Mapping[str, object]) -> None:
    """Run the worker of this rank until the leader has ended. Raises as :func:`.follower.follow`."""
    own_template(_FOLLOWER_MODULES)  # imports torch while this process imports the rest

    from node.hosts.follower import follow  # noqa: PLC0415

    command_runner.run(follow(launch, device, _choices(options), threads or available_threads()))


async def dismiss_followers(leader: Leader) -> None:
    """Let the followers end, as there is nothing to do."""
    async with leader:
        await leader.gather()


def led(leader: Leader, main: Callable[[T], Awaitable[Result]]) -> Callable[[T], Awaitable[Result]]:
    """`main` with the followers of `leader`, which end with it."""

    async def leading(argument: T) -> Result:
        async with leader:
            return await main(argument)

    return leading


def _choices(options: Mapping[str, object]) -> dict[str, str]:
    """The options that the leader decides for all, as text. An invite is a secret: a hash stands for it."""
    run = sha256(str(options["run"]).encode()).hexdigest()[:8]
    return {name: str(options[name]) for name in _DECIDED_BY_LEADER} | {"run": run}
