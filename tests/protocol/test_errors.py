"""Errors are stable, documented, and one message each."""

from __future__ import annotations

import re

from protocol.errors import ErrorCode, HetnodeError
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text()


def test_the_page_of_errors_lists_every_code_with_its_exit_status_and_no_other() -> None:
    documented = dict(re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", PAGE, re.MULTILINE))
    assert documented == {code.label: str(int(code.exit_code)) for code in ErrorCode}


def test_labels_are_unique_and_found_again() -> None:
    assert len({code.label for code in ErrorCode}) == len(list(ErrorCode))
    assert all(ErrorCode.from_label(code.label) is code for code in ErrorCode)
    assert ErrorCode.from_label("from-the-future") is ErrorCode.BAD_REQUEST


def test_an_error_reads_as_one_message_of_code_cause_and_remedy() -> None:
    error = HetnodeError(ErrorCode.BAD_SPEC, "k 9 exceeds d 8.", "Use --k 8.")
    assert str(error) == "[bad-spec] k 9 exceeds d 8. Use --k 8."
