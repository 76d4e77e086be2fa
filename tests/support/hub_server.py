"""A server on this machine that answers like the Hugging Face Hub for one data set, and fails on demand."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

NAME = "owner/name"
_COMMIT = "a" * 40


class HubServer(ThreadingHTTPServer):
    """The data set NAME with `files`, each below one folder.

    Attributes:
        failures: how many of the next requests are answered with `status`.
        requested: paths of all requests.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.failures, self.status = files, 0, 502
        self.requested: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.server.requested.append(path)
        if self.server.failures:
            self.server.failures -= 1
            return self._answer(self.server.status, b"")
        if "/resolve/" in path:
            return self._file(path.split("/resolve/")[1].partition("/")[2])
        if "/tree/" in path:
            return self._tree(path.split("/tree/")[1].partition("/")[2])
        if path.startswith(f"/api/datasets/{NAME}"):
            siblings = [{"rfilename": name} for name in self.server.files]
            return self._json({"_id": "1", "id": NAME, "sha": _COMMIT, "tags": [], "siblings": siblings})
        return self._answer(404, b"{}")

    def _file(self, name: str) -> None:
        data = self.server.files.get(name)
        if data is None:
            return self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": '"x"', "X-Repo-Commit": _COMMIT, "Accept-Ranges": "bytes"}
        if (asked := self.headers.get("Range")) is None:
            return self._answer(200, data, headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        return self._answer(206, part, headers)

    def _tree(self, folder: str) -> None:
        entries = [
            {"type": "file", "oid": "f" * 40, "size": len(data), "path": name}
            for name, data in self.server.files.items()
            if name.rpartition("/")[0] == folder
        ]
        if not folder:
            below = sorted({name.split("/")[0] for name in self.server.files})
            entries = [{"type": "directory", "oid": "d" * 40, "size": 0, "path": each} for each in below]
        return self._json(entries)

    def _json(self, content: object) -> None:
        self._answer(200, json.dumps(content).encode())

    def _answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def hub_with(files: Mapping[str, bytes]) -> Iterator[HubServer]:
    """Serve `files`, and make this process take the server for the hub."""
    with HubServer(files) as server, pytest.MonkeyPatch.context() as patch:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        patch.setattr("datasets.config.HF_ENDPOINT", server.endpoint)
        patch.setattr("huggingface_hub.constants.ENDPOINT", server.endpoint)
        patch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
