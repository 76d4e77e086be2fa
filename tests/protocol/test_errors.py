"""Errors are stable, documented, and one message each."""

from __future__ import annotations

from protocol.errors import ErrorCode, HetnodeError


def test_labels_are_unique_and_found_again() -> None:
    assert len({code.label for code in ErrorCode}) == len(list(ErrorCode))
    assert all(ErrorCode.from_label(code.label) is code for code in ErrorCode)
    assert ErrorCode.from_label("from-the-future") is ErrorCode.BAD_REQUEST


def test_an_error_reads_as_one_message_of_code_cause_and_remedy() -> None:
    error = HetnodeError(ErrorCode.BAD_SPEC, "k 9 exceeds d 8.", "Use --k 8.")
    assert str(error) == "[bad-spec] k 9 exceeds d 8. Use --k 8."
