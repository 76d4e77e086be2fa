"""The payloads that a peer holds and serves, by round and hash."""

from __future__ import annotations


class PayloadStore:
    """Payload bytes of the newest rounds of one stage.

    Its size is bounded by its user, who puts in only payloads whose announced length was checked.

    Args:
        keep_rounds: when a newer round comes in, older ones beyond this many are dropped.
    """

    def __init__(self, keep_rounds: int) -> None:
        self._keep = keep_rounds
        self._rounds: dict[int, dict[str, bytes]] = {}

    def put(self, round: int, sha256: str, payload: bytes) -> None:
        """Hold `payload`, whose hash is `sha256`."""
        self._rounds.setdefault(round, {})[sha256] = payload
        for old in sorted(self._rounds)[: -self._keep]:
            del self._rounds[old]

    def get(self, round: int, sha256: str) -> bytes | None:
        return self._rounds.get(round, {}).get(sha256)

    def forget(self, before_round: int) -> None:
        """Drop the rounds before `before_round`."""
        self._rounds = {round: held for round, held in self._rounds.items() if round >= before_round}
