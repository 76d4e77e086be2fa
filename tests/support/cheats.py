"""Contributors that cheat: what each sends in place of its honest payload, in a virtual swarm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch

from node.core.optimizer.outer_state import OuterState
from protocol.codec.payload import decode, encode
from protocol.math.clipping import payload_norm
from protocol.math.payload_layout import PayloadLayout
from protocol.math.topk import SparseTensor, sparsify
from tests.virtual.network import current_machine

Content = Mapping[str, SparseTensor]
CHEATS = "flip", "scale", "poison", "noise", "zeros", "copy", "stale", "adaptive"
HONEST_ROUNDS, STALE_ROUNDS = 8, 5
"""How long the adaptive cheat is honest, and how old the payloads of a stale one are."""


@dataclass(frozen=True)
class _Sent:
    """What was learned honestly, by (machine, round, stage), and the rounds of each machine so far."""

    honest: dict[tuple[str, int, int], bytes]
    rounds: dict[tuple[str, int], int]


def cheat(monkeypatch: pytest.MonkeyPatch, kinds: Mapping[str, str]) -> None:
    """Let each machine of `kinds` send payloads of that kind of :data:`CHEATS` from now on."""
    propose, sent = OuterState.propose, _Sent({}, {})

    def dishonest(self: OuterState, stage: int) -> bytes | None:
        name = current_machine()
        if (
            kinds.get(name) == "scale"
        ):  # what clipping has removed would come back, and grow until it is refused
            for error in self[stage].error.values():
                error.zero_()
        payload = propose(self, stage)
        number = sent.rounds[name, stage] = sent.rounds.get((name, stage), 0) + 1
        if payload is None:
            return None
        sent.honest[name, number, stage] = payload
        if name not in kinds:
            return payload
        outer = self[stage]
        data = _instead(kinds[name], sent, (name, number, stage), outer.layout)
        assert outer.pending is not None
        outer.pending["payload"] = data
        outer.received.expect(data)
        return data

    monkeypatch.setattr(OuterState, "propose", dishonest)


def _instead(kind: str, sent: _Sent, where: tuple[str, int, int], layout: PayloadLayout) -> bytes:
    name, number, stage = where
    honest = sent.honest[where]
    own = decode(layout, honest)
    match kind:
        case "flip":
            found = _flipped(own)
        case "scale":
            found = _scaled(_flipped(own), 7.9)
        case "poison":
            found = _scaled(_flipped(own), 0.5)
        case "noise":
            found = _noise(layout, payload_norm(own), 1000 * number + 10 * stage + ord(name[0]))
        case "zeros":
            found = _scaled(own, 0.0)
        case "copy":  # of what the first machine sent in the round before
            found = decode(layout, sent.honest.get(("a", number - 1, stage), honest))
        case "stale":
            found = decode(layout, sent.honest[name, max(1, number - STALE_ROUNDS), stage])
        case "adaptive":
            found = own if number <= HONEST_ROUNDS else _flipped(own)
        case _:
            raise AssertionError(kind)
    return encode(layout, found)


def _noise(layout: PayloadLayout, norm: float, seed: int) -> dict[str, SparseTensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {
        name: sparsify(torch.randn(shape, generator=generator), layout.tensors[name])
        for name, shape in layout.shapes.items()
    }
    return _scaled(found, norm / payload_norm(found))


def _scaled(content: Content, factor: float) -> dict[str, SparseTensor]:
    found = {}
    for name, sparse in content.items():
        assert sparse.magnitudes is not None, "the runs of these tests quantize"
        found[name] = replace(sparse, magnitudes=sparse.magnitudes * factor)
    return found


def _flipped(content: Content) -> dict[str, SparseTensor]:
    found = {}
    for name, sparse in content.items():
        assert sparse.magnitudes is not None, "the runs of these tests quantize"
        count = len(sparse.magnitudes)
        codes = (sparse.codes_s.to(torch.int64) + count) % (2 * count)
        found[name] = replace(sparse, codes_s=codes.to(sparse.codes_s.dtype))
    return found
