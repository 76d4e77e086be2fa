"""A web server on this machine that serves a folder, and answers wrongly on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class ShardServer(ThreadingHTTPServer):
    """Serves `folder`.

    Attributes:
        faults: by the ending of a path, how its next requests are answered wrongly, one after the other: a
            status, "wrong", "short", "endless", "cut" (half of what was told), or the place of a redirect.
        asked: names of the files of all requests.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.faults, self.asked = folder, dict[str, list[int | str]](), list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ShardServer

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.server.asked.append(name)
        fault = next(
            (each.pop(0) for end, each in self.server.faults.items() if name.endswith(end) and each), ""
        )
        path = self.server.folder / name
        if isinstance(fault, int) or not path.is_file():
            self.send_error(fault if isinstance(fault, int) else 404)
            return
        if ":" in fault or fault.startswith("/"):
            self.send_response(302)
            self.send_header("Location", fault.replace("/*", self.path))
            self.end_headers()
            return
        body = path.read_bytes()
        self.send_response(200)
        if fault == "short":
            body = body[1:]
        if fault == "wrong":
            body = bytes(byte ^ 1 for byte in body)
        if fault != "endless":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(OSError):  # the client has heard enough
            while fault == "endless":
                self.wfile.write(body)
            self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[ShardServer]:
    server = ShardServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
