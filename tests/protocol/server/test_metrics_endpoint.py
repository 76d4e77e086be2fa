"""The metrics endpoint: what it answers, and what it lets its clients cost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
import uvloop

from protocol.errors import ErrorCode, HetnodeError
from protocol.server.metrics import Figure, Metric
from protocol.server.metrics_endpoint import MOST_CONNECTIONS, MOST_REQUEST_BYTES, MetricsEndpoint
from protocol.trust.host_port import split_host_port
from tests.support.scrape import get, scrape

READS = Metric("hetnode_test_reads_total", "How often the figures were read.")
NAMES = Metric("hetnode_test_names", "Names.", ("name",))
ODD = 'a "name"\\ of\ntwo lines <b>'


class Endpoint(MetricsEndpoint):
    """Counts how often its figures are read."""

    reads = 0

    def read(self) -> Iterator[Figure]:
        self.reads += 1
        yield READS.of(self.reads)
        yield NAMES, {(ODD,): 2.5, ("b",): float("nan")}


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint("127.0.0.1:0")
    await endpoint.start(endpoint.read)
    yield endpoint
    await endpoint.close()


async def raw(endpoint: Endpoint, request: bytes) -> bytes:
    """All that comes back for these bytes; b"" where the connection is closed instead."""
    reader, writer = await asyncio.open_connection(*split_host_port(endpoint.address))
    answer = b""
    with suppress(OSError):
        writer.write(request)
        while data := await reader.read(1 << 16):
            answer += data
    writer.close()
    return answer


async def test_the_page_has_the_figures_and_those_of_the_process(endpoint: Endpoint) -> None:
    found = await scrape(endpoint.address)
    assert found("hetnode_test_reads_total") == 1
    assert found("hetnode_test_names", name=ODD) == 2.5
    assert found("hetnode_test_names", name="b") != found("hetnode_test_names", name="b")
    assert found("hetnode_event_loop_lag_seconds") >= 0
    assert found("process_resident_memory_bytes") > 1e6
    assert b"# HELP hetnode_test_reads_total How often" in found.page
    assert b"# TYPE hetnode_test_names gauge" in found.page


async def test_many_requests_cost_few_pages(endpoint: Endpoint) -> None:
    for _ in range(20):
        await scrape(endpoint.address)
    assert endpoint.reads <= 5


@pytest.mark.parametrize(
    ("target", "method", "status"),
    [("/metrics?x=1", "GET", 200), ("/", "GET", 404), ("/metrics/", "GET", 404), ("/metrics", "POST", 405)],
)
async def test_other_requests_are_answered_in_one_line(
    endpoint: Endpoint, target: str, method: str, status: int
) -> None:
    assert (await asyncio.to_thread(get, endpoint.address, target, method))[0] == status


@pytest.mark.parametrize(
    ("garbage", "answer"),
    [
        (b"\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", b"400"),
        (b"GET /metrics SMTP\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1 x\r\n\r\n", b"400"),
        (b"\xff" * 300 + b"\n\n", b"400"),
        (b"GET " + b"x" * (MOST_REQUEST_BYTES - 2), b"431"),
    ],
)
async def test_garbage_is_refused(endpoint: Endpoint, garbage: bytes, answer: bytes) -> None:
    assert (await raw(endpoint, garbage)).startswith(b"HTTP/1.1 " + answer)
    assert not endpoint.reads


async def test_a_megabyte_of_garbage_does_not_hold_the_endpoint_up(endpoint: Endpoint) -> None:
    await raw(endpoint, b"\0" * (1 << 20))
    await scrape(endpoint.address)


async def scrape_beside_slow_clients(endpoint: Endpoint) -> None:
    place = split_host_port(endpoint.address)
    slow = []
    for _ in range(200):
        reader, writer = await asyncio.open_connection(*place)
        writer.write(b"GET /metr")
        slow.append((reader, writer))
    found = await scrape(endpoint.address)
    assert found("hetnode_test_reads_total") == 1
    closed = [asyncio.ensure_future(reader.read()) for reader, _ in slow[: 200 - MOST_CONNECTIONS]]
    await asyncio.wait(closed, timeout=20)
    assert all(each.done() for each in closed), "the oldest connections are closed"
    for _, writer in slow:
        writer.close()
    for each in closed:
        each.exception()


async def test_200_slow_clients_do_not_keep_others_out(endpoint: Endpoint) -> None:
    await scrape_beside_slow_clients(endpoint)


def test_it_does_the_same_on_the_event_loop_of_production() -> None:
    async def main() -> None:
        endpoint = Endpoint("127.0.0.1:0")
        await endpoint.start(endpoint.read)
        await scrape_beside_slow_clients(endpoint)
        assert (await raw(endpoint, b"garbage\n\n")).startswith(b"HTTP/1.1 400")
        await raw(endpoint, b"\0" * (1 << 20))
        await endpoint.close()

    uvloop.run(main())


async def test_a_port_in_use_is_one_message(endpoint: Endpoint) -> None:
    with pytest.raises(HetnodeError) as error:
        MetricsEndpoint(endpoint.address)
    assert error.value.code is ErrorCode.PORT_IN_USE
    assert endpoint.address in error.value.cause
    assert "--metrics" in error.value.remedy


@pytest.mark.parametrize("address", ["7790", "127.0.0.1:x", "192.0.2.1:7790", "::1:7790"])
async def test_an_address_that_is_not_ours_is_refused(address: str) -> None:
    with pytest.raises(HetnodeError) as error:
        MetricsEndpoint(address)
    assert error.value.code is ErrorCode.BAD_ADDRESS


async def test_the_port_is_free_after_the_end() -> None:
    endpoint = Endpoint("127.0.0.1:0")
    await endpoint.start(endpoint.read)
    _, writer = await asyncio.open_connection(*split_host_port(endpoint.address))
    await endpoint.close()
    writer.close()
    with socket.create_server(split_host_port(endpoint.address)):
        pass


async def test_an_endpoint_that_was_never_started_closes_its_port() -> None:
    endpoint = Endpoint("127.0.0.1:0")
    await endpoint.close()
    with socket.create_server(split_host_port(endpoint.address)):
        pass
