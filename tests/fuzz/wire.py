"""Bytes at a page that runs in a process of its own: broken requests, and a good one behind each."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil
from hypothesis import strategies as st

#: The page may take so much memory, and so long for an answer.
_MOST_BYTES: Final = 1024**3
_MOST_S: Final = 60.0
_METHODS: Final = (
    "GET",
    "POST",
    "POST",
    "POST",
    "PUT",
    "HEAD",
    "OPTIONS",
    "CONNECT",
    "x" * 300,
    "",
    "G\0T",
    "get",
)
_TARGETS: Final = (
    *(
        "/",
        "/answer",
        "/detail",
        "/answer",
        "/detail",
        "*",
        "",
        "//",
        "/../../etc/passwd",
        "/answer?x=1",
        "/%00",
        "/\xff",
    ),
    *(
        "http://127.0.0.1/answer",
        "/answer/",
        "/answer;x",
        "/answer#x",
        "/" + "a" * 9000,
        "/docs",
        "/openapi.json",
    ),
)
_VERSIONS: Final = (
    "HTTP/1.1",
    "HTTP/1.1",
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/2.0",
    "HTTP/9",
    "",
    "http/1.1",
    "HTTP/1.1 x",
)
_HEADERS: Final = (
    *(
        b"Host: 127.0.0.1",
        b"Host: localhost:1",
        b"Host: evil.example",
        b"Host:",
        b"Host: 127.0.0.1\r\nHost: x",
        b"host : x",
    ),
    *(
        b"Content-Type: application/json",
        b"Content-Type: text/plain",
        b"Content-Type: \xff",
        b"Origin: http://evil.example",
    ),
    *(
        b"Content-Length: 0",
        b"Content-Length: 5",
        b"Content-Length: -1",
        b"Content-Length: 99999999999",
        b"Content-Length: x",
    ),
    *(
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: chunked, chunked",
        b"Expect: 100-continue",
    ),
    *(
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x",
        b"Upgrade: h2c\r\nConnection: Upgrade",
        b"X: " + b"y" * 70000,
    ),
    *(
        b"Content-Encoding: gzip",
        b"Connection: close",
        b"Connection: keep-alive",
        b": x",
        b"x",
        b"\0: \0",
        b" folded: x",
        b"A:b\nC:d",
    ),
    *(
        b"Range: bytes=0-99999",
        b"Cookie: " + b"a=b;" * 500,
        b"Sec-Fetch-Site: cross-site",
        b"X-Forwarded-Host: x",
    ),
)
GOOD: Final = {
    "profile": "stored",
    "workload": "light",
    "scaling": "weak",
    "layout": "dp=8",
    "batch": 16,
    "cluster": None,
    "capacity_bytes": None,
    "changes": {},
}
_BODIES: Final = (
    *(
        json.dumps(GOOD).encode(),
        json.dumps(GOOD).encode(),
        b"",
        b"{}",
        b"[" * 9000,
        b"\xff\xfe",
        b"null",
        b"1e999",
        b"\0" * 100,
    ),
    *(
        b'"' + b"x" * 200_000 + b'"',
        b'{"layout":' + b'{"a":' * 90 + b"1" + b"}" * 91,
        json.dumps(GOOD).encode("utf-16"),
    ),
    *(
        b"5\r\nhello\r\n0\r\n\r\n",
        b"ffffffffffffffff\r\nx",
        b"-5\r\nx\r\n",
        b"5;" + b"x" * 20000 + b"\r\nhello\r\n0\r\n\r\n",
    ),
)
_ENDS: Final = (b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n", b"")


@st.composite
def messages(draw: st.DrawFn) -> list[bytes]:
    """Parts of what a client sends, one after the other."""
    chosen, parts = st.sampled_from, []
    for _ in range(draw(st.integers(1, 3))):
        end, body = draw(chosen(_ENDS)), draw(chosen(_BODIES))
        line = " ".join((draw(chosen(_METHODS)), draw(chosen(_TARGETS)), draw(chosen(_VERSIONS))))
        headers = draw(st.lists(chosen(_HEADERS), max_size=5))
        if draw(st.integers(0, 2)):
            headers = [
                *_HEADERS[:1],
                *_HEADERS[6:7],
                b"Content-Length: %d" % len(body),
                *headers[:2],
            ]
        whole = end.join([line.encode("latin-1"), *headers, b"", body])
        if draw(st.integers(0, 3)) == 0:
            whole = whole[: draw(st.integers(0, len(whole)))]
        at = draw(st.integers(0, len(whole)))
        parts += [whole[:at], whole[at:]]
    return parts


def _exchanged(port: int, parts: list[bytes], *, wait_s: float) -> bytes:
    """What a server answers until it ends the connection, or says nothing more for so long."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=_MOST_S) as client:
        with contextlib.suppress(ConnectionError):  # it may end the connection before all is sent
            for part in parts:
                client.sendall(part)
        client.settimeout(wait_s)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while part := client.recv(1 << 16):
                found += part
    return found


def _good(port: int) -> bytes:
    body = json.dumps(GOOD).encode()
    head = (
        "POST /answer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    answer = _exchanged(port, [head.encode() + body], wait_s=_MOST_S)
    return answer.partition(b"\r\n\r\n")[2]


@contextlib.contextmanager
def page_of(profile: Path) -> Iterator[Callable[[Any], list[str]]]:
    """Run ``perfmodel serve`` on a profile; sends parts of a message, and says what is wrong with what comes."""
    with (profile.with_name("page.err")).open("wb") as errors:
        command = [
            sys.executable,
            "-m",
            "perfmodel",
            "serve",
            "--profile",
            str(profile),
            "--port",
            "0",
        ]
        page = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            text=True,
        )
    assert page.stdout is not None
    said = Path(errors.name)
    try:
        port = int(page.stdout.readline().split("/")[2].split(":")[1])
        usual, before = _good(port), said.read_bytes()
        assert json.loads(usual), usual

        def send(parts: list[bytes]) -> list[str]:
            faults = []
            answer = _exchanged(port, parts, wait_s=0.1)
            if answer and not answer.startswith(b"HTTP/1.1 "):
                faults.append(f"no HTTP: {answer[:100]!r}")
            if b"HTTP/1.1 5" in answer:
                faults.append(f"status: {answer[:300]!r}")
            if (after := _good(port)) != usual:
                faults.append(f"another answer: {after[:200]!r}")
            if (text := said.read_bytes()) != before:
                faults.append(f"said: {text[-300:]!r}")
            if (used := psutil.Process(page.pid).memory_info().rss) > _MOST_BYTES:
                faults.append(f"took {used >> 20} MiB")
            return faults

        yield send
    finally:
        page.terminate()
        page.wait()
