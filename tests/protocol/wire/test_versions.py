"""Old and new programs meet where their versions of the protocol overlap."""

from __future__ import annotations

import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.wire import versions
from protocol.wire.versions import common_version


@pytest.fixture(autouse=True)
def from_4_to_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "OLDEST_PROTOCOL", 4)
    monkeypatch.setattr(versions, "PROTOCOL_VERSION", 6)


@pytest.mark.parametrize(
    ("newest", "oldest", "common"),
    [
        *[(6, 0, 6), (5, 0, 5), (9, 6, 6), (9, 1, 6), (4, 2, 4), (5, 5, 5)],
        *[(4, 9, None), (9, 7, None), (3, 1, None), (7, 0, None), (0, 0, None), (2**32 - 1, 0, None)],
    ],
)
def test_the_newest_version_that_both_speak(newest: int, oldest: int, common: int | None) -> None:
    if common is not None:
        assert common_version("the node", "the coordinator", newest, oldest) == common
        return
    with pytest.raises(HetnodeError) as caught:
        common_version("the node", "the coordinator", newest, oldest)
    assert caught.value.code is ErrorCode.VERSION_MISMATCH
    assert "versions 4 to 6" in caught.value.cause


def test_the_side_that_is_behind_is_named_to_both() -> None:
    with pytest.raises(
        HetnodeError, match=r"The node speaks version 3 .*, the coord.* Update the node, .* older one\."
    ):
        common_version("the node", "the coordinator", 3)
    with pytest.raises(HetnodeError, match=r"speaks versions 7 to 8 .* Update the coordinator, .* older"):
        common_version("the node", "the coordinator", 8, 7)
