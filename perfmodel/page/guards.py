"""What is refused before a question is read: other sites, floods, long and slow bodies."""

from typing import Final

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

#: A question takes some hundred bytes.
MOST_BODY_BYTES: Final = 16 * 1024
_BODY_TIMEOUT_S: Final = 5.0


class InFlight:
    """Answers 429 while too many requests are under way."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._now = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request for as long as it is under way."""
        if scope["type"] != "http":  # a lifespan is under way from start to end
            await self._app(scope, receive, send)
            return
        if self._now >= self._most:
            response = JSONResponse(
                {"error": f"at most {self._most} questions at a time; ask again"},
                status_code=429,
                headers={"Retry-After": "1"},
            )
            await response(scope, receive, send)
            return
        self._now += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._now -= 1


class RefuseOtherSites:
    """Answers 403 to requests that pages of other sites make through the browser of this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through what comes from the page itself, or from no page at all."""
        headers = dict(scope.get("headers", ()))
        origin = headers.get(b"origin")
        own = b"http://" + headers.get(b"host", b"")
        is_cross = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        if (origin is not None and origin != own) or (is_cross and scope["method"] != "GET"):
            response = JSONResponse({"error": "another site may not ask"}, status_code=403)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def body(request: Request) -> bytes | Response:
    """The JSON of a request, or why it is refused: another type, too long, too slow."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return JSONResponse({"error": "a question must be application/json"}, status_code=415)
    parts, size = [], 0
    try:
        with anyio.fail_after(_BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BODY_BYTES:
                    return JSONResponse(
                        {"error": f"a question must have at most {MOST_BODY_BYTES} bytes"},
                        status_code=413,
                        headers={"Connection": "close"},
                    )
                parts.append(part)
    except TimeoutError:
        return JSONResponse({"error": "the question did not arrive in time"}, status_code=408)
    except ClientDisconnect:
        return Response(status_code=400)
    return b"".join(parts)
