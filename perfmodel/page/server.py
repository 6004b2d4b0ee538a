"""The page over HTTP, for this machine alone.

Three addresses, none of which names a file: the page, an answer, an export. Whatever a question
holds is checked by its schema before anything is computed.
"""

import json
import socket
from collections.abc import Callable, Mapping
from typing import Final

from anyio import CapacityLimiter, to_thread
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from perfmodel.documents.base import first_problem
from perfmodel.documents.page import QUESTION, LayoutQuestion, PageAnswer, StepQuestion
from perfmodel.errors import PerfModelError
from perfmodel.page.answers import Answers
from perfmodel.page.assemble import Page, page
from perfmodel.page.export import export_html
from perfmodel.page.guards import InFlight, RefuseOtherSites, body

HOST: Final = "127.0.0.1"
#: A page under another name that resolves to this machine is refused (DNS rebinding).
HOSTS: Final = (HOST, "localhost")
#: Requests that may wait or be computed at a time; more are told to come back.
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


def application(answers: Answers, *, most_in_flight: int = MOST_IN_FLIGHT) -> Starlette:
    """The page as an ASGI application.

    Parameters
    ----------
    most_in_flight
        Requests at a time; one more is answered with 429.
    """
    data = json.dumps({"catalogue": answers.catalogue.model_dump(mode="json")}, allow_nan=False)
    document = page(data, is_served=True)
    threads = CapacityLimiter(most_in_flight)

    async def ask(request: Request) -> Response:
        return await _answered(request, threads, lambda asked: _json(answers.answer(asked)))

    async def export(request: Request) -> Response:
        return await _answered(request, threads, lambda asked: _file(export_html(answers, asked)))

    async def show(request: Request) -> Response:  # noqa: ARG001 - starlette's signature
        return _page(document)

    return Starlette(
        routes=[
            Route("/", show, methods=["GET"]),
            Route("/answer", ask, methods=["POST"]),
            Route("/export", export, methods=["POST"]),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False),
            Middleware(RefuseOtherSites),
            Middleware(InFlight, most=most_in_flight),
        ],
    )


def listening(port: int) -> socket.socket:
    """A socket of this machine alone; port 0 takes any that is free.

    Who reads its address before the server is up waits instead of being refused.

    Raises
    ------
    PerfModelError
        If the port is taken.
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


def serve(answers: Answers, on: socket.socket) -> None:
    """Answer until interrupted."""
    import uvicorn  # noqa: PLC0415 - the application runs without it in tests

    config = uvicorn.Config(
        application(answers),
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="warning",
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
    request: Request,
    threads: CapacityLimiter,
    answer: Callable[[StepQuestion | LayoutQuestion], Response],
) -> Response:
    """Read a question, answer it beside the event loop, and turn what is wrong into one line."""
    raw = await body(request)
    if isinstance(raw, Response):
        return raw
    try:
        question = QUESTION.validate_json(raw)
    except ValidationError as error:
        return _refusal(400, first_problem(error))
    try:
        return await to_thread.run_sync(answer, question, limiter=threads)
    except PerfModelError as error:
        return _refusal(422, str(error))
    except ArithmeticError:
        return _refusal(422, "cannot be computed: a number is far too large or too small")
    except ValueError as error:
        return _refusal(422, f"cannot be computed: {error}")


def _json(answer: PageAnswer) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json", headers=_HEADERS)


def _file(html: str) -> Response:
    name = {"Content-Disposition": 'attachment; filename="perfmodel-what-if.html"'}
    return HTMLResponse(html, headers={**_HEADERS, **name})


def _page(document: Page) -> Response:
    headers: Mapping[str, str] = {**_HEADERS, "Content-Security-Policy": document.policy}
    return HTMLResponse(document.html, headers=headers)


def _refusal(status: int, reason: str) -> Response:
    line = " ".join(reason.split())[:500]
    return JSONResponse({"error": line}, status_code=status, headers=_HEADERS)
