"""What the live screen shows of evaluations: the newest figures, and samples without what moves a cursor."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from node.views.watch import run_view
from protocol.status import ModelEvaluation, ModelSample
from protocol.types import PeerId
from tests.builders import status_of


def shown(*evaluations: ModelEvaluation) -> str:
    out = StringIO()
    view = run_view(replace(status_of(), evaluations=evaluations), {}, 100)
    Console(file=out, width=100).print(view)
    return out.getvalue()


def test_the_newest_figures_and_samples_are_shown_as_text() -> None:
    peer = PeerId("")
    told = (
        ModelEvaluation(peer, 8, "wiki", {"loss": 3.25, "bits_per_byte": 1.5}),
        ModelEvaluation(peer, 6, "prompts", {}, (ModelSample("def ", "f():\n  [red]x[/red]\x1b[2J"),)),
        ModelEvaluation(peer, 4, "other prompts", {}, (ModelSample("old", "er"),)),
    )
    text = shown(*told)
    assert "wiki: loss 3.25, bits_per_byte 1.5, round 8" in text
    assert "after round 6  def f():" in text
    assert "  [red]x[/red]" in text
    assert "\x1b" not in text
    assert "older" not in text
    assert "none" in shown()
