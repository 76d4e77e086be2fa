"""Reads a metrics endpoint as Prometheus does."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def get(address: str, target: str = "/metrics", method: str = "GET") -> tuple[int, bytes]:
    """Status and body of one request to ``host:port``."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request(method, target)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class Scraped:
    """The samples of one page."""

    def __init__(self, page: bytes) -> None:
        families = list(text_string_to_metric_families(page.decode()))
        samples = [sample for family in families for sample in family.samples]
        self.page = page
        self.names = {sample.name for sample in samples}
        self._values: Samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value for sample in samples
        }

    def __call__(self, name: str, /, **labels: str) -> float:
        """The value of one sample. KeyError without it."""
        return self._values[name, frozenset(labels.items())]

    def labels_of(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for found, labels in self._values if found == name]


async def scrape(address: str) -> Scraped:
    """The page at ``host:port``, in which a server of this event loop may listen."""
    status, body = await asyncio.to_thread(get, address)
    assert status == 200, (status, body)
    return Scraped(body)


async def scrape_until(address: str, ready: Callable[[Scraped], bool]) -> Scraped:
    """The first page that is `ready`: a page may be a second old. AssertionError after 20 s."""
    ends = time.monotonic() + 20
    while not ready(found := await scrape(address)):
        assert time.monotonic() < ends, found.page.decode()
        await asyncio.sleep(0.05)
    return found
