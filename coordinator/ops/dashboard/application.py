"""The pages of the dashboard and their data: all read-only, but for the form that takes the token."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.ops.dashboard.about import About
from coordinator.ops.dashboard.files import StaticFiles
from coordinator.ops.dashboard.past import Past
from coordinator.ops.dashboard.port import COOKIE_SECONDS, ReaderAccess
from coordinator.ops.dashboard.queries import (
    MOST_LETTERS,
    Explanations,
    Queries,
    Query,
    Record,
    shown,
    without_addresses,
)
from coordinator.ops.dashboard.source import Records
from coordinator.ops.dashboard.stream import MOST_STREAMS, EventStream, LiveRun
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.run_page import PATH, RUN_PAGE

log = logging.getLogger(__name__)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
_FOR_GOOD = "public, max-age=31536000, immutable"
_PIECE = 64 << 10
"""A slow reader has that much of an answer in memory, not all of it."""
_MOST_FORM_BYTES = 4096
MOST_CONNECTIONS = 512
REQUEST_SECONDS = 10.0
"""From the beginning of a connection, or the end of an answer, to the end of the next request's head."""
ANSWER_SECONDS = 60.0
"""From a request to the end of its answer, but for streams of events, which bound each event."""
STREAM_PATH = "/events"
PAGES = {
    "/": ("run", "Run"),
    "/swarm": ("swarm", "Swarm"),
    "/rounds": ("rounds", "Rounds"),
    "/network": ("network", "Network"),
    "/leaderboard": ("leaderboard", "Leaderboard"),
}
_STATUS = {
    ErrorCode.BAD_REQUEST: 404,
    ErrorCode.BAD_OPTION: 404,
    ErrorCode.NO_HISTORY: 404,
    ErrorCode.RATE_LIMITED: 503,
}
Answer = Callable[[Request], Awaitable[Response]]


@dataclass
class _Kept:
    """An answer that serves all readers for `seconds`."""

    seconds: float
    at: float = float("-inf")
    body: bytes = b""


class Application:
    """The ASGI application. It runs on one event loop; its records are made there.

    Args:
        threads: where long work is done.
        questions: asks for explanations.
    """

    def __init__(
        self,
        source: Records,
        past: Past,
        access: ReaderAccess,
        threads: Executor,
        questions: Queries,
        explanations: Explanations,
    ) -> None:
        self._source, self._access, self._threads = source, access, threads
        self._queries = Queries(threads)

        def told(read: Callable[..., Record]) -> Callable[..., Record]:
            """For readers without a token: they learn no address of anybody."""
            return read if access.needs_token else lambda *given: without_addresses(read(*given))

        self._of_peer, self._peer_now = told(past.peer), told(source.peer)
        self._files = StaticFiles()
        self.live = LiveRun(told(source.event), self._files.version)
        self._templates = Environment(
            loader=PackageLoader(__package__),
            autoescape=select_autoescape(default=True),
            undefined=StrictUndefined,
            auto_reload=False,
        )
        # Now: another version may be installed while this process runs.
        for name in self._templates.list_templates():
            self._templates.get_template(name)
        self._kept: dict[str, _Kept] = {}
        routes = [
            *(Route(path, self._page(name, title)) for path, (name, title) in PAGES.items()),
            Route("/peer/{peer}", self._page("peer", "Peer")),
            Route("/round/{round:int}", self._page("round", "Round")),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route(STREAM_PATH, self._events),
            Route("/api/status", self._record("status", told(source.whole))),
            Route("/api/predictions", self._record("predictions", told(source.predictions))),
            Route("/api/peer", self._peer),
            Route(PATH, self._run_page),
            Route("/api/explain", self._query(questions, told(explanations.explain))),
            *(
                Route(f"/api/{answer.__name__}", self._query(self._queries, told(answer)))
                for answer in (
                    *(past.losses, past.speed, past.traffic, past.evaluations),
                    *(past.rounds, past.round, past.credits),
                )
            ),
            Route("/static/{version}/{path:path}", self._static),
        ]
        failures: dict[Any, Any] = {
            HTTPException: self._refused,
            HetnodeError: self._without_answer,
            Exception: self._failed,
        }
        self._routes: ASGIApp = Starlette(routes=routes, exception_handlers=failures)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message.get("headers", ())}
                ours = ((name.encode(), value.encode()) for name, value in _HEADERS.items())
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name, value) for name, value in ours if name not in given),
                ]
            await send(message)

        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            answer = self._refusal(request) or self._routes
            await answer(scope, receive, with_headers)
        except asyncio.CancelledError:
            raise
        except Exception:  # Starlette answers first, and then raises it again
            log.debug("a request of the dashboard failed", exc_info=True)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not be served; None if it may."""
        path: str = request.scope["path"]  # the URL that Starlette builds contains the Host, which may lie
        if not self._access.admits_host(request.headers.get("host", "")):
            return PlainTextResponse("This dashboard is read at a name of its own machine only.\n", 421)
        if request.method not in ("GET", "HEAD") and (request.method, path) != ("POST", "/login"):
            return PlainTextResponse("This dashboard is read-only.\n", 405, {"allow": "GET, HEAD"})
        is_open = path in ("/login", PATH) or path.startswith("/static/")
        if is_open or self._access.admits(request.cookies.get(self._access.cookie_name)):
            return None
        if path == STREAM_PATH or path.startswith("/api/"):
            return _json({"error": "The token of this run is needed."}, 401)
        return RedirectResponse("/login", 303)

    def _page(self, name: str, title: str) -> Answer:
        async def answer(request: Request) -> Response:
            about = self._source.about() if name == "run" else About()
            return self._rendered("page.html", request, page=name, title=title, about=about)

        return answer

    def _sign_in(self, request: Request, status: int = 200) -> Response:
        """The form for the token, below what everybody may know of a run that is published."""
        front = self._source.page()
        about = self._source.front() if front else About()
        values = {"title": "Sign in", "failed": status != 200, "about": about, "front": front}
        return self._rendered("login.html", request, status, **values)

    def _rendered(self, template: str, request: Request, status: int = 200, **values: Any) -> Response:
        text = self._templates.get_template(template).render(
            static=f"/static/{self._files.version}",
            version=self._files.version,
            run=shown(self._source.run, 120),
            path=request.scope["path"],
            home="/",
            pages=[(path, label) for path, (_, label) in PAGES.items()],
            published=self._source.page() is not None,
            **{"about": About(), "front": None, **values},
        )
        return Response(text, status, media_type="text/html")

    async def _login(self, request: Request) -> Response:
        if request.method != "POST":
            if not self._access.needs_token:
                return RedirectResponse("/", 303)
            return self._sign_in(request)
        form = bytearray()
        async for piece in request.stream():
            form += piece
            if len(form) > _MOST_FORM_BYTES:
                raise HTTPException(413)
        given = parse_qs(form.decode("ascii", "replace"), max_num_fields=4).get("token", [""])[0]
        if not self._access.is_token(given):
            return self._sign_in(request, 403)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            self._access.cookie_name,
            self._access.cookie,
            max_age=COOKIE_SECONDS,
            httponly=True,
            samesite="strict",
            secure=request.headers.get("x-forwarded-proto", request.url.scheme) == "https",
        )
        return answer

    async def _events(self, request: Request) -> Response:
        if self.live.open_streams >= MOST_STREAMS or self.live.closing:
            return _json({"error": "Too many pages are open."}, 503, {"retry-after": "10"})
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        stream: Any = EventStream(self.live, request, headers)
        return stream  # type: ignore[no-any-return]

    def _record(self, name: str, read: Callable[[], Record]) -> Answer:
        """An answer that is made at most once a second for all readers, and less often if it is large."""

        async def answer(request: Request) -> Response:
            kept = self._kept.setdefault(name, _Kept(1.0))
            began = time.monotonic()
            if began - kept.at >= kept.seconds:
                kept.at, kept.body = began, gzip.compress(_bytes(read()), 4)
                # At most a tenth of one core, however large the swarm is.
                kept.seconds = max(1.0, 10 * (time.monotonic() - began))
            return _packed(kept.body, "application/json")

        return answer

    def _query(self, queries: Queries, answer: Query) -> Answer:
        async def answered(request: Request) -> Response:
            return _packed(await queries.answer(answer, request.query_params), "application/json")

        return answered

    async def _peer(self, request: Request) -> Response:
        """The peer as it is now, and its past as far as it is known."""
        peer = request.query_params.get("peer", "")[:MOST_LETTERS]
        record = self._peer_now(peer)
        try:
            past = json.loads(gzip.decompress(await self._queries.answer(self._of_peer, {"peer": peer})))
        except HetnodeError as error:
            past = {"past": None, "problem": without_addresses(error.cause)}
        return _json({**record, **past})

    async def _run_page(self, request: Request) -> Response:
        if (page := self._source.page()) is None:
            raise HTTPException(404)
        return Response(RUN_PAGE.encode(page), media_type="application/json")

    async def _static(self, request: Request) -> Response:
        file = self._files.get(request.path_params["path"])
        if file is None or request.path_params["version"] != self._files.version:
            raise HTTPException(404)
        body = await asyncio.get_running_loop().run_in_executor(self._threads, file.packed)
        return _packed(body, file.kind, _FOR_GOOD)

    async def _refused(self, request: Request, error: HTTPException) -> Response:
        if request.scope["path"].startswith(("/api/", "/static/")):
            return _json({"error": error.detail}, error.status_code)
        return self._rendered("error.html", request, error.status_code, title=error.detail)

    async def _without_answer(self, request: Request, error: HetnodeError) -> Response:
        return _json({"error": without_addresses(shown(error.cause))}, _STATUS.get(error.code, 500))

    async def _failed(self, request: Request, error: Exception) -> Response:
        log.warning("the dashboard cannot answer a request: %s: %s", type(error).__name__, error)
        return PlainTextResponse("The dashboard cannot answer this. The coordinator's log says why.\n", 500)


class BoundedConnection(H11Protocol):
    """One HTTP connection with bounds: of a slow or wrong client only its own connection suffers.

    uvicorn bounds neither the time until a request is complete nor that until its answer is read.
    Where there are too many, the oldest that serves no stream gives way to a new one.

    The application finds :meth:`abort` in the state of its request.
    """

    _timer: asyncio.TimerHandle | None = None
    _answered: Any = None
    """The exchange whose timer runs."""
    serves_stream = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=64 << 10)
        self._end_after(REQUEST_SECONDS)
        if len(self.connections) > MOST_CONNECTIONS:
            others = (each for each in self.connections if isinstance(each, BoundedConnection))
            # Sets have no order, but the timers tell how long each has been there.
            oldest = min(others, key=lambda each: (each.serves_stream, each.ends_at))
            oldest.abort()

    @property
    def ends_at(self) -> float:
        """When the timer ends it, on the clock of the event loop."""
        return self._timer.when() if self._timer else 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_after(None)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection, whatever is still to be sent."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception as error:
            log.debug("a client of the dashboard sent what cannot be read: %s", error)
            self.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and self.cycle is not self._answered:
            self._answered = self.cycle
            self.scope["state"]["abort"] = self.abort
            self.serves_stream = self.scope["path"] == STREAM_PATH
            self._end_after(None if self.serves_stream else ANSWER_SECONDS)

    def on_response_complete(self) -> None:
        self.serves_stream = False
        self._end_after(REQUEST_SECONDS)
        super().on_response_complete()

    def _end_after(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.abort)


def _bytes(record: Record) -> bytes:
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode()


def _json(record: Record, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_bytes(record), status, headers, "application/json")


def _packed(body: bytes, kind: str, cache: str = "no-store") -> Response:
    """gzip, in pieces. Every browser of the last twenty years takes it."""

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), _PIECE):
            yield body[begin : begin + _PIECE]

    headers = {"content-encoding": "gzip", "content-length": str(len(body)), "cache-control": cache}
    return StreamingResponse(pieces(), 200, headers, kind)
