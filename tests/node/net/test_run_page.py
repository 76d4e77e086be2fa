"""Fetching the page of a run from a web server that may be anybody's."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from node.net.run_page import fetch_page, page_url
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.run_page import MOST_BYTES, PATH
from tests.support.certificates import self_signed

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def served(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A web server on loopback; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def body(data: bytes) -> Answer:
    def answer(to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.send_header("content-length", str(len(data)))
        to.end_headers()
        to.wfile.write(data)

    return answer


def redirect(to_address: str) -> Answer:
    def answer(to: BaseHTTPRequestHandler) -> None:
        to.send_response(302)
        to.send_header("location", to_address)
        to.send_header("content-length", "0")
        to.end_headers()

    return answer


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://example.org/", f"https://example.org{PATH}"),
        ("https://example.org:8443/run/7", f"https://example.org:8443{PATH}"),
        ("run.example.org", f"https://run.example.org{PATH}"),
        ("run.example.org:8443/", f"https://run.example.org:8443{PATH}"),
        ("xn--mnchen-3ya.example", f"https://xn--mnchen-3ya.example{PATH}"),
        ("http://127.0.0.1:7780/", f"http://127.0.0.1:7780{PATH}"),
        ("http://[::1]:7780", f"http://[::1]:7780{PATH}"),
        ("http://localhost:7780", f"http://localhost:7780{PATH}"),
        ("tiny-0123456789ab-3ef8338073c03548f5367fc4b89c77e3", None),
        ("tiny", None),
        ("127.0.0.1:7700", None),
        ("peer-0", None),
        ("runs/tiny-1", None),
        ("file:///etc/passwd", None),
    ],
)
def test_what_names_a_page(text: str, url: str | None) -> None:
    assert page_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "http://example.org/",
        "http://10.0.0.1/",
        "https://",
        "https://a@example.org",
        "https://a:x/",
        "http://127.1",
    ],
)
def test_what_could_be_changed_on_the_way_or_names_no_host_is_refused(text: str) -> None:
    with pytest.raises(HetnodeError) as refused:
        page_url(text)
    assert refused.value.code is ErrorCode.BAD_ADDRESS
    assert "https://HOST/" in refused.value.remedy


def test_no_more_than_a_page_is_read() -> None:
    with served(body(b"x" * (1 << 20))) as port:
        assert len(fetch_page(f"http://127.0.0.1:{port}{PATH}")) == MOST_BYTES + 1


def test_a_page_may_lead_to_another_path_but_not_to_another_scheme_or_machine_without_encryption() -> None:
    with served(body(b"here")) as port:
        with served(redirect(f"http://127.0.0.1:{port}/there")) as first:
            assert fetch_page(f"http://127.0.0.1:{first}{PATH}") == b"here"
        for address in (f"https://127.0.0.1:{port}/", "http://192.0.2.1/", "file:///etc/passwd", "ftp://h/"):
            with served(redirect(address)) as first, pytest.raises(HetnodeError) as refused:
                fetch_page(f"http://127.0.0.1:{first}{PATH}")
            assert refused.value.code in (ErrorCode.BAD_ADDRESS, ErrorCode.COORDINATOR_UNREACHABLE)
            assert "error" not in str(refused.value)


def test_a_circle_ends() -> None:
    with served(redirect("/again")) as port, pytest.raises(HetnodeError) as refused:
        fetch_page(f"http://127.0.0.1:{port}{PATH}")
    assert refused.value.code is ErrorCode.COORDINATOR_UNREACHABLE


def test_a_server_that_sends_a_letter_now_and_then_is_left() -> None:
    left = threading.Event()

    def drip(to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.send_header("content-length", "100")
        to.end_headers()
        while not left.wait(0.05):
            to.wfile.write(b"x")

    with served(drip) as port:
        try:
            with pytest.raises(HetnodeError, match="no answer within"):
                fetch_page(f"http://127.0.0.1:{port}{PATH}", 0.5)
        finally:
            left.set()


def test_a_server_without_a_page_and_one_that_is_not_there_are_told_apart() -> None:
    with served(lambda to: to.send_error(404)) as port, pytest.raises(HetnodeError, match="404") as refused:
        fetch_page(f"http://127.0.0.1:{port}{PATH}")
    assert "hetnode coordinator --open" in refused.value.remedy
    with pytest.raises(HetnodeError, match="refused"):
        fetch_page(f"http://127.0.0.1:{port}{PATH}")


def test_the_certificate_of_the_server_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = self_signed("localhost", tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with served(body(b"here"), tls) as port:
        url = f"https://localhost:{port}{PATH}"
        with pytest.raises(HetnodeError, match=r"(?i)certificate"):
            fetch_page(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert fetch_page(url) == b"here"
