"""Connections to the page: whoever sends a request slowly ends, and keeps nobody else out."""

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

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
