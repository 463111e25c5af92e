"""A real server: its client, its end, slow and vanishing clients, large bodies, two on one gallery, kill -9, TLS."""

import http.client
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plsc.serve import Client, ServiceError
from plsc.serve.bundle import Bundle

from .conftest import DIM, draw, encode
from .running import Running, words

slow = pytest.mark.slow
TOKEN = "correct horse battery"


@pytest.fixture(scope="module")
def server(bundle_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    gallery = tmp_path_factory.mktemp("server") / "gallery"
    with Running(bundle_path, "--gallery", str(gallery), "--max-mb", "1") as running:
        yield running


@slow
def test_the_client_says_what_the_model_says(server: Running, bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode(draw(4)))
    wanted = bundle.model.embed(np.stack([draw(4), draw(60)]))[0]
    with Client(server.url) as client:
        assert client.model()["embedding_size"] == DIM
        np.testing.assert_allclose(client.embed([path, encode(draw(60))]), wanted, atol=1e-6)
        assert client.search([path], k=1)[0][0]["name"] == "Person 4"
        assert client.verify([path, str(path)])["same"] is True
        ids = client.add("Ada Ö/../?&", [path, encode(draw(61))])
        assert [one["name"] for one in client.gallery()["entries"]] == ["Ada Ö/../?&"] * 2
        assert client.search(embeddings=wanted[:1], among="gallery", k=1)[0][0]["id"] == ids[0]
        for id in ids:
            client.remove(id)
        with pytest.raises(ServiceError, match="no entry") as caught:
            client.remove(ids[0])
        assert caught.value.status == 404 and caught.value.request_id
        with pytest.raises(ValueError, match="expected one of them"):
            client.search()
        with pytest.raises(ValueError, match="expected a list"):
            client.embed("a.png")  # type: ignore[arg-type]


@slow
def test_head_and_options_leave_the_connection_in_order(server: Running) -> None:
    """On one connection: what comes after an answer without a body is the next answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for method, path, status in (
        ("HEAD", "/", 200),
        ("OPTIONS", "/v1/gallery", 204),
        ("HEAD", "/v1/embed", 405),
        ("HEAD", "/nowhere", 404),
        ("HEAD", "/metrics", 200),
    ):
        connection.request(method, path)
        line = connection.sock
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, b""), path
        connection.request("GET", "/healthz")
        assert connection.sock is line and b'"ok"' in connection.getresponse().read()


@slow
def test_a_body_of_50_mb(server: Running) -> None:
    """Refused in words even while the client is still sending, and the service's memory does not hold it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/embed", b"x" * (50 * 2**20), {"Content-Type": "image/png"})
    answer = connection.getresponse()
    assert answer.status == 413 and "expected at most 1048576" in answer.read().decode()

    def parts() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 2**20

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/embed", parts(), {"Content-Type": "image/png"}, encode_chunked=True)
    assert connection.getresponse().status == 413


@slow
def test_a_client_that_goes_away(server: Running) -> None:
    """In the middle of the head, of the body, or before the answer: the service goes on, and nothing failed in it."""
    body = encode(draw(5))
    head = (
        f"POST /v1/embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    for content in (b"POST /v1/em", head.encode() + body[:100], head.encode() + body):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(content)
    with Client(server.url) as client:
        assert client.search([body], k=1)[0][0]["name"] == "Person 5"
    text = Client(server.url)._connection
    text.request("GET", "/metrics")
    assert 'status="500"' not in text.getresponse().read().decode()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started wait a second, where others wait ten and more, for clients to send and to read."""
    program = (
        "import plsc.serve.server as s, plsc.cli as c, plsc.serve.bodies as b, sys\n"
        "s.HEAD_SECONDS = s.ANSWER_SECONDS = 1.0\n"
        "b.Limits.__init__.__defaults__ = tuple(1.0 if d == 15.0 else d for d in b.Limits.__init__.__defaults__)\n"
        "sys.exit(c.serve(sys.argv[1:]))"
    )
    popen = subprocess.Popen

    def start(command: list[str], **given: Any) -> Any:
        return popen([command[0], "-u", "-c", program, *command[command.index("serve") + 1 :]], **given)

    monkeypatch.setattr("subprocess.Popen", start)


@slow
@pytest.mark.usefixtures("impatient")
def test_clients_that_do_not_read_are_let_go(bundle_path: Path) -> None:
    """Whoever asks and never takes the answers holds a request, and the answers, for a while and not for good."""
    with Running(bundle_path, "--max-requests", "4") as running:
        deaf = []
        for _ in range(8):
            line = socket.socket()
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            line.connect(("127.0.0.1", running.port))
            line.settimeout(0.5)
            with suppress(TimeoutError):  # the server reads no more requests
                for _ in range(1000):
                    line.sendall(b"GET /page/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
            deaf.append(line)
        with Client(running.url) as client:
            for _ in range(600):
                with suppress(ServiceError):  # 429 while the deaf ones are waited for
                    assert client.search([encode(draw(5))], k=1)[0][0]["name"] == "Person 5"
                    break
                time.sleep(0.1)
            else:
                pytest.fail("the deaf clients hold all requests")
        for line in deaf:
            line.settimeout(60)
            with suppress(ConnectionResetError):
                while line.recv(65536):
                    pass
            line.close()


@slow
@pytest.mark.usefixtures("impatient")
def test_slow_clients_are_let_go(bundle_path: Path) -> None:
    """Heads and bodies that come drop by drop are cut off, while others are served."""
    with Running(bundle_path) as running:
        dripping = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(20)]
        for line in dripping[:10]:
            line.sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        for line in dripping[10:]:
            line.sendall(
                b"POST /v1/embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 99\r\n\r\nx"
            )
        with Client(running.url) as client:
            assert client.search([encode(draw(5))], k=1)[0][0]["name"] == "Person 5"
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.2):
                for line in dripping[:10]:
                    with suppress(OSError):
                        line.sendall(b"z")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            for number, line in enumerate(dripping):
                line.settimeout(60)
                try:
                    data = line.recv(4096)
                except ConnectionResetError:
                    data = b""
                assert data == b"" if number < 10 else data.startswith(b"HTTP/1.1 408"), data
                line.close()
        finally:
            ended.set()
            thread.join()


@slow
def test_sigterm_answers_what_has_come(bundle_path: Path, tmp_path: Path) -> None:
    """A request under way when the server is told to stop gets its answer; the process ends in order."""
    running = Running(bundle_path, "--gallery", str(tmp_path / "g"), "--delay-ms", "3000")
    found: list[list[dict]] = []
    asking = threading.Thread(target=lambda: found.extend(Client(running.url).search([encode(draw(6))], k=1)))
    asking.start()
    metrics = Client(running.url)._connection
    for _ in range(300):  # until the image waits for company
        metrics.request("GET", "/metrics")
        if "plsc_queue_images 1" in metrics.getresponse().read().decode():
            break
        time.sleep(0.05)
    assert running.stop() == 0, words(running)
    asking.join()
    assert found[0][0]["name"] == "Person 6"


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(bundle_path: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The first waits for a half-sent request, even where it is sent twice; one after that says so, and ends."""
    running = Running(bundle_path, "--gallery", str(tmp_path / "g"))
    with Client(running.url) as client:
        kept = client.add("Ada", [encode(draw(1))])
    with socket.create_connection(("127.0.0.1", running.port)) as line:
        line.sendall(
            b"POST /v1/embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 99\r\n\r\nx"
        )
        metrics = Client(running.url)._connection
        for _ in range(300):
            metrics.request("GET", "/metrics")
            if "plsc_requests_in_flight 2" in metrics.getresponse().read().decode():
                break
            time.sleep(0.05)
        metrics.close()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.stdout is not None
        for said in running.process.stdout:
            if "stopping: 1 requests to answer" in said:
                break
        running.process.send_signal(signal.SIGTERM)  # at once: such as timeout(1) does
        time.sleep(2)
        assert running.process.poll() is None
        line.settimeout(60)
        assert running.stop(number) == -number
        assert f"ended by a second {number.name}: 1 requests unanswered" in words(running)
        assert "Traceback" not in words(running)
        with suppress(ConnectionResetError):
            assert line.recv(100) == b""
    with Running(bundle_path, "--gallery", str(tmp_path / "g")) as again, Client(again.url) as client:
        assert [one["id"] for one in client.gallery()["entries"]] == kept


@slow
def test_what_is_refused_before_any_route_is_counted(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no HTTP, and connections beyond those that may be: the latter in the words of all errors, and let go."""
    program = (
        "import plsc.serve.server as s, plsc.cli as c, sys\n"
        "s.Address.__init__.__defaults__ = tuple(3 if d == 512 else d for d in s.Address.__init__.__defaults__)\n"
        "sys.exit(c.serve(sys.argv[1:]))"
    )
    popen = subprocess.Popen

    def start(command: list[str], **given: Any) -> Any:
        return popen([command[0], "-u", "-c", program, *command[command.index("serve") + 1 :]], **given)

    monkeypatch.setattr("subprocess.Popen", start)
    with Running(bundle_path) as running:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", running.port)) as line:
                line.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
                assert line.recv(100).startswith(b"HTTP/1.1 400")
        lines = [http.client.HTTPConnection("127.0.0.1", running.port, timeout=60) for _ in range(4)]
        for line in lines:
            line.connect()
        lines[3].request("GET", "/healthz")
        answer = lines[3].getresponse()
        assert (answer.status, b"too many connections" in answer.read()) == (503, True)
        assert answer.headers["connection"] == "close" and answer.headers["retry-after"] == "1"
        lines[0].request("GET", "/metrics")
        text = lines[0].getresponse().read().decode()
    assert 'plsc_requests_total{path="other",method="other",status="400"} 2\n' in text
    assert 'plsc_requests_total{path="/healthz",method="GET",status="503"} 1\n' in text


@slow
def test_an_end_that_waits_for_no_decoder(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that take for ever hold up neither those that came, for longer than they may, nor the end."""
    program = (
        "import plsc.serve.server as s, plsc.serve.service as v, plsc.cli as c, sys, time\n"
        "s.END_SECONDS = 1\n"
        "v.decode_image = lambda *a, **k: time.sleep(3600)\n"
        "sys.exit(c.serve(sys.argv[1:]))"
    )
    popen = subprocess.Popen

    def start(command: list[str], **given: Any) -> Any:
        return popen([command[0], "-u", "-c", program, *command[command.index("serve") + 1 :]], **given)

    monkeypatch.setattr("subprocess.Popen", start)
    with Running(bundle_path, "--timeout", "1") as running:
        with Client(running.url) as client, pytest.raises(ServiceError, match="504"):
            client.embed([encode(draw(1))])
        line = socket.create_connection(("127.0.0.1", running.port))
        body = encode(draw(2))
        head = f"POST /v1/embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(body)}"
        line.sendall(f"{head}\r\n\r\n".encode() + body)
        assert running.stop() == 0  # within the minute that it waits
        line.close()
    assert "threads are left at work" in words(running) and "Traceback" not in words(running)


@slow
def test_two_servers_on_one_gallery_and_kill(bundle_path: Path, tmp_path: Path) -> None:
    """The second is refused; after kill -9 all that was acknowledged is there, and the gallery opens at once."""
    folder = tmp_path / "g"
    first = Running(bundle_path, "--gallery", str(folder))
    second = Running(bundle_path, "--gallery", str(folder))
    assert not second.url and second.process.returncode == 2 and "in use by another server" in words(second)
    kept: list[str] = []

    def add() -> None:
        with Client(first.url) as client:
            for number in range(10**6):
                try:
                    kept.extend(client.add(f"n{number}", [encode(draw(number))]))
                except (OSError, http.client.HTTPException):
                    return

    adding = threading.Thread(target=add)
    adding.start()
    while len(kept) < 15:
        time.sleep(0.01)
    first.stop(signal.SIGKILL)
    adding.join()
    with Running(bundle_path, "--gallery", str(folder)) as again, Client(again.url) as client:
        found = {entry["id"] for entry in client.gallery(limit=500)["entries"]}
        assert set(kept) <= found and len(found) <= len(kept) + 1
        client.remove(kept[0])
    with Running(bundle_path, "--gallery", str(folder)) as again, Client(again.url) as client:
        assert kept[0] not in {entry["id"] for entry in client.gallery(limit=500)["entries"]}


@slow
def test_tls_and_token(bundle_path: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    flags = ("--host", "0.0.0.0", "--tls-certificate", str(certificate), "--tls-key", str(key))
    with Running(bundle_path, *flags, token=TOKEN) as running:
        tls = ssl.create_default_context(cafile=str(certificate))
        assert running.url.startswith("https://127.0.0.1:")
        with Client(running.url, token=TOKEN, tls=tls) as client:
            assert client.search([encode(draw(1))], k=1)[0][0]["name"] == "Person 1"
        with Client(running.url, token="wrong", tls=tls) as client, pytest.raises(ServiceError, match="401"):
            client.model()
        with Client(running.url, token=TOKEN) as client, pytest.raises(ssl.SSLError):
            client.model()


@slow
def test_load_with_bad_requests_mixed_in(server: Running) -> None:
    """Eight clients at once, a third of their requests bad: right answers, expected refusals, memory that settles."""
    images = [encode(draw(i)) for i in range(20)]
    problems: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with Client(server.url) as client:
            for _ in range(60):
                i = int(rng.integers(20))
                kind = int(rng.integers(6))
                try:
                    if kind == 0:
                        client.embed([images[i][:50]])
                        problems.append("a cut image was taken")
                    elif kind == 1:
                        client.search(embeddings=[[1.0]])
                        problems.append("a short embedding was taken")
                    elif client.search([images[i]], k=1)[0][0]["id"] != str(i):
                        problems.append(f"image {i} is not its class")
                except ServiceError as error:
                    if kind > 1 or error.status != 422:
                        problems.append(str(error))

    def memory() -> int:
        return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096

    sizes = []
    for number in range(3):
        threads = [threading.Thread(target=work, args=(8 * number + i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sizes.append(memory())
    assert problems == []
    assert sizes[2] - sizes[1] < 20 * 2**20, sizes
