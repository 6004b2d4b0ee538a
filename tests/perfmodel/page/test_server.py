"""The page over HTTP: what is served, and everything that is refused."""

import http.client
import json
import re
import socket
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from pydantic_core import to_json
from starlette.testclient import TestClient

import perfmodel.page
from perfmodel.errors import PerfModelError
from perfmodel.page import PageQuestion, server
from perfmodel.page.server import (
    HOST,
    MOST_BODY_BYTES,
    SCRIPTS,
    PunctualProtocol,
    application,
    listening,
    page,
)
from tests.examples import ROOT
from tests.existing import existing
from tests.perfmodel.page.sessions import answers

QUESTION: dict[str, Any] = {"profile": "here", "workload": "light", "layout": "dp=2", "batch": 16}
ORIGIN = "http://127.0.0.1:8765"
JSON = {"Content-Type": "application/json"}
#: A question whose body never comes.
BEGUN = (
    b"POST /answer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n{"
)


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(application(answers()), base_url=ORIGIN) as found:
        yield found


def test_an_answer_is_that_of_the_function(client: TestClient) -> None:
    response = client.post("/answer", json=QUESTION)
    assert response.status_code == 200
    expected = answers().answer(PageQuestion.model_validate(QUESTION))
    assert response.json() == json.loads(to_json(expected))


def test_the_page_loads_nothing_and_may_load_nothing(client: TestClient) -> None:
    response = client.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["cache-control"] == "no-store"
    assert response.text.count("http") == response.text.count("http-equiv") + response.text.count(
        "http://www.w3.org/2000/svg"
    )
    assert "src=" not in response.text
    assert "style=" not in response.text  # the policy would refuse it


PATHS = "/etc/passwd /static/page.css /../../../../etc/passwd /%2e%2e/%2e%2e/etc/passwd "
PATHS += "/answer/../../etc/passwd /runs/profile.json /docs /openapi.json"


@pytest.mark.parametrize("path", PATHS.split())
def test_no_file_has_an_address(client: TestClient, path: str) -> None:
    assert client.get(path).status_code in {404, 405}


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "169.254.169.254", "[::1]", ""]
)
def test_other_names_of_this_machine_are_refused(client: TestClient, host: str) -> None:
    """DNS rebinding: a site of the attacker resolves to 127.0.0.1, and the browser says its name."""
    for response in (
        client.get("/", headers={"Host": host}),
        client.post("/answer", json=QUESTION, headers={"Host": host}),
    ):
        assert response.status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_other_sites_may_not_ask(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post("/answer", json=QUESTION, headers=headers).status_code == 403
    assert client.post("/answer", json=QUESTION, headers={"Origin": ORIGIN}).status_code == 200


def test_forms_of_other_sites_cannot_ask(client: TestClient) -> None:
    """A form sends text/plain without asking first; JSON needs a permission that nobody gives."""
    text = json.dumps(QUESTION)
    response = client.post("/answer", content=text, headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    preflight = client.options("/answer", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in preflight.headers


#: Changes of a good question that break its schema.
BROKEN: tuple[dict[str, Any], ...] = (
    *({"unknown": 1}, {"layout": 8}, {"layout": ""}, {"layout": f"dp={10**400}"}, {"batch": -1}),
    *({"batch": True}, {"batch": "16"}, {"logged": {"value": True, "unit": "s"}}),
    *({"batch": 1e300}, {"scaling": "sideways"}, {"profile": "x" * 10_000}, {"capacity_bytes": 0}),
    {"changes": {"network.bandwidth": "9" * 1000}},
    {"changes": {str(i): "1" for i in range(100)}},
    {"logged": {"value": 1, "unit": "<script>"}},
)
NONE = (
    "",
    "{",
    "[]",
    "null",
    '{"kind": NaN}',
    "[" * 9000,
    "\x00",
    json.dumps(QUESTION)[:-1] + ', "batch": 8}',
)


@pytest.mark.parametrize("text", [*(json.dumps(QUESTION | change) for change in BROKEN), *NONE])
def test_what_is_no_question_is_refused_in_one_line(client: TestClient, text: str) -> None:
    response = client.post("/answer", content=text, headers=JSON)
    assert response.status_code == 400
    told = response.json()["error"]
    assert "\n" not in told
    assert len(told) <= 500


def test_long_headers_are_refused_at_whatever_pace_they_come(client: TestClient) -> None:
    assert client.get("/", headers={"X": "y" * 10_000}).status_code == 200
    assert client.get("/", headers={"X": "y" * 20_000}).status_code == 431


@pytest.mark.parametrize("error", [OverflowError("too large"), RuntimeWarning("overflow in exp")])
def test_what_cannot_be_computed_is_one_line(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(answers(), "answer", fail)
    response = client.post("/answer", json=QUESTION)
    assert response.status_code == 422
    assert "far too large" in response.json()["error"]


def test_a_long_body_is_not_read_to_its_end(client: TestClient) -> None:
    read = []

    def parts() -> Iterator[bytes]:
        for _ in range(1000):
            read.append(1)
            yield b" " * 1024

    assert client.post("/answer", content=parts(), headers=JSON).status_code == 413
    exact = json.dumps(QUESTION).ljust(MOST_BODY_BYTES)
    assert client.post("/answer", content=exact, headers=JSON).status_code == 200
    assert client.post("/answer", content=f"{exact} ", headers=JSON).status_code == 413


def test_a_flood_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two may be under way; while they wait a third is refused, and afterwards taken again."""
    found = answers()
    free, under_way = threading.Event(), threading.Semaphore(0)
    real = found.answer

    def slow(question: PageQuestion) -> object:
        under_way.release()
        assert free.wait(30)
        return real(question)

    monkeypatch.setattr(found, "answer", slow)
    with TestClient(application(found, most_in_flight=2), base_url=ORIGIN) as client:
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(client.post("/answer", json=QUESTION).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert under_way.acquire(timeout=30)
        refused = client.post("/answer", json=QUESTION)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        free.set()
        for thread in threads:
            thread.join(30)
        assert statuses == [200, 200]
        assert client.post("/answer", json=QUESTION).status_code == 200


@contextmanager
def running(**options: Any) -> Iterator[tuple[uvicorn.Server, tuple[str, int]]]:
    """The page as a user has it, over real connections."""
    config = uvicorn.Config(
        application(answers()), http=PunctualProtocol, lifespan="off", **options
    )
    server = uvicorn.Server(config)
    with listening(0) as on:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [on]})
        thread.start()
        yield server, on.getsockname()
        server.should_exit = True
        thread.join(30)


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with running(limit_concurrency=64) as (_, found):
        yield found


@pytest.mark.parametrize("dripped", [b"GET / HTTP/1.1\r\nX-Slow: ", BEGUN])
def test_connections_that_drip_keep_nobody_out(address: tuple[str, int], dripped: bytes) -> None:
    """200 of them gave everybody a 503."""
    with ExitStack() as slow:
        for _ in range(200):
            one = slow.enter_context(socket.create_connection(address, timeout=30))
            with suppress(OSError):  # the oldest are ended meanwhile
                one.sendall(dripped)
        asked = http.client.HTTPConnection(*address, timeout=30)
        asked.request("POST", "/answer", json.dumps(QUESTION), JSON)
        assert asked.getresponse().status == 200
        asked.close()


def test_a_request_that_does_not_end_is_ended(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.01)
    with socket.create_connection(address, timeout=30) as slow, suppress(ConnectionResetError):
        assert slow.recv(1) == b""


def test_a_question_that_is_half_asked_when_the_page_ends_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        running(log_config=None, timeout_graceful_shutdown=1) as (server, address),
        socket.create_connection(address, timeout=30) as slow,
    ):
        slow.sendall(BEGUN)
        while not server.server_state.tasks:
            time.sleep(0.01)
        server.should_exit = True
        assert slow.recv(100).startswith(b"HTTP/1.1 503")
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("method", ["POST", "HEAD"])
def test_a_request_that_breaks_off_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Its answer is under way when a part of its body turns out to be none."""
    broken = f"{method} / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\nno\r\n"
    with (
        running(log_config=None) as (_, address),
        socket.create_connection(address, timeout=30) as peer,
    ):
        peer.sendall(broken.encode())
        assert peer.makefile("rb").read().startswith(b"HTTP/1.1 400")
    assert [record for record in caplog.records if record.exc_info] == []


def test_it_listens_on_this_machine_alone() -> None:
    with listening(0) as on:
        host, port = on.getsockname()
        assert host == HOST == "127.0.0.1"
        on.listen()
        with pytest.raises(PerfModelError, match=r"--port: must be free, got \d+"):
            listening(port)


def test_hostile_names_stay_text() -> None:
    name = "</script><script>alert(1)</script>@STYLE@"
    html, _ = page(json.dumps({"name": name}))
    assert "</script><script>alert" not in html
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert json.loads(existing(found)[1])["name"] == name


def test_a_wheel_holds_every_file_of_the_page() -> None:
    folder = Path(perfmodel.page.__file__).parent / "static"
    names = {path.name for path in folder.iterdir()}
    assert names == {"page.html", "page.css", *SCRIPTS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["perfmodel"]
    for name in names:
        assert any(fnmatch(f"page/static/{name}", pattern) for pattern in patterns), name
    needs = {re.split(r"[<>=]", need)[0] for need in project["project"]["dependencies"]}
    assert {"anyio", "starlette", "uvicorn"} <= needs
