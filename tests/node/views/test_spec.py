"""What `hetnode spec show` prints."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from node.views.spec import spec_view
from protocol.run_files.resolve import resolve


def shown(**overrides: object) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as found:
        console.print(spec_view(resolve("nano", overrides=overrides)))
    return found.get()


def test_snapshots_of_the_embedding_are_shown_with_their_size() -> None:
    spec = resolve("nano")
    assert "snapshot" not in shown()
    [line] = [each for each in shown(**{"link.embedding_every": 5}).splitlines() if "snapshot" in each]
    assert "every 5 rounds" in line
    kilobytes = 2 * spec.model.vocabulary * spec.model.width / 1000
    assert f"{kilobytes:.1f} kB" in line


def test_activations_and_gradients_of_unlike_formats_have_a_line_each() -> None:
    assert len([each for each in shown().splitlines() if "k = 8 of d = 32" in each]) == 1
    text = shown(**{"link.dtype": "dither5", "link.gradient_dtype": "dither3"})
    activations, gradients = (each for each in text.splitlines() if "k = 8 of d = 32" in each)
    assert "activations dither5" in activations
    assert "6 B" in activations
    assert "gradients dither3" in gradients
    assert "4 B" in gradients


def test_tables_of_links_are_shown_with_their_memory() -> None:
    assert "link tables" not in shown()
    [line] = [each for each in shown(**{"link.table": True}).splitlines() if "link tables" in each]
    assert "8,192 parameters, 131.1 kB with moments" in line


def test_the_price_of_muon_is_shown() -> None:
    assert "optimizer" not in shown()
    [line] = [each for each in shown(**{"inner.optimizer": "muon"}).splitlines() if "optimizer" in each]
    spec = resolve("nano")
    assert f"{4 * spec.model.layers * spec.model.layer_matrices / 1000:.1f} kB less" in line
    assert "80.4% more operations" in line


@pytest.mark.parametrize(
    ("options", "is_bound", "warns"),
    [
        ({"inner.optimizer": "muon", "swarm.replicas": 0}, True, False),
        ({"inner.optimizer": "muon", "swarm.replicas": 0, "model.norms": "outputs"}, False, True),
        ({"inner.optimizer": "muon", "swarm.replicas": 1}, True, False),
        ({"inner.optimizer": "muon", "swarm.replicas": 1, "swarm.pipelines": 0}, False, False),
        ({"inner.optimizer": "muon", "swarm.replicas": 0, "link.k": 0}, False, False),
        ({"inner.optimizer": "adamw", "swarm.replicas": 0}, False, False),
    ],
)
def test_muon_beside_pipelines_says_where_layers_write_and_else_what_an_export_is_worth(
    options: dict[str, Any], is_bound: bool, warns: bool
) -> None:
    assert ("write into their 8 dimensions" in shown(**options)) is is_bound
    assert ("add a full replica" in shown(**options)) is warns
