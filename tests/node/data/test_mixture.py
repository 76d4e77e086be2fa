"""Mixtures of sources: which sample comes from where, and that nothing is left out or comes twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data.mixture import begun, counts_until, place_of
from node.data.own import check_own
from node.data.stream import KeptStreams, SampleStream, open_stream
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve, to_toml
from protocol.spec.change import changed, settings_text
from protocol.spec.run import RunSpec
from protocol.types import RunChange

CONTEXT = 16
weights = st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple)


@given(weights, st.integers(0, 2**63 - 1), st.integers(0, 50))
def test_every_window_of_all_weights_has_its_shares_and_every_source_counts_its_own_samples(
    weights: tuple[int, ...], seed: int, number: int
) -> None:
    whole = sum(weights)
    places = [place_of(n, weights, seed) for n in range(number * whole, (number + 2) * whole)]
    for block in (places[:whole], places[whole:]):
        assert Counter(source for source, _ in block) == dict(enumerate(weights))
    for source, weight in enumerate(weights):
        ordinals = [ordinal for its, ordinal in places if its == source]
        assert ordinals == list(range(number * weight, (number + 2) * weight))


@given(weights, st.integers(0, 9), st.integers(0, 500))
def test_counts_are_those_of_the_samples_before(weights: tuple[int, ...], seed: int, position: int) -> None:
    places = [place_of(n, weights, seed) for n in range(position)]
    found = Counter(source for source, _ in places)
    assert counts_until(position, weights, seed) == [found[each] for each in range(len(weights))]


@given(weights.filter(lambda found: len(found) > 1))
def test_samples_of_a_source_are_spread_evenly(weights: tuple[int, ...]) -> None:
    """Up to any sample, its count is off its share by less than two."""
    whole = sum(weights)
    counts = [0] * len(weights)
    for n in range(2 * whole):
        counts[place_of(n, weights, 3)[0]] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (n + 1) * weight / whole) < len(weights) + 1


def text_of(folder: Path, name: str, lines: int = 400) -> str:
    """Lines that say of which file and at which place they are."""
    path = folder / f"{name}.txt"
    path.write_text("".join(f"{name}{n:07}\n" for n in range(lines)))
    return f"text:{path}"


def mixture(folder: Path, **weights: int) -> list[dict[str, Any]]:
    return [
        {"name": name, "source": text_of(folder, name), "weight": weight} for name, weight in weights.items()
    ]


def spec_of(source: object, **data: object) -> RunSpec:
    settings = {"data.source": source, "model.context": CONTEXT, "seed": 5}
    return resolve("nano", overrides=settings | {f"data.{name}": each for name, each in data.items()})


def windows(stream: SampleStream, ordinals: range) -> list[str]:
    return [bytes(row).decode() for row in stream.read(ordinals).astype(np.uint8)]


def source_of(window: str) -> str:
    return next(letter for letter in window if letter.isalpha())


def test_sources_come_in_proportion_and_no_sample_comes_twice(tmp_path: Path) -> None:
    stream = open_stream(spec_of(mixture(tmp_path, a=3, b=1)))
    found = windows(stream, range(200))
    for start in range(0, 200, 4):
        assert Counter(map(source_of, found[start : start + 4])) == {"a": 3, "b": 1}
    assert len(set(found)) == 200
    again = open_stream(spec_of(mixture(tmp_path, a=3, b=1)))
    assert windows(again, range(150, 200)) == found[150:]
    assert windows(again, range(0)) == []
    np.testing.assert_array_equal(again.read([7, 3, 7]), stream.read([7, 3, 7]))


def test_a_mixture_of_one_is_its_source(tmp_path: Path) -> None:
    alone = open_stream(spec_of(text_of(tmp_path, "a")))
    assert windows(open_stream(spec_of(mixture(tmp_path, a=9))), range(50)) == windows(alone, range(50))


def test_held_out_text_is_mixed_alike_whatever_the_seed(tmp_path: Path) -> None:
    one = open_stream(spec_of(mixture(tmp_path, a=3, b=1)))
    other = open_stream(spec_of(mixture(tmp_path, a=3, b=1)).model_copy(update={"seed": 6}))
    np.testing.assert_array_equal(one.validation(8), other.validation(8))
    measured = [bytes(row).decode() for row in one.validation(8).astype(np.uint8)]
    assert Counter(map(source_of, measured)) == {"a": 6, "b": 2}
    assert not set(measured) & set(windows(one, range(120)))


def test_a_validation_set_of_its_own_is_measured_whole_and_the_training_text_stays(tmp_path: Path) -> None:
    plain = open_stream(spec_of(text_of(tmp_path, "a")))
    stream = open_stream(spec_of(text_of(tmp_path, "a"), validation=text_of(tmp_path, "v", 3)))
    assert windows(stream, range(60)) == windows(plain, range(60))
    assert {bytes(row).decode()[0] for row in stream.validation(3).astype(np.uint8)} <= set("v0\n1")
    several = spec_of(text_of(tmp_path, "a"), validation=mixture(tmp_path, v=1, w=1))
    measured = [bytes(row).decode() for row in open_stream(several).validation(8).astype(np.uint8)]
    assert Counter(map(source_of, measured)) == {"v": 4, "w": 4}


def test_sources_go_on_where_they_stood_when_the_mixture_changes(tmp_path: Path) -> None:
    """Three phases, a change of one setting that is no data, and back: no window of a source comes twice."""
    spec = spec_of(text_of(tmp_path, "a"))
    [a], [b], [c] = (mixture(tmp_path, **{name: 2}) for name in "abc")
    told: list[tuple[int, dict[str, Any]]] = [
        (30, {"data.source": [a, b]}),
        (57, {"inner.steps": 7}),
        (90, {"data.source": [c | {"weight": 1}, b]}),
        (121, {"data.source": a["source"]}),
    ]
    changes = [RunChange(n + 2, settings_text(each), "", at) for n, (at, each) in enumerate(told)]
    found, ends = [], [30, 57, 90, 121, 160]
    for count, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        # A node that was away opens the data of a phase without those before.
        found += windows(open_stream(changed(spec, changes[:count])), range(start, end))
    assert len(set(found)) == 160
    assert Counter(map(source_of, found[30:90])) == {"a": 30, "b": 30}
    assert Counter(map(source_of, found[90:120])) == {"b": 20, "c": 10}
    alone = windows(open_stream(spec), range(99))
    assert [each for each in found if source_of(each) == "a"] == alone


def test_what_is_open_is_not_read_again_after_a_change(tmp_path: Path) -> None:
    spec, kept = spec_of(mixture(tmp_path, a=1, b=1)), KeptStreams()
    before = open_stream(spec, kept=kept)
    told = settings_text({"data.source": mixture(tmp_path, b=1, c=1)})
    first = dict(kept)
    after = open_stream(changed(spec, [RunChange(2, told, "", 20)]), kept=kept)
    assert len(kept) == 2
    assert {id(each) for each in kept.values()} & {id(each) for each in first.values()}
    [b] = kept.keys() & first.keys()
    assert b[0].endswith("b.txt")
    fresh = open_stream(changed(spec, [RunChange(2, told, "", 20)]))
    assert windows(after, range(20, 40)) == windows(fresh, range(20, 40))
    assert windows(before, range(20)) == windows(open_stream(spec), range(20))
    # Text that is measured whole is another split of the same place.
    open_stream(spec_of(text_of(tmp_path, "a"), validation=text_of(tmp_path, "b")), kept=kept)
    assert [key[2] for key in kept] == [True, False]


def test_where_sources_stand_follows_from_the_specification(tmp_path: Path) -> None:
    spec = changed(
        spec_of(mixture(tmp_path, a=3, b=1)),
        [RunChange(2, settings_text({"data.source": mixture(tmp_path, b=1, c=1)}), "", 42)],
    )
    first, before = begun(spec.data.sources, spec.data, spec.seed)
    assert (first, before[1]) == (42, 0)
    assert before[0] == counts_until(42, (3, 1), spec.seed)[1] in (10, 11)


def test_a_source_that_is_used_many_times_is_named_before_the_run_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = mixture(tmp_path, a=1, b=1)
    text_of(tmp_path, "a", 40_000)
    open_stream(spec_of(sources).model_copy(update={"rounds": 200}))
    [warning] = [each.getMessage() for each in caplog.records if "this run uses each" in each.getMessage()]
    assert warning.startswith("b has ")


def code_of(spec: RunSpec, *own: str, is_own_run: bool = False) -> tuple[ErrorCode, str]:
    with pytest.raises(HetnodeError) as caught:
        open_stream(spec, own, is_own_run=is_own_run)
    return caught.value.code, f"{caught.value.cause} {caught.value.remedy}"


def test_each_source_needs_a_window_and_the_short_one_is_named(tmp_path: Path) -> None:
    sources = mixture(tmp_path, a=1, b=1)
    text_of(tmp_path, "b", 1)
    code, text = code_of(spec_of(sources), is_own_run=True)
    assert code is ErrorCode.DATA_TOO_SMALL
    assert "b.txt" in text
    # What is not measured needs no held-out window.
    (tmp_path / "b.txt").write_text("b" * 40)
    assert code_of(spec_of(sources), is_own_run=True)[0] is ErrorCode.DATA_TOO_SMALL
    open_stream(spec_of(sources, validation=text_of(tmp_path, "v")))


def test_the_owner_of_a_machine_names_each_path(tmp_path: Path) -> None:
    [a, b], copy = mixture(tmp_path, a=1, b=1), text_of(tmp_path, "copy")
    spec = spec_of([a, b])
    whole = windows(open_stream(spec), range(20))
    code, text = code_of(spec, f"a={a['source']}")
    assert code is ErrorCode.DATA_NOT_NAMED
    assert f"--data b={b['source']}" in text
    for own in (
        [f"a={a['source']}", f"b={b['source']}"],
        [a["source"], b["source"], "later=text:/not/there"],
        ["any"],
    ):
        assert windows(open_stream(spec, own, is_own_run=False), range(20)) == whole
    other = windows(open_stream(spec, ["any", f"b={copy}"], is_own_run=False), range(20))
    assert sum(one != another for one, another in zip(whole, other, strict=True)) == 10
    code, text = code_of(spec)  # all that lack at once
    assert f"--data a={a['source']} --data b={b['source']}" in text
    code, text = code_of(spec_of(a["source"], validation=b["source"]), a["source"])
    assert code is ErrorCode.DATA_NOT_NAMED
    assert "--data validation=" in text


def test_a_copy_of_the_first_data_is_none_of_later_data(tmp_path: Path) -> None:
    first, second, copy = (text_of(tmp_path, name) for name in "abc")
    spec = spec_of(first)
    later = changed(spec, [RunChange(2, settings_text({"data.source": second}), "", 10)])
    assert open_stream(spec, [copy], is_own_run=False).read([0]).shape == (1, CONTEXT + 1)
    assert code_of(later, copy)[0] is ErrorCode.DATA_NOT_NAMED
    open_stream(later, [copy, second], is_own_run=False)
    back = changed(
        spec,
        [
            *[RunChange(2, settings_text({"data.source": second}), "", 10)],
            RunChange(3, settings_text({"data.source": first}), "", 20),
        ],
    )
    assert source_of(windows(open_stream(back, [copy], is_own_run=False), range(20, 21))[0]) == "c"
    assert code_of(spec, copy, second)[0] is ErrorCode.BAD_OPTION
    # A mixture may get a source that had no name, and a rollback takes the mixture back.
    open_stream(spec, [f"web={first}"], is_own_run=False)
    # The owner may still say which text stands for data that has no name.
    stand_in = open_stream(later, [f"data={copy}"], is_own_run=False)
    assert source_of(windows(stand_in, range(10, 11))[0]) == "c"


@pytest.mark.parametrize(
    ("own", "code"),
    [
        (["a=builtin", "a=builtin", "b=hf:x/y", "any", "builtin"], None),
        (["a=builtin", "a=hf:x/y"], ErrorCode.BAD_OPTION),
        (["a=any"], ErrorCode.DATA_UNREADABLE),
        (["a="], ErrorCode.DATA_UNREADABLE),
        (["a"], ErrorCode.DATA_UNREADABLE),
        (["a=text:/not/there"], ErrorCode.DATA_UNREADABLE),
    ],
)
def test_what_an_owner_cannot_mean_is_refused_before_the_node_joins(
    own: list[str], code: ErrorCode | None
) -> None:
    found = None
    try:
        check_own(own)
    except HetnodeError as error:
        found = error.code
    assert found is code


MIXED = [{"name": "a", "source": "text:a"}, {"name": "b", "source": "text:b"}]


@pytest.mark.parametrize(
    ("source", "validation", "why"),
    [
        ([MIXED[0] | {"weight": 0}, MIXED[1]], "", r"data\.source\.0\.weight: .* greater than or equal to 1"),
        ([MIXED[0] | {"weight": -1}, MIXED[1]], "", "greater than or equal to 1"),
        ([MIXED[0] | {"weight": 0.7}, MIXED[1]], "", "write 7 and 3 for 0.7 and 0.3"),
        ([MIXED[0] | {"weight": True}, MIXED[1]], "", "neither a number nor a text"),
        ([MIXED[0], MIXED[1] | {"name": "a"}], "", "two sources have the name 'a'"),
        ([MIXED[0], MIXED[1] | {"source": "text:a"}], "", "data: 'text:a' is named twice"),
        (MIXED, "text:b", "data: 'text:b' is named twice"),
        (MIXED, [MIXED[0] | {"source": "text:c"}], "two sources have the name 'a'"),
        ([{"source": "text:a"}], "", "is no name of a source"),
        ([MIXED[0] | {"name": "any"}], "", "is no name of a source"),
        ([MIXED[0] | {"name": "data"}], "", "is no name of a source"),
        ([MIXED[0] | {"name": "A b"}], "", "should match pattern"),
        ([MIXED[0] | {"source": "a.txt"}], "", "unknown data source 'a.txt'"),
        ([MIXED[0] | {"part": 1}], "", "not permitted"),
        ([], "", "there is no data source"),
        ("", "", "there is no data source"),
        (MIXED, [], "there is no data source"),
        (5, "", r"data\.source: it is no source, and a list is written \[{name = "),
        ({"name": "a"}, "", "a list is written"),
        (["text:a"], "", "a list is written"),
        ('[{name="web"', "", r"data\.source: unknown data source '\[{name=.*: a list is written"),
        ([MIXED[0] | {"name": f"s{n}", "source": f"text:{n}"} for n in range(33)], "", "at most 32 items"),
    ],
)
def test_what_is_no_mixture_is_refused_by_name(source: object, validation: object, why: str) -> None:
    with pytest.raises(HetnodeError, match=why) as caught:
        spec_of(source, validation=validation)
    assert caught.value.code is ErrorCode.BAD_SPEC


def test_a_mixture_survives_a_run_file(tmp_path: Path) -> None:
    spec = spec_of(mixture(tmp_path, a=3, b=1), validation=[MIXED[0] | {"name": "c", "source": 'text:it"s'}])
    file = tmp_path / "run.toml"
    file.write_text(to_toml(spec))
    assert resolve(file=file) == spec


def test_a_run_that_begins_with_the_settings_of_a_changed_one_begins_anew(tmp_path: Path) -> None:
    spec = changed(spec_of(MIXED), [RunChange(2, settings_text({"data.source": "text:c"}), "", 10)])
    file = tmp_path / "run.toml"
    file.write_text(to_toml(spec))
    again = resolve(file=file)
    assert spec.data.past
    assert (again.data.past, again.began_as, again.data.source) == (None, None, "text:c")
