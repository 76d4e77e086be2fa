"""Swarms of real processes in a world of network namespaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from node.security.credentials import folder_of
from protocol.spec.run import RunSpec
from protocol.types import Role
from tests.network.world import World
from tests.support.processes import COORDINATOR, ProcessSwarm

HOST = "coord"
"""Where the coordinator runs."""


class NetworkSwarm(ProcessSwarm):
    """As :class:`ProcessSwarm`: each member runs on the host of its name, the coordinator on "coord".

    Args:
        members: role and options of `hetnode join` of each node.
        listen: ``host:port`` of the coordinator; "" takes its IPv4 address.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        world: World,
        members: Mapping[str, tuple[Role, Sequence[str]]],
        listen: str = "",
    ) -> None:
        super().__init__(spec, folder, {name: role for name, (role, _) in members.items()})
        self._world, self._options = world, {name: options for name, (_, options) in members.items()}
        self._address = listen or f"{world.address[HOST]}:7700"

    def network_options(self, name: str) -> Sequence[str]:
        return self._options[name]

    def host_command(self, name: str) -> list[str]:
        return self._world.command(HOST if name == COORDINATOR else name, ())

    def start_relay(self, name: str, port: int = 7800) -> None:
        """Start `hetnode relay` on the host `name`, again at the same address; return when nodes find it."""
        where = [str(folder_of(self.folder / name / "identity.key", self.run_id))]
        if name not in self.started:
            invite = self.folder / f"{name}.invite"
            self.ask("invite", "create", "--role", "relay", "--folder", str(self.run), "--out", str(invite))
            where = [str(invite)]
        key = self.folder / name / "identity.key"
        self._spawn(name, ("relay", *where, "--identity", str(key), "--listen", f"0.0.0.0:{port}"), {})
        joined = self.log(name).count("relay of run")
        self.wait_until(lambda: self.log(name).count("relay of run") > joined, 120, f"the relay {name}")

    def wait_contributions(self, *names: str, seconds: float = 180) -> int:
        """Wait until each of these nodes has a payload in a round that is not decided yet.

        Returns: the newest round that is decided.
        """
        for name in names:
            self.wait_log(name, "joined run")
        now = self.round_number
        self.wait_until(
            lambda: all(max(self.contributions(name), default=0) > now for name in names),
            seconds,
            f"payloads of {names} after round {now}",
        )
        return self.round_number

    def missed_rounds(self, name: str, after: int) -> set[int]:
        """The rounds after `after`, all stages of which are decided, without a payload of the node."""
        decisions, peer = self.decisions(), self.peer(name)
        last = max(each["round"] for each in decisions) - 1
        have = {each["round"] for each in decisions if peer in each["owners"]}
        return set(range(after + 1, last + 1)) - have

    @property
    def aborted(self) -> int:
        """Stage rounds that were aborted so far."""
        return sum(not each["committed"] for each in self.decisions())

    def status_text(self) -> str:
        """What `hetnode status` shows."""
        return self.ask("status", str(self.run))
