"""Fixtures of the swarms in one process."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from tests.support.cached_decode import cached_decode


@pytest.fixture(scope="module", autouse=True)
def decoded_once() -> Iterator[None]:
    """The replicas of a swarm, and swarms that are compared, decode the same payloads."""
    decode = cached_decode()
    with patch("node.core.optimizer.received.decode", decode):
        yield
