"""What a member's worker says of the stages that it has built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.types import Part, StageRange


@dataclass(frozen=True)
class PartInfo:
    """Size in bytes and header (protocol.algorithm.digest) of something that this member holds."""

    nbytes: int
    header: str


@dataclass(frozen=True)
class Facts:
    """By stage: codecs, payload lengths (also of stage 0, whose payloads every member applies), parameters.

    `parts` is what this member holds: its stages, and the embedding of stage 0 where it does not host that.
    """

    codecs: Mapping[int, str]
    payload_bytes: Mapping[int, int]
    parameters: Mapping[int, int]
    parts: Mapping[tuple[int, Part], PartInfo]

    @classmethod
    def of_build(cls, stages: StageRange, reply: Mapping[str, Any]) -> Facts:
        """From the worker's answer to ``build``."""

        def by_stage(name: str) -> dict[int, Any]:
            return dict(zip(stages, reply[name], strict=True))

        return cls(
            by_stage("codecs"),
            {0: reply["embedding_payload_bytes"], **by_stage("payload_bytes")},
            by_stage("parameters"),
            {
                (each["stage"], Part(each["part"])): PartInfo(each["nbytes"], each["header"])
                for each in reply["parts"]
            },
        )

    def hosted_payload_bytes(self, stages: StageRange) -> dict[int, int]:
        return {stage: self.payload_bytes[stage] for stage in stages}
