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

from tests.fuzz.nonsense import BROKEN, STEP, one, questions, texts, words

#: The page may take so much memory, and so long for an answer.
_MOST_BYTES: Final = 1024**3
_MOST_S: Final = 60.0
_METHODS: Final = [*words("GET POST POST POST PUT HEAD OPTIONS CONNECT G\0T get"), "x" * 300, ""]
_TARGETS: Final = [
    *words("/ /answer /detail /answer /detail * // /../../etc/passwd /answer?x=1 /%00 /\xff"),
    *words("http://127.0.0.1/answer /answer/ /answer;x /answer#x /docs /openapi.json"),
    *("", "/" + "a" * 9000),
]
_VERSIONS: Final = [
    *words("HTTP/1.1 HTTP/1.1 HTTP/1.1 HTTP/1.0 HTTP/2.0 HTTP/9 http/1.1"),
    *("", "HTTP/1.1 x"),
]
_USUAL: Final = ["Host: 127.0.0.1", "Content-Type: application/json"]
_HEADERS: Final = [
    *_USUAL,
    *texts("""
Host: localhost:1   Host: evil.example   Host:   host : x   Content-Type: text/plain   Content-Type: \xff
Origin: http://evil.example   Content-Length: 0   Content-Length: 5   Content-Length: -1   Content-Length: 99999999999
Content-Length: x   Transfer-Encoding: chunked   Transfer-Encoding: gzip   Transfer-Encoding: chunked, chunked
Expect: 100-continue   Content-Encoding: gzip   Connection: close   Connection: keep-alive   : x   x   \0: \0
Range: bytes=0-99999   Sec-Fetch-Site: cross-site   X-Forwarded-Host: x
"""),
    *("Host: 127.0.0.1\r\nHost: x", " folded: x", "A:b\nC:d", "Cookie: " + "a=b;" * 500),
    *("Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x", "X: " + "y" * 70000),
    "Upgrade: h2c\r\nConnection: Upgrade",
]
_GOOD: Final = json.dumps(STEP | {"profile": "stored"}).encode()
_BODIES: Final = [
    *(_GOOD, _GOOD, *BROKEN, b"{}", b"[" * 9000, b"\xff\xfe", b"null", b"1e999", b"\0" * 100),
    *(b'"' + b"x" * 200_000 + b'"', _GOOD.decode().encode("utf-16")),
    b'{"layout":' + b'{"a":' * 90 + b"1" + b"}" * 91,
    *(b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffff\r\nx", b"-5\r\nx\r\n"),
    b"5;" + b"x" * 20000 + b"\r\nhello\r\n0\r\n\r\n",
]
_ENDS: Final = [b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n", b""]


@st.composite
def messages(draw: st.DrawFn) -> list[bytes]:
    """Parts of what a client sends, one after the other."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        end = draw(st.sampled_from(_ENDS))
        body = draw(st.one_of(st.sampled_from(_BODIES), questions().map(lambda asked: asked[1])))
        body = body.replace(b'"here"', b'"stored"')
        line = " ".join((draw(one(_METHODS)), draw(one(_TARGETS)), draw(one(_VERSIONS))))
        headers = draw(st.lists(one(_HEADERS), max_size=5))
        if draw(st.integers(0, 2)):
            headers = [*_USUAL, f"Content-Length: {len(body)}", *headers[:2]]
        whole = end.join([*(text.encode("latin-1") for text in (line, *headers)), b"", body])
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
    """The answer to a good request."""
    headers = [*_USUAL, "Connection: close", f"Content-Length: {len(_GOOD)}"]
    head = "\r\n".join(["POST /answer HTTP/1.1", *headers, "", ""])
    return _exchanged(port, [head.encode() + _GOOD], wait_s=_MOST_S).partition(b"\r\n\r\n")[2]


@contextlib.contextmanager
def page_of(profile: Path) -> Iterator[Callable[[Any], list[str]]]:
    """Run ``perfmodel serve`` on a profile; sends parts of a message, and says what is wrong with what comes."""
    said = profile.with_name("page.err")
    command = [sys.executable, *words("-m perfmodel serve --port 0 --profile"), str(profile)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    with (
        said.open("wb") as errors,
        subprocess.Popen(command, stdout=pipe, stderr=errors, env=environment, text=True) as page,
    ):
        try:
            assert page.stdout is not None
            port = int(page.stdout.readline().split("/")[2].split(":")[1])
            usual, before = _good(port), said.read_bytes()
            assert "step_s" in json.loads(usual), usual

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
