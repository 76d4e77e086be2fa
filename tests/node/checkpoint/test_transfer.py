"""A checkpoint's part from several donors: who is asked for what, and what ends up in the file."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.checkpoint import transfer as checkpoint_transfer
from node.checkpoint.download import (
    LONG_PATIENCE,
    PATIENCE,
    CheckpointDownload,
    Donors,
    Download,
    TransferError,
    WrongBytes,
)
from node.checkpoint.transfer import fetch_checkpoint
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import CHUNK_BYTES, chunk_count, chunk_range, digest_of
from protocol.types import Part, PeerId, StateRecord

HEADER = "a header"
DONORS = ("alice", "bob", "carol")
CONTENT = os.urandom(3 * CHUNK_BYTES + 1000)


# The decisions


def test_each_piece_is_requested_once_before_any_is_requested_twice() -> None:
    download = Download({0, 1, 2}, Donors(("a", "b")))
    asked = [download.next_for(donor) for donor in ("a", "b", "a", "b", "b", "b", "a")]
    assert asked == [0, 1, 2, 0, 2, None, 1]


def test_a_failed_piece_is_requested_from_another_donor() -> None:
    download = Download({0}, Donors(("a", "b")))
    assert download.next_for("a") == 0
    download.failed("a", 0, "gone")
    assert download.next_for("b") == 0
    download.arrived("b", 0)
    assert download.is_complete


def test_a_donor_that_sent_wrong_bytes_is_never_asked_again_and_its_reason_stays() -> None:
    donors = Donors(("a", "b"))
    download = Download({0, 1}, donors)
    download.next_for("a"), download.next_for("a")
    download.failed("a", 0, "wrong bytes", has_lied=True)
    download.failed("a", 1, "gone")
    assert download.next_for("a") is None
    assert donors.usable == ("b",)
    assert donors.reasons == {"a": "wrong bytes"}
    assert Download({5}, donors).next_for("a") is None  # nor in another download from the same donors


@pytest.mark.parametrize(("has_sent", "patience"), [(False, PATIENCE), (True, LONG_PATIENCE)])
def test_a_donor_is_excluded_after_failures_in_a_row_and_one_that_has_sent_after_more(
    has_sent: bool, patience: int
) -> None:
    donors = Donors(("a",))
    download = Download({0, 1}, donors)
    for _ in range(PATIENCE - 1):
        download.failed("a", 0, "gone")
    if has_sent:
        download.arrived("a", 1)
    for _ in range(patience - 1 if has_sent else 0):
        download.failed("a", 0, "gone")
        assert not download.is_hopeless
    download.failed("a", 0, "gone")
    assert download.is_hopeless


@given(data=st.data(), pieces=st.integers(0, 6))
def test_a_download_always_ends_complete_or_hopeless(data: st.DataObject, pieces: int) -> None:
    donors = Donors(DONORS)
    download = Download(set(range(pieces)), donors)
    under_way: list[tuple[str, int]] = []
    while not (download.is_complete or download.is_hopeless):
        for donor in DONORS:
            if (piece := download.next_for(donor)) is not None:
                assert donor in donors.usable
                assert piece in download.missing
                assert (donor, piece) not in under_way
                under_way.append((donor, piece))
        assert max(Counter(piece for _, piece in under_way).values()) <= 2
        donor, piece = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        match data.draw(st.sampled_from(["right", "none", "wrong"])):
            case "right":
                download.arrived(donor, piece)
            case outcome:
                download.failed(donor, piece, outcome, has_lied=outcome == "wrong")
        under_way = [each for each in under_way if each[1] in download.missing]
    assert download.is_complete or not donors.usable


# The transfer, with donors of our own


def record_of(content: bytes) -> StateRecord:
    digest = digest_of(HEADER, hashes_of(content))
    return StateRecord("run", 0, Part.STAGE, 10, digest, tuple(map(PeerId, DONORS)))


def hashes_of(content: bytes) -> list[bytes]:
    chunks = (chunk_range(len(content), index) for index in range(chunk_count(len(content))))
    return [hashlib.sha256(content[chunk.start : chunk.stop]).digest() for chunk in chunks]


class Honest:
    """Sends what it is asked for. `asked` are the indices."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.asked: list[int] = []

    async def __call__(self, index: int) -> bytes:
        self.asked.append(index)
        if index == 0:
            return b"".join(hashes_of(self.content))
        chunk = chunk_range(len(self.content), index - 1)
        return self.content[chunk.start : chunk.stop]


class Dead(Honest):
    """Refuses from its `after`th answer on."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self._after = after

    async def __call__(self, index: int) -> bytes:
        answer = await super().__call__(index)
        if len(self.asked) > self._after:
            raise TransferError("it has died")
        return answer


class Silent(Honest):
    async def __call__(self, index: int) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError


class Liar(Honest):
    """Names the right chunks, and sends others."""

    async def __call__(self, index: int) -> bytes:
        answer = await super().__call__(index)
        return answer if index == 0 else bytes(len(answer))


Donor = Callable[[int], Awaitable[bytes]]


async def fetch(
    into: Path, donors: Mapping[str, Donor], content: bytes = CONTENT, seconds: float = 20.0
) -> None:
    async def ask(donor: str, index: int, size: int) -> bytes:
        answer = await donors[donor](index)
        if len(answer) != size:
            raise WrongBytes("of another length")
        return answer

    download = CheckpointDownload(record_of(content), {}, len(content), HEADER, into)
    await fetch_checkpoint(download, donors, seconds, ask)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.checkpoint.transfer.FIRST_PAUSE", 0.0)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
async def test_a_part_of_any_size_arrives(tmp_path: Path, nbytes: int) -> None:
    content = CONTENT[:nbytes]
    await fetch(tmp_path / "new" / "part", {"alice": Honest(content)}, content)
    assert (tmp_path / "new" / "part").read_bytes() == content


async def test_several_donors_share_the_work(tmp_path: Path) -> None:
    content = os.urandom(20 * CHUNK_BYTES)
    donors = {name: Honest(content) for name in DONORS}
    await fetch(tmp_path / "part", donors, content)
    assert (tmp_path / "part").read_bytes() == content
    chunks = {name: {index for index in donor.asked if index} for name, donor in donors.items()}
    assert all(chunks.values())


async def test_other_donors_replace_one_that_dies_during_a_download(tmp_path: Path) -> None:
    await fetch(tmp_path / "part", {"alice": Dead(after=2), "bob": Honest(), "carol": Dead()})
    assert (tmp_path / "part").read_bytes() == CONTENT


async def test_a_silent_donor_does_not_delay_the_end(tmp_path: Path) -> None:
    await fetch(tmp_path / "part", {"alice": Silent(), "bob": Honest()})
    assert (tmp_path / "part").read_bytes() == CONTENT


async def test_a_donor_that_sends_wrong_chunks_is_named_and_never_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    liar = Liar()
    with caplog.at_level(logging.WARNING):
        await fetch(tmp_path / "part", {"alice": liar, "bob": Honest()})
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert len([index for index in liar.asked if index]) <= 2  # both were asked for before the first came
    assert any("alice sent wrong bytes" in record.getMessage() for record in caplog.records)


async def test_a_donor_with_a_wrong_list_of_chunks_is_not_asked_for_chunks(tmp_path: Path) -> None:
    other = Honest(os.urandom(len(CONTENT)))
    with pytest.raises(HetnodeError, match="alice: its list of chunks is not") as failure:
        await fetch(tmp_path / "part", {"alice": other})
    assert failure.value.code is ErrorCode.STATE_UNAVAILABLE
    assert set(other.asked) == {0}
    assert not (tmp_path / "part").exists()


async def test_every_donor_is_in_the_message_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(HetnodeError) as failure:
        await fetch(tmp_path / "part", {"alice": Dead(), "bob": Liar(), "carol": Dead(after=1)})
    assert failure.value.code is ErrorCode.STATE_UNAVAILABLE
    for reason in ("alice: it has died", "bob: chunk", "carol: it has died"):
        assert reason in failure.value.cause


async def test_without_donors_or_time_it_is_unavailable(tmp_path: Path) -> None:
    for donors, seconds in ({}, 20.0), ({"alice": Silent()}, 0.1):
        with pytest.raises(HetnodeError) as failure:
            await fetch(tmp_path / "part", donors, seconds=seconds)
        assert failure.value.code is ErrorCode.STATE_UNAVAILABLE


async def test_an_interrupted_download_continues(tmp_path: Path) -> None:
    into = tmp_path / "part"
    with pytest.raises(HetnodeError):
        await fetch(into, {"alice": Dead(after=3)})  # the list and two chunks
    later = Honest()
    await fetch(into, {"bob": later})
    assert into.read_bytes() == CONTENT
    assert len(later.asked) == 1 + 2
    again = Honest()
    await fetch(into, {"carol": again})
    assert again.asked == [0]


async def test_a_chunk_being_written_when_the_last_donor_is_excluded_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_given_up = threading.Event()
    write = checkpoint_transfer.write_chunk

    def write_late(into: Path, start: int, data: bytes) -> None:
        if start == CHUNK_BYTES:
            assert is_given_up.wait(20)
        write(into, start, data)

    class Failing(Dead):
        async def __call__(self, index: int) -> bytes:
            if len(self.asked) == 3 + LONG_PATIENCE - 1:
                is_given_up.set()
            return await super().__call__(index)

    monkeypatch.setattr(checkpoint_transfer, "write_chunk", write_late)
    with pytest.raises(HetnodeError):
        await fetch(tmp_path / "part", {"alice": Failing(after=3)})  # the list and two chunks
    later = Honest()
    await fetch(tmp_path / "part", {"bob": later})
    assert sorted(later.asked) == [0, 3, 4]


@pytest.mark.parametrize("earlier", [b"", b"short", CONTENT[:-1], CONTENT + b"x", bytes(len(CONTENT))])
async def test_a_download_replaces_any_earlier_content_of_the_file(tmp_path: Path, earlier: bytes) -> None:
    (tmp_path / "part").write_bytes(earlier)
    await fetch(tmp_path / "part", {"alice": Honest()})
    assert (tmp_path / "part").read_bytes() == CONTENT


@pytest.mark.parametrize("trouble", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None])
async def test_a_disk_error_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: int | None
) -> None:
    """`trouble`: of a disk without room; None: there is no folder."""

    def full(*_: object) -> NoReturn:
        assert trouble is not None
        raise OSError(trouble, os.strerror(trouble))

    if trouble is not None:
        monkeypatch.setattr("node.checkpoint.transfer.write_chunk", full)
    into = tmp_path / "part" if trouble is not None else Path("/dev/null/part")
    with pytest.raises(HetnodeError, match="cannot be written") as failure:
        await fetch(into, {"alice": Honest()})
    assert failure.value.code is ErrorCode.DISK_FULL
    assert ("Make room" in failure.value.remedy) == (trouble is not None)
