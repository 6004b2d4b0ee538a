"""The page over HTTP, for this machine alone.

Three addresses, none of which names a file: the page, an answer, its detail. Whatever a question holds is
checked by its schema before anything is computed.
"""

import asyncio
import base64
import hashlib
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from typing import Any, Final

import anyio
import uvicorn
from anyio import CapacityLimiter, to_thread
from h11 import LocalProtocolError
from pydantic import ValidationError
from pydantic_core import to_jsonable_python
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from perfmodel.documents import first_problem, validated
from perfmodel.errors import PerfModelError, why
from perfmodel.files import parse_json
from perfmodel.page import PageQuestion
from perfmodel.page.answers import Answers

SCRIPTS: Final = (
    "format.js", "draw.js", "curve.js", "panels.js", "controls.js", "main.js"
)  # fmt: skip


def page(data: str) -> tuple[str, str]:
    """The page around JSON of a catalogue, and the policy that its server sends: it may reach that alone."""
    style, parts = _text("page.css"), "".join(map(_text, SCRIPTS))
    script = f'(() => {{\n"use strict";\n{parts}}})();\n'
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_source(style)}",
            f"script-src {_source(script)}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    html = _text("page.html")
    # in this order: data may hold anything, and nothing is searched for after it
    for mark, text in (
        ("@POLICY@", policy),
        ("@STYLE@", style),
        ("@SCRIPT@", script),
        ("@DATA@", data.replace("<", "\\u003c")),
    ):
        before, _, after = html.partition(mark)
        html = f"{before}{text}{after}"
    return html, f"{policy}; frame-ancestors 'none'"


def _text(name: str) -> str:
    return (resources.files("perfmodel.page") / "static" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """What a policy calls this very text."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


#: From the connection, or from the last answer, to the end of a request. [s]
REQUEST_TIMEOUT_S: Final = 5.0
#: Connections that have not sent a request yet; all peers are this machine.
MOST_WAITING: Final = 32


class PunctualProtocol(H11Protocol):
    """HTTP whose requests arrive in time; of too many connections that wait, the oldest ends."""

    #: The oldest first.
    waiting: Final[dict["PunctualProtocol", asyncio.TimerHandle]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Expect the rest of a request, until it is there."""
        super().data_received(data)
        is_answering = self.cycle is not None and not (
            self.cycle.more_body or self.cycle.response_complete
        )
        if is_answering:
            self._expect_nothing()
        elif self not in self.waiting:
            self._expect()

    def send_400_response(self, msg: str) -> None:
        """End a request that breaks off: its answer is not sent, and h11 sends nothing in some states."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        with suppress(LocalProtocolError):
            super().send_400_response(msg)
        self.transport.close()

    def on_response_complete(self) -> None:
        """Expect the next request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._expect()

    def _expect(self) -> None:
        """Give the peer some time, whatever it drips meanwhile."""
        self._expect_nothing()
        self.waiting[self] = self.loop.call_later(REQUEST_TIMEOUT_S, self.end)
        if len(self.waiting) > MOST_WAITING:
            next(iter(self.waiting)).end()

    def _expect_nothing(self) -> None:
        if (timer := self.waiting.pop(self, None)) is not None:
            timer.cancel()

    def end(self) -> None:
        """Drop the connection without a word."""
        self._expect_nothing()
        self.transport.abort()


#: A question takes some hundred bytes.
MOST_BODY_BYTES: Final = 16 * 1024
_BODY_TIMEOUT_S: Final = 5.0
HOST: Final = "127.0.0.1"
#: A page under another name that resolves to this machine is refused (DNS rebinding).
HOSTS: Final = (HOST, "localhost")
#: Questions that are computed at a time; more are told to come back.
MOST_IN_FLIGHT: Final = 8
_MOST_CONNECTIONS: Final = 64
_MOST_HEADER_BYTES: Final = 16 * 1024
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Answers 431 to long headers, 403 to pages of other sites in this machine's browser, 503 while the page ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through what comes from the page itself, or from no page at all."""
        if scope["type"] == "http":  # a lifespan comes from nobody
            headers = dict(scope["headers"])
            if sum(len(name) + len(text) for name, text in scope["headers"]) > _MOST_HEADER_BYTES:
                # h11 limits only those that come in parts
                refusal = _refusal(431, f"headers must have at most {_MOST_HEADER_BYTES} bytes")
                await refusal(scope, receive, send)
                return
            own = b"http://" + headers.get(b"host", b"")
            is_cross = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
            if headers.get(b"origin", own) != own or (is_cross and scope["method"] != "GET"):
                await _refusal(403, "another site may not ask")(scope, receive, send)
                return
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # Of a question that was half asked; uvicorn would print where.
            await _refusal(503, "the page was ended")(scope, receive, send)


async def body(request: Request) -> bytes | Response:
    """The JSON of a request, or why it is refused: another type, too long, too slow."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return _refusal(415, "a question must be application/json")
    parts, size = [], 0
    try:
        with anyio.fail_after(_BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BODY_BYTES:
                    refusal = _refusal(413, f"a question must have at most {MOST_BODY_BYTES} bytes")
                    refusal.headers["Connection"] = "close"
                    return refusal
                parts.append(part)
    except TimeoutError:
        return _refusal(408, "the question did not arrive in time")
    except ClientDisconnect:
        return Response(status_code=400)
    return b"".join(parts)


def application(answers: Answers, *, most_in_flight: int = MOST_IN_FLIGHT) -> Starlette:
    """The page as an ASGI application; more requests at a time than ``most_in_flight`` get a 429."""
    data = json.dumps({"catalogue": answers.catalogue}, allow_nan=False)
    html, policy = page(data)
    threads = CapacityLimiter(most_in_flight)

    def answering(reply: Callable[[PageQuestion], Response]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await _answered(request, threads, reply)

        return endpoint

    replies = {
        "/answer": lambda asked: _json(answers.answer(asked)),
        "/detail": lambda asked: _json(answers.detail(asked)),
    }

    async def show(request: Request) -> Response:  # noqa: ARG001 - starlette's signature
        return HTMLResponse(html, headers={**_HEADERS, "Content-Security-Policy": policy})

    return Starlette(
        routes=[
            Route("/", show, methods=["GET"]),
            *(Route(at, answering(reply), methods=["POST"]) for at, reply in replies.items()),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False),
            Middleware(Guard),
        ],
    )


def listening(port: int) -> socket.socket:
    """A socket of this machine alone; port 0 takes any that is free.

    Who reads its address before the server is up waits instead of being refused.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen()
    except OSError as error:
        found.close()
        raise PerfModelError(
            f"--port: must be free, got {port}: {error.strerror}; choose another, 0 takes any"
        ) from error
    return found


def start(catalogue: dict[str, Any]) -> PageQuestion:
    """Eight devices of the first machine and workload, or one where nothing is known of links."""
    profile, *_ = catalogue["profiles"]
    entry, *_ = profile["workloads"]
    devices, cluster, batch, layout = 8, None, 64, "dp=8 zero=3"
    if profile["kind"] == "calibrated":
        batch = entry["batches"][len(entry["batches"]) // 2]
        if profile["bandwidth_bytes_per_s"] is None:
            cluster = next(iter(catalogue["clusters"]), None)
            devices = min(8, cluster["devices"]) if cluster else 1
        layout = f"dp={devices}"
    return PageQuestion(
        profile=profile["name"],
        workload=entry["name"],
        layout=layout,
        batch=batch,
        cluster=cluster and cluster["name"],
    )


def serve(answers: Answers, on: socket.socket) -> None:
    """Answer until interrupted."""
    config = uvicorn.Config(
        application(answers),
        http=PunctualProtocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[on])


async def _answered(
    request: Request, threads: CapacityLimiter, answer: Callable[[PageQuestion], Response]
) -> Response:
    """Read a question, answer it beside the event loop, and turn what is wrong into one line."""
    raw = await body(request)
    if not isinstance(raw, Response) and threads.available_tokens < 1:
        # Not before the body is here: who sends it slowly would keep others out.
        most = int(threads.total_tokens)
        raw = _refusal(429, f"at most {most} questions at a time; ask again")
        raw.headers["Retry-After"] = "1"
    if isinstance(raw, Response):
        return raw
    try:
        question = validated(PageQuestion, parse_json(raw.decode()))
    except ValueError as error:
        said = first_problem(error) if isinstance(error, ValidationError) else why(error)
        return _refusal(400, said)
    try:
        return await to_thread.run_sync(answer, question, limiter=threads)
    except PerfModelError as error:
        return _refusal(422, str(error))
    except (ArithmeticError, RuntimeWarning):
        return _refusal(422, "cannot be computed: a number is far too large or too small")
    except ValueError as error:
        return _refusal(422, f"cannot be computed: {error}")


def _json(found: dict[str, Any]) -> Response:
    # What is no number is refused, as a number that cannot be computed.
    text = json.dumps(to_jsonable_python(found), allow_nan=False)
    return Response(text, media_type="application/json", headers=_HEADERS)


def _refusal(status: int, reason: str) -> Response:
    line = " ".join(reason.split())[:500]
    return JSONResponse({"error": line}, status_code=status, headers=_HEADERS)
