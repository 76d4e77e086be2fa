"""A store with the S3 API, moto, as a process of its own, and servers in its place that do wrong."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from urllib.request import urlopen

import boto3
import pytest

from tests.support.ports import free_port
from tests.support.waiting import wait_until

BUCKET = "payloads"
MOTO = (sys.executable, "-c", "from moto.server import main; main()")
LOCATION = f"s3://{BUCKET}/pre/fix"
_ANSWERS = {
    "empty": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "full": b"HTTP/1.1 507 Insufficient Storage\r\ncontent-length: 0\r\n\r\n",
    "broken": b"no http at all\r\n\r\n",
    "closing": b"",
}


def credentials(endpoint: str) -> dict[str, str]:
    """The environment of a coordinator that uses the store at `endpoint`."""
    return {
        "AWS_ACCESS_KEY_ID": "the-id-of-a-key",
        "AWS_SECRET_ACCESS_KEY": "the-secret-of-a-key",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": endpoint,
    }


@dataclass(frozen=True)
class StoreProcess:
    """A store that runs."""

    endpoint: str
    process: subprocess.Popen[bytes]

    def names(self) -> list[str]:
        """The keys of all objects."""
        client = boto3.Session().client("s3")
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [each["Key"] for page in pages for each in page.get("Contents", ())]


@contextmanager
def object_store(host: str = "127.0.0.1") -> Iterator[StoreProcess]:
    """A store with an empty BUCKET, and the environment of a coordinator that uses it."""
    port = free_port()
    endpoint = f"http://{host}:{port}"
    process = subprocess.Popen(
        [*MOTO, "-H", host, "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **credentials(endpoint)},
    )

    def answers() -> bool:
        try:
            return bool(urlopen(f"{endpoint}/moto-api/data.json", timeout=5).read())
        except OSError:
            return False

    try:
        wait_until(answers, 60.0, "the store does not start")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in credentials(endpoint).items():
                patch.setenv(name, value)
            boto3.Session().client("s3").create_bucket(Bucket=BUCKET)
            yield StoreProcess(endpoint, process)
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def wrong_store(kind: str, nbytes: int) -> AsyncIterator[tuple[str, list[str]]]:
    """The endpoint of what is no honest store, and the first lines of all requests.

    It is "silent", "lying" with `nbytes` other bytes, "truncating", "endless", "redirecting" to itself,
    "dripping" a byte now and then, or one of those that answer the same to all requests.
    """
    requests: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            requests.append(head.partition(b"\r\n")[0].decode())
            if kind == "silent":
                await asyncio.Event().wait()
            found = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % nbytes
            if kind == "redirecting":
                where = f"http://127.0.0.1:{port}/inside"
                writer.write(f"HTTP/1.1 307 T\r\nlocation: {where}\r\ncontent-length: 0\r\n\r\n".encode())
            elif kind == "lying":
                writer.write(found + bytes(nbytes))
            elif kind == "truncating":
                writer.write(found + bytes(nbytes // 2))
            elif kind == "dripping":
                writer.write(found)
                for _ in range(nbytes):
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.2)
            elif kind == "endless":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
            else:
                writer.write(_ANSWERS[kind])
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", requests
    finally:
        server.close()
