"""How much refused callers write into the log."""

from __future__ import annotations

import logging

import pytest

from protocol.server.refusal_log import RefusalLog

log = logging.getLogger(__name__)


async def test_a_caller_that_is_refused_without_end_writes_a_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = RefusalLog(log)
    for _ in range(10_000):
        refusals.record("bad", ValueError("no " * 1000))
    refusals.record("other", ValueError("also no"))
    assert len(caplog.records) == 11
    assert len(caplog.text) < 10_000
    assert "refused other: also no" in caplog.text
    refusals.summarize()
    assert "9990 more refused calls of bad" in caplog.text
    lines = len(caplog.records)
    refusals.summarize()
    assert len(caplog.records) == lines


async def test_many_callers_write_a_bounded_number_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog(log)
    for number in range(5000):
        refusals.record(f"caller-{number}", ValueError("no"))
    assert len(caplog.records) == 100
    refusals.summarize()
    assert len(caplog.records) == 111
    assert "more refused calls of" in caplog.records[-1].message
