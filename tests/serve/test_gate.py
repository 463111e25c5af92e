"""Before any route: HEAD and OPTIONS on every path, methods that are refused, and where requests are counted."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from plsc.serve.app import create_app
from plsc.serve.bodies import Limits
from plsc.serve.bundle import Bundle
from plsc.serve.gallery import open_gallery
from plsc.serve.service import Service, Settings

from .conftest import DIM, draw, encode

TOKEN = "correct horse battery"
RIGHT = {"authorization": f"Bearer {TOKEN}"}
COUNTED = re.compile(r'plsc_requests_total\{path="(.*)",method="(.*)",status="(.*)"\} (\d+)')


@pytest.fixture(scope="module")
def client(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Behind a token, with one entry in its gallery."""
    folder = tmp_path_factory.mktemp("gate") / "g"

    def start() -> Service:
        gallery = open_gallery(folder, dim=DIM, digest=bundle.manifest.model_digest)
        return Service(bundle, gallery=gallery, settings=Settings(limits=Limits(max_bytes=300_000), delay=0))

    with TestClient(create_app(start, token=TOKEN, any_host=True), base_url="http://127.0.0.1") as found:
        image = {"image": ("a.png", encode(draw(1)))}
        assert found.post("/v1/gallery?name=Ada&id=ada", files=image, headers=RIGHT).status_code == 201
        yield found


def counted(client: TestClient) -> Counter[tuple[str, str, int]]:
    found = COUNTED.findall(client.get("/metrics", headers=RIGHT).text)
    return Counter({(path, method, int(status)): int(count) for path, method, status, count in found})


READ = (
    "/",
    "/page/app.js",
    "/page/style.css",
    "/healthz",
    "/metrics",
    "/openapi.json",
    "/v1/model",
    "/v1/classes/3",
    "/v1/classes/3/thumbnail",
    "/v1/gallery",
    "/v1/gallery/ada/thumbnail",
)


def test_every_path_that_is_read_is_asked_about(client: TestClient) -> None:
    routes: Any = client.app.routes  # type: ignore[attr-defined]
    read = {route.path for route in routes if "GET" in route.methods}
    patterns = {re.sub(r"^/v1/classes/3", "/v1/classes/{number}", path).replace("/ada", "/{id}") for path in READ}
    assert read == patterns


@pytest.mark.parametrize("path", [*READ, "/v1/classes/99", "/nowhere"])
@pytest.mark.parametrize("headers", [RIGHT, {}], ids=["token", "none"])
def test_head_is_get_without_its_body(client: TestClient, path: str, headers: dict[str, str]) -> None:
    """RFC 9110, 9.3.2: the same status and headers, errors and all; only what is of the moment differs."""
    got, head = client.get(path, headers=headers), client.head(path, headers=headers)
    assert (head.status_code, head.content) == (got.status_code, b"")
    changing = {"x-request-id"} | ({"content-length"} if path == "/metrics" else set())
    assert {k: v for k, v in head.headers.items() if k not in changing} == {
        k: v for k, v in got.headers.items() if k not in changing
    }
    assert path == "/metrics" or int(head.headers["content-length"]) == len(got.content)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/healthz", "GET, HEAD, OPTIONS"),
        ("/v1/embed", "OPTIONS, POST"),
        ("/v1/gallery", "GET, HEAD, OPTIONS, POST"),
        ("/v1/gallery/ada", "DELETE, OPTIONS"),
    ],
)
def test_options_and_refused_methods_name_those_there_are(client: TestClient, path: str, allowed: str) -> None:
    """RFC 9110, 9.3.7 and 15.5.6: both answers bear Allow; nothing is done, and no other site is let in."""
    answer = client.options(path, headers=RIGHT)
    assert (answer.status_code, answer.content, answer.headers["allow"]) == (204, b"", allowed)
    assert not [name for name in answer.headers if name.startswith("access-control")]
    refused = client.request("PATCH", path, headers=RIGHT)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
    assert refused.json()["detail"] == f"method: got PATCH, expected one of {allowed}" and refused.json()["request_id"]
    asked = {**RIGHT, "origin": "http://evil.example", "access-control-request-method": "POST"}
    assert client.options(path, headers=asked).status_code == 403
    assert client.options("/nowhere", headers=RIGHT).status_code == 404


def test_refused_requests_are_counted_under_their_route(client: TestClient) -> None:
    image = {"image": ("a.png", encode(draw(1)))}
    before = counted(client)
    client.get("/v1/model")  # no token
    client.get("/v1/classes/5/thumbnail")
    client.post("/v1/embed", files=image)
    client.delete("/v1/gallery/ada", headers={**RIGHT, "origin": "http://evil.example"})
    client.post("/v1/embed", files={"image": b"x" * 400_000}, headers=RIGHT)
    client.get("/v1/embed", headers=RIGHT)
    client.get("/v1/classes/99", headers=RIGHT)
    client.get("/v1/classes/x", headers=RIGHT)
    client.head("/healthz")
    client.options("/v1/search", headers=RIGHT)
    assert counted(client) - before == {
        ("/metrics", "GET", 200): 1,  # the one before
        ("/v1/model", "GET", 401): 1,
        ("/v1/classes/{number}/thumbnail", "GET", 401): 1,
        ("/v1/embed", "POST", 401): 1,
        ("/v1/gallery/{id}", "DELETE", 403): 1,
        ("/v1/embed", "POST", 413): 1,
        ("/v1/embed", "GET", 405): 1,
        ("/v1/classes/{number}", "GET", 404): 1,
        ("/v1/classes/{number}", "GET", 422): 1,
        ("/healthz", "HEAD", 200): 1,
        ("/v1/search", "OPTIONS", 204): 1,
    }


def test_what_nobody_knows_is_counted_as_one(client: TestClient) -> None:
    """Whatever strangers make up, the number of series stays."""
    before = counted(client)
    for number in range(20):
        client.get(f"/wp-admin/{number}")
        client.get(f"/wp-admin/{number}", headers=RIGHT)
        client.request(f"MADEUP{number}", "/v1/embed", headers=RIGHT)
        client.request(f"MADEUP{number}", "/nowhere", headers=RIGHT)
    assert counted(client) - before == {
        ("/metrics", "GET", 200): 1,
        ("other", "other", 401): 20,
        ("other", "other", 404): 40,
        ("/v1/embed", "other", 405): 20,
    }


def test_methods_that_anybody_makes_up_are_one_series(client: TestClient) -> None:
    """On the paths that need no token, too: a thousand of them leave memory, and /metrics, as one does."""

    def ask(word: str) -> None:
        for path in ("/healthz", "/nowhere"):
            client.request(word, path)

    def series() -> int:
        lines = client.get("/metrics", headers=RIGHT).text.splitlines()
        return sum(line.startswith(("plsc_requests_total", "plsc_request_seconds")) for line in lines)

    ask("FIRST")
    series()
    before = series()
    for number in range(1000):
        ask(f"M{number:x}".upper())
    assert series() == before


def test_a_request_that_the_end_cuts_off_is_503_without_a_traceback(
    bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    """As the server ends it, once it has waited long enough: by cancelling the task."""
    sent: list[Any] = []

    async def run() -> None:
        service = Service(bundle, settings=Settings(delay=30))
        app = create_app(lambda: service)
        async with app.router.lifespan_context(app):
            image = encode(draw(1))
            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/embed",
                "raw_path": b"/v1/embed",
                "query_string": b"",
                "headers": [(b"host", b"localhost"), (b"content-type", b"image/png")],
                "http_version": "1.1",
                "root_path": "",
            }

            async def receive() -> Any:
                return {"type": "http.request", "body": image}

            async def send(message: Any) -> None:
                sent.append(message)

            task = asyncio.create_task(app(scope, receive, send))
            while not service._batcher.waiting:
                await asyncio.sleep(0.01)
            task.cancel()
            await task

    asyncio.run(run())
    assert sent[0]["status"] == 503 and b"the service stops" in sent[1]["body"]
    assert "was given up: the service stops" in caplog.text and "Traceback" not in caplog.text
