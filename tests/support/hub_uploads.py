"""A server on this machine that takes uploads as the Hugging Face Hub does, and refuses them on demand."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TOKEN = "hf_of_a_test"


class UploadServer(ThreadingHTTPServer):
    """The repositories of one owner.

    Attributes:
        private: by name of a repository, whether it is.
        files: of all repositories together, by path.
        commits: the messages of all commits.
        refusals: how many of the next commits are refused.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Uploads)
        self.private = dict[str, bool]()
        self.files, self.objects = dict[str, bytes](), dict[str, bytes]()
        self.commits, self.refusals = list[str](), 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Uploads(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: UploadServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            known = self.server.files.items()
            return self._answer(
                200, [{"type": "file", "oid": "0", "size": len(data), "path": name} for name, data in known]
            )
        return self._answer(404, {})

    def do_POST(self) -> None:
        body = self._body()
        path = urlsplit(self.path).path
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "no token"})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            is_private = wanted.get("private") or wanted.get("visibility") == "private"
            self.server.private.setdefault(name, bool(is_private))
            return self._answer(200, {"url": f"{self.server.endpoint}/{name}"})
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = [each["path"] for each in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            return self._answer(
                200,
                {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]},
            )
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            actions = {"upload": {"href": f"{self.server.endpoint}/lfs"}}
            return self._answer(
                200, {"transfer": "basic", "objects": [{**each, "actions": actions} for each in wanted]}
            )
        return self._commit(body.decode()) if "/commit/" in path else self._answer(404, {})

    def do_PUT(self) -> None:
        from hashlib import sha256  # noqa: PLC0415

        data = self._body()
        self.server.objects[sha256(data).hexdigest()] = data
        self._answer(200, {})

    def _commit(self, body: str) -> None:
        if self.server.refusals:
            self.server.refusals -= 1
            return self._answer(403, {"error": "may not write"})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    self.server.commits.append(value["summary"])
                case "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    self.server.files[value["path"]] = self.server.objects[value["oid"]]
                case "deletedFile":
                    del self.server.files[value["path"]]
        url = f"{self.server.endpoint}/owner/name/commit/{'a' * 40}"
        return self._answer(200, {"success": True, "commitUrl": url, "commitOid": "a" * 40})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def hub_for_uploads() -> Iterator[UploadServer]:
    """Takes uploads until the end of the block."""
    with UploadServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
