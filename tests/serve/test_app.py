"""The service over HTTP, in this process: right answers, and a plain no to everything else."""

import io
import json
import math
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from plsc.data import ImageFolder
from plsc.serve.app import create_app
from plsc.serve.bodies import Limits, parse_embeddings
from plsc.serve.bundle import Bundle
from plsc.serve.gallery import open_gallery
from plsc.serve.service import Service, Settings

from .conftest import CLASSES, DIM, NAMES, draw, encode

LIMITS = Limits(max_bytes=300_000, max_pixels=1_000_000, max_images=4)
TOKEN = "correct horse battery"


@pytest.fixture(scope="module")
def client(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("served") / "gallery"
    about = bundle.manifest

    def start() -> Service:
        gallery = open_gallery(folder, dim=DIM, digest=about.model_digest)
        return Service(bundle, gallery=gallery, settings=Settings(limits=LIMITS, delay=0))

    with TestClient(create_app(start), base_url="http://127.0.0.1", raise_server_exceptions=False) as found:
        yield found


def picture(seed: int, kind: str = "PNG") -> tuple[str, tuple[str, bytes]]:
    return ("image", (f"{seed}.{kind.lower()}", encode(draw(seed), kind)))


def unit(seed: int) -> list[float]:
    row = np.random.default_rng(seed).standard_normal(DIM)
    return [float(x) for x in row / np.linalg.norm(row)]


def offline(bundle: Bundle, *seeds: int) -> np.ndarray:
    return bundle.model.embed(np.stack([draw(seed) for seed in seeds]))[0].astype(np.float64)


# ---- right answers


def test_embeddings_are_the_models(client: TestClient, bundle: Bundle) -> None:
    answer = client.post("/v1/embed", files=[picture(1), picture(50), picture(51)])
    assert answer.status_code == 200 and answer.json()["model_digest"] == bundle.manifest.model_digest
    found = np.array(answer.json()["embeddings"])
    np.testing.assert_allclose(found, offline(bundle, 1, 50, 51), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=2e-4)
    raw = client.post("/v1/embed", content=encode(draw(1)), headers={"content-type": "image/png"})
    np.testing.assert_allclose(raw.json()["embeddings"], found[:1], atol=1e-6)


def test_search_gives_the_nearest_classes_in_order(client: TestClient, bundle: Bundle) -> None:
    answer = client.post("/v1/search?k=7", files=[picture(3), picture(77)]).json()
    scores, at = bundle.index.search(offline(bundle, 3, 77), 7)
    assert [[int(near["id"]) for near in one] for one in answer["results"]] == at.tolist()
    np.testing.assert_allclose([[near["score"] for near in one] for one in answer["results"]], scores, atol=1e-6)
    first = answer["results"][0][0]
    assert (first["id"], first["name"], first["thumbnail"]) == ("3", "Person 3", "/v1/classes/3/thumbnail")
    shown = client.get(first["thumbnail"])
    assert shown.headers["content-type"] == "image/jpeg" and Image.open(io.BytesIO(shown.content)).size == (112, 112)
    many = client.post("/v1/search?k=100", json={"embeddings": [unit(1)]}).json()
    assert len(many["results"][0]) == CLASSES


def test_verification_is_the_cosine_and_the_measured_threshold(client: TestClient, bundle: Bundle) -> None:
    rows = offline(bundle, 5, 90)
    found = client.post("/v1/verify", files=[picture(5), picture(90)]).json()
    assert abs(found["score"] - rows[0] @ rows[1]) < 1e-6
    assert (found["threshold"], found["far"], found["same"]) == (0.7, 1e-3, bool(rows[0] @ rows[1] >= 0.7))
    same = client.post("/v1/verify?far=0.01", files=[picture(5), picture(5, "BMP")]).json()
    assert same["same"] and same["threshold"] == 0.5 and abs(same["score"] - 1) < 1e-6
    a, b = np.array(unit(1)), np.array(unit(2))
    given = client.post("/v1/verify", json={"embeddings": [list(a * 3), list(b)]}).json()
    assert abs(given["score"] - a @ b) < 1e-6


def test_what_shines_through_is_black_as_in_training(client: TestClient, bundle: Bundle, tmp_path: Path) -> None:
    """round(colour * alpha / 255), by the service and by the reader of training images alike."""
    shades = np.broadcast_to(np.linspace(0, 255, 112).astype(np.uint8)[:, None], (112, 112))
    seen = np.rint(draw(6) * (shades[..., None] / 255.0)).astype(np.uint8)
    clear = encode(np.dstack([draw(6), shades]))
    found = client.post("/v1/embed", files=[("image", clear)]).json()["embeddings"][0]
    assert np.dot(found, bundle.model.embed(seen[None])[0][0]) > 0.9999
    assert np.dot(found, offline(bundle, 6)[0]) < 0.99  # it does matter
    (tmp_path / "someone").mkdir()
    (tmp_path / "someone" / "a.png").write_bytes(clear)
    trained = ImageFolder(tmp_path)[0][0]
    assert np.abs(trained.astype(int) - seen).max() <= 1
    np.testing.assert_allclose(found, bundle.model.embed(trained[None])[0][0], atol=1e-6)


def test_a_form_with_its_end_is_whole(client: TestClient) -> None:
    for end in (b"\r\n--b--", b"\r\n--b--\r\n", b"\r\n--b--\r\nan epilogue"):
        assert client.post("/v1/embed", **raw(CUT + end, FORM)).status_code == 200, end


def test_one_more_image_or_many_are_one_answer(client: TestClient) -> None:
    for count in (5, 6, 7, 60):
        answer = client.post("/v1/embed", files=[picture(1)] * count)
        assert (answer.status_code, "expected at most 4" in answer.json()["detail"]) == (413, True), count


@pytest.mark.parametrize("factor", [1e-44, 1e-320, 1e-40, 1.0, 1e37])
def test_an_embedding_keeps_its_direction_at_any_length(factor: float) -> None:
    """As the ratio of exact fractions, whose smallest and largest no float32 holds."""
    row = np.array(unit(3)) * factor
    exact = [Fraction(float(value)) for value in row]
    length = Fraction(math.isqrt(int(sum(value * value for value in exact) * 10**700))) / 10**350
    found = parse_embeddings(json.dumps({"embeddings": [row.tolist()]}).encode(), DIM)
    np.testing.assert_allclose(found[0], [float(value / length) for value in exact], rtol=1e-6)
    if factor != 1e-320:  # so small that float64 itself has rounded it
        np.testing.assert_allclose(found[0], unit(3), rtol=1e-6)


def test_a_gallery_whose_folder_is_gone_takes_nothing(bundle: Bundle, tmp_path: Path) -> None:
    """Deleted, or deleted and made again: 507, and nothing of it is found afterwards."""
    gallery = open_gallery(tmp_path / "g", dim=DIM, digest=bundle.manifest.model_digest)
    with TestClient(create_app(lambda: Service(bundle, gallery=gallery)), base_url="http://localhost") as client:
        assert client.post("/v1/gallery?name=x&id=a", json={"embeddings": [unit(1)]}).status_code == 201
        shutil.rmtree(tmp_path / "g")
        for _ in range(2):
            answers = [
                client.post("/v1/gallery?name=y", json={"embeddings": [unit(2)]}),
                client.delete("/v1/gallery/a"),
            ]
            for answer in answers:
                assert answer.status_code == 507 and "deleted or replaced" in answer.json()["detail"]
            (tmp_path / "g").mkdir(exist_ok=True)
            (tmp_path / "g" / "journal").write_bytes(b"another")
        assert client.get("/v1/gallery").json()["total"] == 1
        assert (tmp_path / "g" / "journal").read_bytes() == b"another"


def test_the_gallery_comes_and_goes(client: TestClient, bundle: Bundle) -> None:
    added = client.post("/v1/gallery", params={"name": "Ada <i>"}, files=[picture(200), picture(201)])
    assert added.status_code == 201
    first, second = added.json()["entries"]
    given = client.post("/v1/gallery", params={"name": "Grace", "id": "grace"}, json={"embeddings": [unit(7)]}).json()
    assert given["entries"] == [{"id": "grace", "name": "Grace", "thumbnail": None}]
    near = client.post("/v1/search?among=gallery&k=3", files=[picture(201)]).json()["results"][0]
    assert near[0]["id"] == second["id"] and abs(near[0]["score"] - 1) < 1e-6 and len(near) == 3
    assert client.get(second["thumbnail"]).headers["content-type"] == "image/jpeg"
    assert client.get("/v1/gallery/grace/thumbnail").status_code == 404
    page = client.get("/v1/gallery", params={"text": "ADA", "limit": 1, "offset": 1}).json()
    assert page == {"total": 2, "writable": True, "entries": [second]}
    assert client.post("/v1/gallery?name=x&id=grace", json={"embeddings": [unit(8)]}).status_code == 409
    for id in (first["id"], second["id"], "grace"):
        assert client.delete(f"/v1/gallery/{id}").status_code == 204
    assert client.delete("/v1/gallery/grace").status_code == 404
    assert client.get("/v1/gallery").json()["total"] == 0
    assert client.post("/v1/search?among=gallery", files=[picture(201)]).json()["results"] == [[]]


def test_what_the_service_says_of_itself(client: TestClient, bundle: Bundle) -> None:
    about = client.get("/v1/model").json()
    assert about["num_classes"] == CLASSES and about["default_far"] == 1e-3 and about["max_images"] == 4
    assert client.get("/healthz").json() == {"status": "ok", "model_digest": bundle.manifest.model_digest}
    client.post("/v1/embed", files=[picture(1), picture(2)])
    text = client.get("/metrics").text
    assert 'plsc_requests_total{path="/v1/embed",method="POST",status="200"}' in text
    for line in text.splitlines():  # each is a comment, or a name and a number
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0
    assert client.get("/v1/classes/29").json()["name"] == NAMES[29]
    number = client.get("/healthz", headers={"x-request-id": "mine-1"}).headers["x-request-id"]
    assert number == "mine-1"
    assert client.get("/healthz", headers={"x-request-id": "a\tb"}).headers["x-request-id"] != "a\tb"
    assert client.get("/openapi.json").json()["paths"].keys() >= {
        "/v1/embed",
        "/v1/search",
        "/v1/verify",
        "/v1/gallery",
    }


def test_the_page_brings_all_it_needs(client: TestClient) -> None:
    page = client.get("/")
    assert (
        "text/html" in page.headers["content-type"] and "default-src 'none'" in page.headers["content-security-policy"]
    )
    for path in ("/page/app.js", "/page/style.css"):
        assert path in page.text and client.get(path).status_code == 200
    everything = page.text + client.get("/page/app.js").text + client.get("/page/style.css").text
    assert "http://" not in everything and "https://" not in everything  # no asset of others


# ---- bad input


def bomb(width: int, height: int) -> bytes:
    """A PNG of so many pixels, whose few bytes would decode to gigabytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * min(width * height, 10**6))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def scans(count: int) -> bytes:
    """A small progressive JPEG whose last scan is there so many times: a few bytes each, and each a pass over all."""
    data = encode_progressive(draw(1))
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * count + data[-2:]


def encode_progressive(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", progressive=True)
    return out.getvalue()


def files(*contents: bytes, field: str = "image") -> dict[str, Any]:
    return {"files": [(field, ("x", content)) for content in contents]}


def raw(content: bytes | str, kind: str) -> dict[str, Any]:
    return {"content": content, "headers": {"content-type": kind}}


def rows(*embeddings: list[Any]) -> dict[str, Any]:
    return {"json": {"embeddings": list(embeddings)}}


GOOD = encode(draw(1))
FORM, JSON = "multipart/form-data; boundary=b", "application/json"
HEAD = b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
CUT = HEAD + GOOD
NAN = json.dumps({"embeddings": [[float("nan")] * DIM]})
INFINITE = f'{{"embeddings": [[1e999{", 0" * (DIM - 1)}]]}}'
BAD: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "not an image": ("/v1/embed", files(b"hello" * 100), 422, "image 0: broken or unknown"),
    "cut image": ("/v1/embed", files(GOOD, GOOD[: len(GOOD) // 2]), 422, "image 1: broken"),
    "svg": ("/v1/embed", files(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), 422, "it is none of the known"),
    "bomb": ("/v1/embed", files(bomb(30_000, 30_000)), 422, "expected at most 1000000"),
    "small bomb": ("/v1/embed", files(bomb(2000, 2000)), 422, "got 2000 x 2000 pixels"),
    "bomb of scans": ("/v1/embed", files(GOOD, scans(200)), 422, "image 1: got a JPEG of 210 scans"),
    "zero bytes": ("/v1/embed", files(b""), 422, "got no bytes"),
    "zero bytes, raw": ("/v1/embed", raw(b"", "image/png"), 422, "got no bytes"),
    "too large": ("/v1/embed", files(b"x" * 400_000), 413, "expected at most 300000"),
    "too many": ("/v1/embed", files(*[GOOD] * 5), 413, "expected at most 4"),
    "far too many": ("/v1/embed", files(*[GOOD] * 50), 413, "got more than 4 images, expected at most 4"),
    "wrong content type": ("/v1/embed", raw(b"x", "text/plain"), 415, "text/plain"),
    "no content type": ("/v1/embed", {"content": GOOD}, 415, "got none"),
    "json to embed": ("/v1/embed", rows(unit(0)), 415, "expected images"),
    "wrong field": ("/v1/embed", files(GOOD, field="picture"), 422, "'picture'"),
    "text field": ("/v1/embed", {"files": [("image", (None, "abc"))]}, 422, "text field 'image'"),
    "no part": ("/v1/embed", raw(b"--b--\r\n", FORM), 422, "got no image"),
    "no boundary": ("/v1/embed", raw(b"x", "multipart/form-data"), 422, "boundary"),
    "broken form": ("/v1/embed", raw(b"garbage", FORM), 422, "form"),
    "cut form": ("/v1/embed", raw(CUT, FORM), 422, "got one that is cut"),
    "form cut in its image": ("/v1/embed", raw(CUT[:-300], FORM), 422, "got one that is cut"),
    "form cut in its last boundary": ("/v1/embed", raw(CUT + b"\r\n--b-", FORM), 422, "got one that is cut"),
    "form cut after one of two": ("/v1/embed", raw(CUT + b"\r\n--b\r\n", FORM), 422, "got one that is cut"),
    "strange charset": ("/v1/embed", raw(b"--b--", f"{FORM}; charset=wat"), 422, "form"),
    "nan": ("/v1/search", raw(NAN, JSON), 422, "nan"),
    "infinite": ("/v1/search", raw(INFINITE, JSON), 422, "infinite"),
    "too large for float32": ("/v1/search", rows([1e300] * DIM), 422, "infinite in float32"),
    "whole number of 400 digits": ("/v1/search", rows([10**400] * DIM), 422, "embeddings"),
    "wrong dimension": ("/v1/search", rows([1.0] * 3), 422, "an embedding of 3 numbers"),
    "ragged": ("/v1/search", rows(unit(0), unit(0)[1:]), 422, f"of {DIM - 1} numbers"),
    "no rows": ("/v1/search", rows(), 422, "no list of lists"),
    "strings": ("/v1/search", rows(["1"] * DIM), 422, "something else than numbers"),
    "booleans": ("/v1/search", rows([True] * DIM), 422, "something else than numbers"),
    "no direction": ("/v1/search", rows([0] * DIM), 422, "no direction"),
    "other json": ("/v1/search", {"json": [1, 2]}, 422, "expected"),
    "no embeddings": ("/v1/search", {"json": {"embedding": [unit(0)]}}, 422, "got no embeddings"),
    "no json": ("/v1/search", raw(b"{", JSON), 422, "got no JSON (Expecting"),
    "not utf-8": ("/v1/search", raw(b"\xff\xfe{", JSON), 422, "expected"),
    "null": ("/v1/search", raw(b"null", JSON), 422, "got null, expected {"),
    "a number": ("/v1/search", raw(b"1.5", JSON), 422, "got a number, expected {"),
    "nested": ("/v1/search", raw(b"[" * 60_000, JSON), 422, "deeply nested"),
    "much json": (
        "/v1/search",
        raw(b" " * 200_000, JSON),
        413,
        f"expected at most {4 * DIM * 40 + 65_536} of JSON, enough for 4 embeddings of {DIM} numbers",
    ),
    "k 0": ("/v1/search?k=0", files(GOOD), 422, "k: got '0', expected it to be greater than or equal to 1"),
    "k large": ("/v1/search?k=101", files(GOOD), 422, "k: "),
    "among": ("/v1/search?among=people", files(GOOD), 422, "among: "),
    "one to verify": ("/v1/verify", files(GOOD), 422, "got 1 images or embeddings, expected two"),
    "far": ("/v1/verify?far=0.5", files(GOOD, GOOD), 422, "a rate that was measured"),
    "far nan": ("/v1/verify?far=nan", files(GOOD, GOOD), 422, "far"),
    "no name": ("/v1/gallery", files(GOOD), 422, "name: got none, expected one"),
    "name of spaces": ("/v1/gallery?name=%20%20", files(GOOD), 422, "expected a character that can be seen"),
    "blank name": ("/v1/gallery?name=%00", files(GOOD), 422, "cannot be seen"),
    "long name": (f"/v1/gallery?name={'x' * 257}", files(GOOD), 422, "name: "),
    "path as id": ("/v1/gallery?name=x&id=../../x", files(GOOD), 422, "id: "),
    "hidden id": ("/v1/gallery?name=x&id=.x", files(GOOD), 422, "id: "),
    "name that is no UTF-8": ("/v1/gallery?name=%ff", files(GOOD), 422, "no UTF-8"),
    "name of half a pair": ("/v1/gallery?name=%ED%A0%80", files(GOOD), 422, "no UTF-8"),
    "two names": ("/v1/gallery?name=a&name=b", files(GOOD), 422, "name: got 2 of them, expected one"),
    "two k": ("/v1/search?k=1&k=2", files(GOOD), 422, "k: got 2 of them"),
    "another parameter": ("/v1/search?kk=1", files(GOOD), 422, "got 'kk', expected only among, k"),
    "a parameter too many": ("/v1/embed?k=1", files(GOOD), 422, "got 'k', expected no parameter"),
    "an empty parameter": ("/v1/search?K=", files(GOOD), 422, "got 'K', expected only"),
    "two content types": (
        "/v1/search",
        {"content": GOOD, "headers": [("content-type", "image/png"), ("content-type", JSON)]},
        422,
        "content type: got 2 of them",
    ),
    "one id for two": ("/v1/gallery?name=x&id=a", files(GOOD, GOOD), 422, "id: got one for 2 images"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_words(client: TestClient, case: str) -> None:
    path, given, status, words = BAD[case]
    answer = client.post(path, **given)
    assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert client.get("/v1/gallery").json()["total"] == 0


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/classes/30", 404),
        ("/v1/classes/30/thumbnail", 404),
        ("/v1/classes/-1", 422),
        ("/v1/classes/99999999999999999999999999", 422),
        ("/v1/classes/abc", 422),
        ("/v1/gallery/nobody/thumbnail", 404),
        ("/v1/gallery/..%2f..%2fetc%2fpasswd/thumbnail", 404),
        ("/v1/gallery/%2e%2e/thumbnail", 422),
        ("/page/../app.py", 404),
        ("/page/%2e%2e%2fapp.py", 404),
        ("/page/app.js%00", 404),
        ("/v1/gallery?limit=0", 422),
        ("/v1/gallery?offset=99999999999999999999999", 422),
        ("/v1/embed", 405),
        ("/docs", 404),
    ],
)
def test_paths_that_lead_nowhere(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status and answer.json()["detail"]
    assert "root:" not in answer.text and "import" not in answer.text


def test_other_sites_are_kept_out(client: TestClient) -> None:
    """A page elsewhere can make a browser send requests to this machine: neither by name nor by origin is it let in."""
    for host in ("evil.example", "127.0.0.1.evil.example", "192.168.1.5", ""):
        assert client.get("/v1/model", headers={"host": host}).status_code == 421
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "127.0.0.2:8000"):
        assert client.get("/v1/model", headers={"host": host}).status_code == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", "http://[", "http://[::1", "//[x]", ""):
        answer = client.post("/v1/gallery?name=x", files=[picture(1)], headers={"origin": origin})
        assert answer.status_code == 403
    assert client.post("/v1/embed", files=[picture(1)], headers={"origin": "http://127.0.0.1"}).status_code == 200


def test_a_token_guards_all_but_the_page(bundle: Bundle) -> None:
    app = create_app(lambda: Service(bundle), token=TOKEN, any_host=True)
    with TestClient(app, base_url="https://faces.example") as client:
        for path in ("/", "/healthz", "/page/app.js"):
            assert client.get(path).status_code == 200
        for path in ("/v1/model", "/metrics", "/v1/gallery", "/openapi.json", "/nowhere"):
            assert client.get(path).status_code == 401
            for wrong in ("Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer ", f"Bearer {TOKEN}x", "Bearer \xe9"):
                given = {"authorization": wrong.encode("latin-1")}
                assert client.get(path, headers=given).status_code == 401, wrong  # type: ignore[arg-type]
        right = {"authorization": f"Bearer {TOKEN}"}
        assert client.get("/v1/model", headers=right).status_code == 200
        no_gallery = client.post("/v1/gallery?name=x", files=[picture(1)], headers=right)
        assert no_gallery.status_code == 409 and "without --gallery" in no_gallery.json()["detail"]


def test_too_many_at_once_is_429(bundle: Bundle) -> None:
    """With no room for any image, or any request, the answer comes at once and says when to try again."""
    for settings in (Settings(queue=1), Settings(max_requests=0)):
        with TestClient(
            create_app(lambda s=settings: Service(bundle, settings=s)), base_url="http://localhost"
        ) as client:
            answer = client.post("/v1/embed", files=[picture(1), picture(2)])
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"


def test_a_failure_inside_is_500_without_its_traceback(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        dim = DIM

        def __len__(self) -> int:
            return CLASSES

        def search(self, queries: object, k: int) -> Any:
            raise RuntimeError("the disk with the centres is gone: /secret/path")

    with TestClient(create_app(lambda: Service(bundle, classes=Broken())), base_url="http://localhost") as client:
        answer = client.post("/v1/search", files=[picture(1)])
    assert answer.status_code == 500 and "secret" not in answer.text and answer.json()["request_id"] in caplog.text
    assert "the disk with the centres is gone" in caplog.text


def test_time_is_up(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> Service:
        service = Service(bundle, settings=Settings(limits=replace(LIMITS, seconds=0.05), delay=30))
        return service

    with TestClient(create_app(start), base_url="http://localhost") as client:
        answer = client.post("/v1/embed", files=[picture(1)])
    assert answer.status_code == 504 and "no answer within 0.05 s" in answer.json()["detail"]


def test_time_is_up_before_anything_is_added(bundle: Bundle, tmp_path: Path) -> None:
    """An image that is never embedded is 504, and not there afterwards; what is being written is waited for."""
    gallery = open_gallery(tmp_path / "g", dim=DIM, digest=bundle.manifest.model_digest)
    settings, write = Settings(limits=replace(LIMITS, seconds=0.2), delay=30), gallery.add
    gallery.add = lambda new: (time.sleep(0.5), write(new))[1]  # type: ignore[method-assign]
    app = create_app(lambda: Service(bundle, gallery=gallery, settings=settings))
    with TestClient(app, base_url="http://localhost") as client:
        answer = client.post("/v1/gallery?name=x", files=[picture(1)])
        assert answer.status_code == 504 and "no answer within 0.2 s" in answer.json()["detail"]
        assert client.get("/v1/gallery").json()["total"] == 0
        assert client.post("/v1/gallery?name=x", json={"embeddings": [unit(1)]}).status_code == 201
        assert client.get("/v1/gallery").json()["total"] == 1


def test_an_animation_is_its_first_frame(client: TestClient, bundle: Bundle) -> None:
    for kind in ("PNG", "WEBP"):
        out = io.BytesIO()
        first, *others = [Image.fromarray(draw(seed)) for seed in (3, 4, 5)]
        first.save(out, kind, save_all=True, append_images=others, lossless=True)
        found = client.post("/v1/embed", files=[("image", out.getvalue())]).json()["embeddings"]
        np.testing.assert_allclose(found, offline(bundle, 3), atol=1e-6)
    for kind in ("GIF", "TIFF"):
        assert "none of the known" in client.post("/v1/embed", files=[picture(3, kind)]).json()["detail"]


def test_a_gallery_that_is_a_file_is_read_only(bundle: Bundle, tmp_path: Path) -> None:
    from plsc.train.export import export_embeddings

    rows, digest = offline(bundle, 1, 2), bundle.manifest.model_digest
    path = export_embeddings(tmp_path / "e.safetensors", rows, labels=[0, 1], names=["a.jpg", "b.jpg"], digest=digest)
    gallery = open_gallery(path, dim=DIM, digest=digest)
    with TestClient(create_app(lambda: Service(bundle, gallery=gallery)), base_url="http://localhost") as client:
        near = client.post("/v1/search?among=gallery&k=2", files=[picture(2)]).json()["results"][0]
        assert [one["name"] for one in near] == ["b.jpg", "a.jpg"]
        refused = client.post("/v1/gallery?name=x", files=[picture(1)])
        assert refused.status_code == 409 and "only read" in refused.json()["detail"]
        assert client.delete("/v1/gallery/0").status_code == 409
