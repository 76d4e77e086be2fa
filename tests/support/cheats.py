"""Contributors that cheat: what each sends in place of its honest payload, in a swarm of production nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from node.core.optimizer.outcome import Outcome
from node.core.optimizer.outer_stage import CommitProbe
from node.core.optimizer.outer_state import OuterState
from node.ipc.stored_payload import name_of
from protocol.codec.payload import decode, encode
from protocol.math.clipping import payload_norm
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import SparseTensor, sparsify
from tests.support.faults import FaultPlan
from tests.support.paths import ROOT

Content = Mapping[str, SparseTensor]
CHEATS = "flip", "scale", "poison", "noise", "zeros", "copy", "altered", "echo", "stale", "adaptive"
KIND_VARIABLE = "HETNODE_TEST_CHEAT"
"""Names the kind of a real node that cheats (tests.support.cheat_site)."""
HONEST_ROUNDS, STALE_ROUNDS = 8, 5
"""How long the adaptive cheat is honest, and how old the payloads of a stale one are."""


@dataclass
class _Known:
    """What one cheat knows of one stage: its honest payloads, and what others sent in the last round."""

    honest: list[bytes] = field(default_factory=list)
    others: list[Content] = field(default_factory=list)


def cheat(monkeypatch: pytest.MonkeyPatch, kinds: Mapping[str, str], who: Callable[[], str]) -> None:
    """Let each machine of `kinds` send payloads of that kind of :data:`CHEATS` from now on.

    Args:
        who: the name of the machine whose code runs.
    """
    propose, commit = OuterState.propose, OuterState.commit
    known: dict[tuple[str, int], _Known] = {}

    def dishonest(self: OuterState, stage: int, share: float = 1.0) -> bytes | None:
        name = who()
        if kinds.get(name) == "scale":  # what clipping has removed would come back, and grow until refused
            for error in self[stage].error.values():
                error.zero_()
        payload = propose(self, stage, share)
        if payload is None or name not in kinds:
            return payload
        mine, outer = known.setdefault((name, stage), _Known()), self[stage]
        mine.honest.append(payload)
        seed = 1000 * len(mine.honest) + 10 * stage + ord(name[0])
        data = encode(outer.layout, _instead(kinds[name], mine, outer.layout, seed))
        assert outer.pending is not None
        outer.pending["payload"] = data
        outer.received.expect(data)
        return data

    def watched(
        self: OuterState,
        stage: int,
        round_number: int,
        outcome: Outcome,
        mine_included: bool,
        probe: CommitProbe | None = None,
    ) -> str:
        if (who(), stage) in known:
            pending = self[stage].pending
            own = None if pending is None else name_of(pending["payload"])
            assert isinstance(outcome, Sequence)
            sent = [payload for payload, _ in outcome if name_of(payload) != own]
            known[who(), stage].others = [self[stage].received.decoded(payload) for payload in sent]
        return commit(self, stage, round_number, outcome, mine_included, probe)

    monkeypatch.setattr(OuterState, "propose", dishonest)
    monkeypatch.setattr(OuterState, "commit", watched)


class CheatPlan(FaultPlan):
    """Members of a swarm of processes that cheat, each in its own way, and no other faults."""

    def __init__(self, folder: Path, kinds: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._kinds = kinds

    def environment(self, member: str) -> dict[str, str]:
        if member not in self._kinds:
            return {}
        site = ROOT / "tests" / "support" / "cheat_site"
        return {KIND_VARIABLE: self._kinds[member], "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT)))}


def _instead(kind: str, known: _Known, layout: PayloadLayout, seed: int) -> Content:  # noqa: PLR0911  a table
    number = len(known.honest)
    own = decode(layout, known.honest[-1])
    match kind:
        case "flip":
            return _flipped(own)
        case "scale":
            return _scaled(_flipped(own), 7.9)
        case "poison":
            return _scaled(_flipped(own), 0.5)
        case "noise":
            return _noise(layout, payload_norm(own), seed)
        case "zeros":
            return _scaled(own, 0.0)
        case "copy":  # of the first payload of the round before
            return known.others[0] if known.others else own
        case "altered":  # such a copy with noise of 30 %
            return _altered(layout, known.others[:1], seed) if known.others else own
        case "echo":  # what all others sent in the round before, with noise of 30 %
            return _altered(layout, known.others, seed) if known.others else own
        case "stale":
            return decode(layout, known.honest[max(0, number - 1 - STALE_ROUNDS)])
        case "adaptive":
            return own if number <= HONEST_ROUNDS else _flipped(own)
    raise AssertionError(kind)


def _altered(layout: PayloadLayout, copied: Sequence[Content], seed: int) -> Content:
    """The mean of these payloads with noise of 30 % of its norm, encoded anew."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, shape in layout.shapes.items():
        dense = torch.zeros(shape)
        for content in copied:
            content[name].add_to(dense.view(-1), 1 / len(copied))
        noise = torch.randn(shape, generator=generator)
        found[name] = sparsify(dense + 0.3 * dense.norm() / noise.norm() * noise, layout.tensors[name])
    return found


def _noise(layout: PayloadLayout, norm: float, seed: int) -> Content:
    generator = torch.Generator().manual_seed(seed)
    found = {
        name: sparsify(torch.randn(shape, generator=generator), layout.tensors[name])
        for name, shape in layout.shapes.items()
    }
    return _scaled(found, norm / payload_norm(found))


def _scaled(content: Content, factor: float) -> Content:
    found = {}
    for name, sparse in content.items():
        assert sparse.magnitudes is not None, "the runs of these tests quantize"
        found[name] = replace(sparse, magnitudes=sparse.magnitudes * factor)
    return found


def _flipped(content: Content) -> Content:
    found = {}
    for name, sparse in content.items():
        assert sparse.magnitudes is not None, "the runs of these tests quantize"
        count = len(sparse.magnitudes)
        codes = (sparse.codes_s.to(torch.int64) + count) % (2 * count)
        found[name] = replace(sparse, codes_s=codes.to(sparse.codes_s.dtype))
    return found
