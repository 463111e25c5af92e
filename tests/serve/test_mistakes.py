"""What users get wrong: addresses, tokens, flags, the client's arguments; and sockets that need no whole server."""

import asyncio
import http.server
import json
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from plsc import cli
from plsc.serve import Client, ServiceError
from plsc.serve.app import create_app
from plsc.serve.bundle import Bundle
from plsc.serve.gate import is_loopback
from plsc.serve.server import Address, _listen, read_token, serve
from plsc.serve.service import Service

from .running import Running, words

slow = pytest.mark.slow
TOKEN = "correct horse battery"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (Address(host="0.0.0.0"), "no token is set"),
        (Address(host="192.168.1.5"), "no token is set"),
        (Address(host="example.com"), "no token is set"),
        (Address(host="0.0.0.0", token="short"), "expected 16 or more"),
        (Address(tls_key="x"), "expected both or none"),
        (Address(tls_key="x", tls_certificate="y"), "y is no file"),
        (Address(tls_key=__file__, tls_certificate=__file__), "do not go together"),
        (Address(port=80_000), "expected 0 to 65535"),
        (Address(port=-1), "expected 0 to 65535"),
    ],
)
def test_addresses_that_are_refused(address: Address, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        address.check()


def test_addresses_that_are_fine() -> None:
    for host in ("127.0.0.1", "127.5.5.5", "::1", "localhost"):
        Address(host=host).check()
        assert is_loopback(host)
    Address(host="0.0.0.0", token=TOKEN).check()
    assert Address(host="::1", port=1).url == "http://[::1]:1/"


def test_the_token_comes_from_a_file_that_others_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    os.chmod(path, 0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_token(str(path))
    os.chmod(path, 0o600)
    assert read_token(str(path)) == TOKEN
    monkeypatch.setenv("PLSC_TOKEN", "from the environment")
    assert read_token(None) == "from the environment"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe" * 20, "bytes that are no text"),
        (b"", "got 0 characters"),
        (b"0123456789abcdef\n0123456789abcdef", "a line break"),
        (b"0123456789\x00abcdefgh", "a control character"),
        ("0123456789abcdef\u00e9".encode(), "of ASCII"),
        (None, "is no file"),
    ],
)
def test_token_files_that_are_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    """The sentence names the file, and never shows what is in it."""
    path = tmp_path / "token"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(ValueError, match=words) as caught:
        read_token(str(path))
    assert str(path) in str(caught.value) and "0123" not in str(caught.value)
    with pytest.raises(ValueError, match=r"nowhere: cannot be read \(No such file"):
        read_token(str(tmp_path / "nowhere"))


def test_a_token_of_the_environment_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for token in (f" {TOKEN}", f"{TOKEN}\n", f"{TOKEN}\nX-Other: 1"):
        monkeypatch.setenv("PLSC_TOKEN", token)
        with pytest.raises(ValueError, match="PLSC_TOKEN: got a token with a line break"):
            read_token(None)
        with pytest.raises(ValueError, match="line break") as caught:
            Client(token=token)
        assert "horse" not in str(caught.value)


def test_where_nobody_can_listen() -> None:
    """A port that is taken, an address of another machine, a name without an address: said before anything starts."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        for host, port in (("127.0.0.1", other.getsockname()[1]), ("192.0.2.1", 0), ("no-such-host.invalid", 0)):
            with pytest.raises(ValueError, match=r"cannot listen there .*give another --port or --host"):
                serve(lambda: pytest.fail("started"), Address(host=host, port=port, token=TOKEN))


def test_answers_are_not_held_back() -> None:
    """No connection waits for fuller packets (Nagle): with a client that acknowledges late, 40 ms an answer."""

    async def accepted_without_delay() -> int:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[int] = loop.create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                line = transport.get_extra_info("socket")
                found.set_result(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        (listening,) = _listen(Address(port=0))
        async with await loop.create_server(Accepted, sock=listening):
            with socket.create_connection(listening.getsockname()):
                return await asyncio.wait_for(found, 30)

    assert asyncio.run(accepted_without_delay())


def test_a_client_that_was_idle_adds_again() -> None:
    """A service that closes idle connections is no reason to fail, nor to send what changes something twice."""
    came: list[bytes] = []
    ended = threading.Event()
    body = b'{"entries": [{"id": "a", "name": "Ada", "thumbnail": null}]}'

    def answer(listening: socket.socket) -> None:
        for _ in range(2):
            line, _ = listening.accept()
            with line:
                data = b""
                while not data.endswith(b"--\r\n"):
                    data += line.recv(65536)
                came.append(data)
                line.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            ended.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=(listening,), daemon=True)
        thread.start()
        with Client(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=30) as client:
            assert client.add("Ada", [b"one"]) == ["a"]
            assert ended.wait(30)
            assert client.add("Ada", [b"two"]) == ["a"]
        thread.join(30)
    assert [b"one" in came[0], b"two" in came[1], len(came)] == [True, True, 2]


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    """Sends everything on, and notes what was asked."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(302)
        self.send_header("Location", "https://elsewhere.example/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_DELETE = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_what_the_client_makes_of_other_answers_and_arguments() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        for call in (lambda: Client(url).model(), lambda: Client(url).remove("a")):
            with pytest.raises(ServiceError, match=r"302: got sent on to https://elsewhere\.example/"):
                call()
        rows = np.ones((2, 3))
        for far in (np.float64(0.01), "0.01", 0.01):
            with pytest.raises(ServiceError, match="302"):
                Client(url).verify(embeddings=rows, far=far)  # type: ignore[arg-type]
            assert _Elsewhere.asked[-1] == "/v1/verify?far=0.01"
        with pytest.raises(ServiceError, match="302"):
            Client(url).verify(embeddings=rows, far=np.float32(0.5))  # type: ignore[arg-type]
        assert _Elsewhere.asked[-1] == "/v1/verify?far=0.5"
        count = len(_Elsewhere.asked)
        for words, wrong in (
            (r"embeddings: got complex128 \[2, 3\], expected real", lambda: Client(url).search(embeddings=rows * 1j)),
            (r"embeddings: got float64 \[3\], expected real", lambda: Client(url).search(embeddings=rows[0])),
            (r"embeddings: got <U1 \[1, 1\], expected real", lambda: Client(url).search(embeddings=[["1"]])),
            ("id: got an empty one", lambda: Client(url).remove("")),
            ("id: got an empty one", lambda: Client(url).add("Ada", [b"x"], id="")),
            ("far: got 'high', expected a number", lambda: Client(url).verify([b"x", b"y"], far="high")),  # type: ignore[arg-type]
            ("images: got Image, expected the bytes", lambda: Client(url).embed([Image.new("L", (2, 2))])),  # type: ignore[list-item]
            ("images: got Image, expected a list", lambda: Client(url).search(Image.new("L", (2, 2)))),  # type: ignore[arg-type]
            ("images: got one, expected a list", lambda: Client(url).verify("a.png", far=0.1)),
            ("images: got Image, expected a list", lambda: Client(url).embed(Image.new("L", (2, 2)))),  # type: ignore[arg-type]
        ):
            with pytest.raises(ValueError, match=words):
                wrong()
        assert len(_Elsewhere.asked) == count
        server.shutdown()
        thread.join(30)
    with pytest.raises(ConnectionRefusedError, match=rf"{url}: nobody answers there .*is plsc-serve running\?"):
        Client(url).model()


def test_urls_that_are_refused() -> None:
    for url in ("ftp://x", "127.0.0.1:8000", "http://", "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/?a=b"):
        with pytest.raises(ValueError, match="expected such as http"):
            Client(url)
    Client("http://127.0.0.1:8000/").close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-mb", "inf"], "--max-mb: got inf"),
        (["--max-mb", "nan"], "--max-mb: got nan"),
        (["--max-megapixels", "inf"], "--max-megapixels: got inf"),
        (["--timeout", "inf"], "--timeout: got inf"),
        (["--delay-ms", "inf"], "--delay-ms: got inf"),
        (["--delay-ms", "nan"], "--delay-ms: got nan"),
        (["--delay-ms", "-1"], "--delay-ms: got -1"),
        (["--threads", "-3"], "--threads: got -3"),
        (["--queue", "15"], "expected at least the 16 images"),
        (["--recall-queries", "0"], "--recall-queries: got 0"),
        (["--recall-queries", "-1"], "--recall-queries: got -1"),
        (["--gallery", "RUN"], "got a run, expected a folder of its own"),
        (["--gallery", "RUN/bundle"], "got the bundle"),
        (["--gallery", "RUN/bundle/people"], "got a folder in the bundle"),
        (["--gallery", "RUN/link/deep/er"], "got a folder in the bundle"),
        (["--gallery", "/proc/people"], "/proc/people: cannot be opened or made"),
    ],
)
def test_flags_that_are_refused(
    bundle_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    """In one sentence, status 2, before anything is listened at or written."""
    shutil.copytree(bundle_path, tmp_path / "bundle")
    (tmp_path / "link").symlink_to("bundle")
    before = sorted(tmp_path.rglob("*"))
    assert cli.serve([str(tmp_path), *(flag.replace("RUN", str(tmp_path)) for flag in flags)]) == 2
    found = capsys.readouterr().err
    assert words in found and "Traceback" not in found and len(found.strip().splitlines()) == 1, found
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["127.0.0.2", "127.0.0.1", "localhost"])
def test_a_host_that_starts_without_a_token_is_answered(bundle: Bundle, name: str) -> None:
    Address(host=name).check()
    with TestClient(create_app(lambda: Service(bundle)), base_url=f"http://{name}:8000") as client:
        assert client.get("/v1/model").status_code == 200


@slow
def test_mistakes_on_the_command_line(bundle_path: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    for flags, said in (
        (["--host", "0.0.0.0"], "no token is set"),
        (["--max-batch", "0"], "expected at least 1"),
        (["--timeout", "0"], "expected more than 0"),
        (["--gallery", str(bundle_path / "people")], "a folder in the bundle"),
        (["--host", "192.0.2.1", "--token-file", str(token)], "cannot listen there"),
    ):
        running = Running(bundle_path, *flags)
        running.process.wait(60)
        assert running.process.returncode == 2 and said in words(running), words(running)
        assert "Traceback" not in words(running)
    nothing = Running(tmp_path)
    assert nothing.process.returncode == 2 and "is not a bundle" in words(nothing)
    assert json.loads((bundle_path / "manifest.json").read_text())["format"] == "plsc-bundle"
