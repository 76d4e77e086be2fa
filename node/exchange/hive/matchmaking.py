"""The group of a round: matched by the coordinator, or found by hivemind's own search through the DHT."""

from __future__ import annotations

from dataclasses import dataclass

from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.dht import DHT
from hivemind.p2p import P2P

from node.exchange.hive.records import group_bits

_SHORTEST_WINDOW = 3.0


@dataclass(frozen=True)
class SearchTimes:
    """The times of one search for a group, in seconds."""

    window: float
    """Peers that begin to search within this time find each other. With a shorter window groups split."""
    request: float
    """Wait for the answer to a request to join a group; shorter than the window."""
    search: float
    """The end of the search; the rest of the exchange is for the payloads."""

    @classmethod
    def of_exchange(cls, deadline: float) -> SearchTimes:
        """The times for an exchange of `deadline` seconds.

        A group that is complete starts at once. So a long window costs time only if a peer is missing, and
        peers that are slow find the group.
        """
        window = max(_SHORTEST_WINDOW, deadline / 4)
        return cls(window, window / 2, deadline / 2)


class RoundStep(StepControl):  # type: ignore[misc]  # hivemind has no type information
    """A step that starts as soon as its group is known, without a trigger."""

    @property
    def triggered(self) -> bool:
        return True


class _RoundKey(GroupKeyManager):  # type: ignore[misc]  # hivemind has no type information
    """The DHT key under which the peers of one round find each other."""

    async def update_key_on_group_assembled(self, group_info: GroupInfo) -> None:
        pass  # hivemind would draw new random bits here; the round alone names the group


class RoundMatchmaking(Matchmaking):  # type: ignore[misc]  # hivemind has no type information
    """hivemind's matchmaking, for one round at a time."""

    def __init__(self, p2p: P2P, schema_hash: bytes, dht: DHT, *, prefix: str, **options: object) -> None:
        super().__init__(p2p, schema_hash, dht, prefix=prefix, **options)
        self.group_key_manager = _RoundKey(dht, prefix, "", None)
        self._matched: GroupInfo | None = None

    def prepare(
        self, round_number: int, expected: int, matched: GroupInfo | None, times: SearchTimes
    ) -> None:
        """Set up the next :meth:`look_for_group`.

        Args:
            expected: the group is complete, and starts at once, when it has this many peers.
            matched: the group that the coordinator has matched; None searches the DHT.
        """
        self.group_key_manager.group_bits = group_bits(round_number)
        # The search for leaders has its own copy of this number.
        self.target_group_size = self.potential_leaders.target_group_size = expected
        # The search for leaders has its own copy of the window, too.
        self.min_matchmaking_time = self.potential_leaders.min_matchmaking_time = times.window
        self.request_timeout = times.request
        self._matched = matched

    async def look_for_group(self, step: StepControl) -> GroupInfo | None:
        if self._matched is None:
            return await super().look_for_group(step)
        async with self.looking_for_group(step):  # hivemind's step expects the state that this sets
            return self._matched
