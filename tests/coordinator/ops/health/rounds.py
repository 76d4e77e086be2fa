"""Rounds of a healthy run, and ways in which one is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from coordinator.ops.health.figures import MeasuredRound, PayloadFigures
from protocol.types import PeerId

REPLICAS, STAGES = 4, 2
PEERS = [PeerId(f"peer-{index}") for index in range(REPLICAS)]


def healthy(count: int, seed: int = 0) -> list[MeasuredRound]:
    """Figures like those of a nano run: losses fall, cosines get smaller, two of the replicas are full."""
    noise, rounds = random.Random(seed), []
    for number in range(1, count + 1):
        loss = 2.0 + 3.5 * math.exp(-number / 8)
        payloads = [
            PayloadFigures(
                stage,
                PEERS[index],
                is_full=index < 2,
                cosine=(0.2 - 0.05 * stage) / (1 + 0.1 * number) * noise.uniform(0.8, 1.2),
                norm=0.5 * noise.uniform(0.9, 1.1),
                mean_norm=0.25,
                alike=0.1 * noise.uniform(0.8, 1.2),
                unlike=0.05 * noise.uniform(0.8, 1.2),
            )
            for stage in range(STAGES)
            for index in range(REPLICAS)
        ]
        rounds.append(
            MeasuredRound(
                number,
                work=dict.fromkeys(range(REPLICAS), 1.0),
                losses={index: loss + noise.uniform(-0.05, 0.05) for index in range(REPLICAS)},
                payloads=tuple(payloads),
                error_shares=tuple(1 - 1 / (1 + 0.2 * number) for _ in range(REPLICAS)),
                contributors=frozenset(PEERS),
            )
        )
    return rounds


def with_payloads(
    rounds: list[MeasuredRound], since: int, change: Callable[[PayloadFigures], PayloadFigures]
) -> list[MeasuredRound]:
    return [
        replace(each, payloads=tuple(map(change, each.payloads))) if each.round_number >= since else each
        for each in rounds
    ]


def with_losses(rounds: list[MeasuredRound], since: int, losses: dict[int, float]) -> list[MeasuredRound]:
    return [
        replace(each, losses={**each.losses, **losses}) if each.round_number >= since else each
        for each in rounds
    ]


def steady(losses: list[float]) -> list[MeasuredRound]:
    """Rounds of two replicas, both with these losses."""
    return [
        MeasuredRound(number, {0: 1.0, 1: 1.0}, {0: loss, 1: loss}, contributors=frozenset(PEERS[:3]))
        for number, loss in enumerate(losses, 1)
    ]


def without_peer(rounds: list[MeasuredRound], since: int, gone: PeerId) -> list[MeasuredRound]:
    """As after the ban of a peer: no payload of it counts from round `since` on."""

    def left(figures: MeasuredRound) -> MeasuredRound:
        payloads = tuple(payload for payload in figures.payloads if payload.owner != gone)
        return replace(figures, payloads=payloads, contributors=figures.contributors - {gone})

    return [left(each) if each.round_number >= since else each for each in rounds]
