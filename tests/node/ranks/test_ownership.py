from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from node.core.model.shapes import parameter_shapes
from node.ranks.ownership import owners
from protocol.run_files.resolve import resolve


@given(st.dictionaries(st.text(), st.tuples(st.integers(1, 9), st.integers(1, 9))), st.integers(1, 5))
def test_each_tensor_has_one_owner_and_no_rank_has_more_than_the_mean_and_one_tensor(
    shapes: dict[str, tuple[int, int]], ranks: int
) -> None:
    found = owners(shapes, ranks)
    assert found.keys() == shapes.keys()
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    loads = [sum(sizes[name] for name in shapes if found[name] == rank) for rank in range(ranks)]
    assert max(loads) <= sum(loads) / ranks + max(sizes.values(), default=0)


def test_four_ranks_share_the_state_of_a_large_model_evenly() -> None:
    spec = resolve("1b")
    shapes = {
        (stage, name): shape
        for stage in range(spec.swarm.stages)
        for name, shape in parameter_shapes(spec, stage).items()
    }
    found = owners(shapes, 4)
    sizes = {key: math.prod(shape) for key, shape in shapes.items()}
    loads = [sum(sizes[key] for key in shapes if found[key] == rank) for rank in range(4)]
    assert max(loads) < 0.27 * sum(loads)
