"""``metrics.jsonl``: one JSON object per line for everything that people may want to plot or count."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from coordinator.state.events import (
    AnchorDiverged,
    AssignmentReserved,
    Event,
    PeerBanned,
    PeerJoined,
    PeerLeft,
    PeerLost,
    PeerQuarantined,
    PeerRetreated,
    PeerStruck,
    PlanAdopted,
    RoundAborted,
    RoundCommitted,
    RunFinished,
)
from protocol.status import Measurement, fields_of


class MetricsFile:
    """Appends to the file at `path`; every line is flushed. Use as a context manager.

    Half a line, left by a process that was killed, is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        whole = path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(whole)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, at: float, event: str, fields: Mapping[str, Any]) -> None:
        """Add ``{"time": at, "event": event, **fields}``. Numbers that JSON does not know become null."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }
        self._file.write(json.dumps({"time": round(at, 3), "event": event, **finite}) + "\n")
        self._file.flush()

    def record_measurement(self, at: float, measurement: Measurement) -> None:
        self.write(at, "measurement", fields_of(measurement))

    def record(self, event: Event) -> None:  # noqa: PLR0912
        """Add what `event` says, if it is of interest here."""
        match event:
            case RoundCommitted() | RoundAborted():
                decision = event.decision
                fields: dict[str, Any] = {
                    "stage": decision.stage,
                    "round": decision.round_number,
                    "committed": decision.committed,
                    "owners": [entry.descriptor.owner for entry in decision.entries],
                    "payload_bytes": sum(entry.descriptor.nbytes for entry in decision.entries),
                    "next_epoch": decision.next_epoch,
                    "reason": decision.reason,
                }
                self.write(event.at, "decision", fields)
            case PlanAdopted():
                plan = event.plan
                fields = {
                    "epoch": plan.epoch,
                    "from_round": plan.from_round,
                    "first_sample": plan.first_sample,
                    "replicas": {
                        replica.name: [member.peer for member in replica.members] for replica in plan.replicas
                    },
                    "reason": plan.reason,
                }
                self.write(event.at, "plan", fields)
            case PeerJoined():
                fields = {"peer": event.peer, "change": "joined", "role": event.role.value}
                self.write(event.at, "peer", fields)
            case PeerLeft():
                self.write(event.at, "peer", {"peer": event.peer, "change": "left", "reason": event.reason})
            case PeerLost():
                fields = {"peer": event.peer, "change": "lost", "silent_seconds": event.silent_seconds}
                self.write(event.at, "peer", fields)
            case PeerRetreated():
                fields = {"peer": event.peer, "change": "retreated", "epoch": event.epoch}
                self.write(event.at, "peer", {**fields, "reason": event.reason})
            case AssignmentReserved():
                place = event.reservation
                fields = {
                    "peer": place.peer,
                    "replica": place.replica,
                    "position": place.position,
                    "stages": str(place.stages),
                }
                self.write(event.at, "place", fields)
            case PeerBanned():
                fields = {"peer": event.peer, "change": "banned", "reason": event.reason}
                self.write(event.at, "peer", fields)
            case PeerStruck():
                fields = {"peer": event.peer, "change": "strike", "round": event.round_number}
                self.write(event.at, "peer", {**fields, "reason": event.reason})
            case PeerQuarantined():
                fields = {"peer": event.peer, "change": "quarantined", "strikes": event.strikes}
                self.write(event.at, "peer", fields)
            case AnchorDiverged():
                fields = {
                    "peer": event.peer,
                    "stage": event.stage,
                    "round": event.round_number,
                    "part": event.part,
                    "digest": event.digest,
                    "expected": event.expected,
                }
                self.write(event.at, "diverged", fields)
            case RunFinished():
                self.write(event.at, "finished", {})
            case _:
                pass
