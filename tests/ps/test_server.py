"""What a server refuses, and that it goes on serving: strangers, wrong shapes, broken streams, paths, double shards."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from plsc.ps import Table, wire
from plsc.ps.ask import ask, table_of
from plsc.ps.link import Refused, ServerLost
from plsc.ps.remote import connect
from plsc.ps.server import Server

flight, pa = wire.flight, wire.pa
TOKEN = "0123456789abcdef"
KEYS = np.arange(10, dtype=np.uint64)
ONES = np.ones((10, 4), np.float32)


def tables() -> dict[str, Table]:
    return {"clicks": Table(4, locked=True), "wide": Table(9, locked=True)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tables(), folder=tmp_path / "folder", limit_mb=1, run="night", metrics_port=0) as made:
        yield made


def serves(server: Server) -> bool:
    with connect(server.address, table="clicks", run="night") as store:
        return store.pull(KEYS).shape == (10, 4)


def stream(server: Server, asked: object, schema: object = None) -> tuple[object, object, object]:
    """A bare stream, as somebody else might open it."""
    client = flight.FlightClient(f"grpc://{server.address}")
    command = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(command))
    writer.begin(wire.LAYOUTS["fp32"].schema if schema is None else schema)
    return client, writer, reader


def asked(**other: object) -> dict[str, object]:
    return {"protocol": 1, "table": "clicks", "run": "night", "client": "c", "rank": 0, "wire": "fp32"} | other


def answer(reader: object) -> dict[str, object]:
    return json.loads(reader.read_chunk().app_metadata.to_pybytes())


# ---- who may come in


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca, server and worker, and a stranger who signed for himself."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    try:
        for name in ("ca", "stranger"):
            key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key"]
            openssl("req", "-x509", *key, "-out", f"{name}.pem", "-days", "3650", "-subj", f"/CN={name}")
        for name in ("server", "worker"):
            key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key"]
            openssl("req", *key, "-out", f"{name}.csr", "-subj", f"/CN={name}")
            (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
            signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "3650", "-extfile", "san"]
            openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    except FileNotFoundError:
        pytest.skip("makes its certificates with the openssl command, which is not here")
    return folder


def test_token() -> None:
    with Server(tables(), token=TOKEN) as server:
        for wrong in ("another-token-0000", "", None):
            with pytest.raises(Refused, match="wrong token, or none"):
                connect(server.address, table="clicks", token=wrong)
            with pytest.raises(Refused, match="wrong token, or none"):
                ask(server.address, "stat", token=wrong)
        with connect(server.address, table="clicks", token=TOKEN) as store:
            store.push(KEYS, ONES)
        assert ask(server.address, "stat", token=TOKEN)[server.address]["tables"]["clicks"]["rows"] == 10


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_other_machines_need_a_secret(host: str, certificates: Path) -> None:
    with pytest.raises(ValueError, match="neither a token nor client_ca"):
        Server(tables(), host=host)
    tls = (str(certificates / "server.pem"), str(certificates / "server.key"))
    with pytest.raises(ValueError, match="neither a token nor client_ca"):
        Server(tables(), host=host, tls=tls)  # TLS keeps others from reading along, not from coming in
    with pytest.raises(ValueError, match="got 3 characters"):
        Server(tables(), host=host, token="abc")


def test_all_addresses_with_a_token(caplog: pytest.LogCaptureFixture) -> None:
    with Server(tables(), host="0.0.0.0", token=TOKEN) as server:
        assert "without tls" in caplog.text
        with connect(f"127.0.0.1:{server.port}", table="clicks", token=TOKEN) as store:
            assert store.pull(KEYS).shape == (10, 4)


def test_tls_and_certificates_of_workers(certificates: Path) -> None:
    def file(name: str) -> str:
        return str(certificates / name)

    tls, ca = (file("server.pem"), file("server.key")), file("ca.pem")
    with Server(tables(), tls=tls) as server:
        with connect(server.address, table="clicks", tls=ca) as store:
            assert store.push(KEYS, ONES) == 0
        with pytest.raises(ServerLost, match="both with TLS or both without"):
            connect(server.address, table="clicks", patience=0.1)  # no TLS to a TLS port
        with pytest.raises(ServerLost):
            connect(server.address, table="clicks", tls=file("stranger.pem"), patience=0.1)
        with connect(server.address, table="clicks", tls=ca) as store:
            assert store.pull(KEYS).shape == (10, 4)
    with Server(tables(), tls=tls, client_ca=ca) as server:
        mine = (file("worker.pem"), file("worker.key"))
        with connect(server.address, table="clicks", tls=ca, certificate=mine) as store:
            assert store.push(KEYS, ONES) == 0
        for theirs in (None, (file("stranger.pem"), file("stranger.key"))):
            with pytest.raises(ServerLost):
                connect(server.address, table="clicks", tls=ca, certificate=theirs, patience=0.1)
    with Server(tables()) as server, pytest.raises(ServerLost):
        connect(server.address, table="clicks", tls=ca, patience=0.1)  # TLS to a port without
    with pytest.raises(ValueError, match="client_ca: workers' certificates need tls"):
        Server(tables(), client_ca=ca)
    with pytest.raises(ValueError, match="certificate without tls"):
        connect("127.0.0.1:1", table="clicks", certificate=mine)


def test_worker_of_another_run(server: Server) -> None:
    with pytest.raises(Refused, match="this server is of run 'night', the worker of 'day'"):
        connect(server.address, table="clicks", run="day")
    assert serves(server)


def test_two_servers_of_one_index() -> None:
    with Server(tables(), index=0, count=2) as one, Server(tables(), index=0, count=2) as two:
        with pytest.raises(Refused, match=r"are not 0 to 1 of 2: .* is 0 of 2; .* is 0 of 2"):
            connect(f"{one.address},{two.address}", table="clicks")
        with pytest.raises(Refused, match="Name every server of the run once"):
            connect(f"{one.address},{one.address}", table="clicks")
        with pytest.raises(Refused, match="got 1 servers"):
            connect(one.address, table="clicks")


def test_two_servers_of_one_port_or_one_folder(server: Server) -> None:
    with pytest.raises(ValueError, match="is taken"):
        Server(tables(), port=server.port)
    assert server.state is not None
    with pytest.raises(ValueError, match="in use by another server"):
        Server(tables(), folder=server.state.folder)


def test_unknown_table_and_addresses(server: Server) -> None:
    with pytest.raises(Refused, match="got table 'users', expected one of clicks, wide"):
        connect(server.address, table="users", run="night")
    for wrong in ("somewhere", "a:b", "http://a:1", "127.0.0.1:1,,"):
        with pytest.raises(ValueError, match="expected host:port"):
            connect(wrong, table="clicks")
    with pytest.raises(ServerLost, match="is it running there"):
        connect("127.0.0.1:1", table="clicks", patience=0.05)
    with pytest.raises(ValueError, match="wire: got 'fp8'"):
        connect(server.address, table="clicks", wire="fp8")


# ---- what a request may be


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\x80\x04N.",  # a pickle of None
        b"[" * 3000,
        b"5",
        b"{}",
        asked(protocol=2),
        asked(table=5),
        asked(wire="fp64"),
        asked(rank=-1),
        asked(rank=1 << 40),
        asked(client=""),
        asked(client="c" * 5000),
    ],
)
def test_descriptors_that_are_none(server: Server, wrong: object) -> None:
    client, _, reader = stream(server, wrong)
    with client:
        assert "error" in answer(reader)
    assert serves(server)


def test_schema_of_something_else(server: Server) -> None:
    other = pa.schema([("keys", pa.list_(pa.uint64())), ("values", pa.list_(pa.float64()))])
    client, _, reader = stream(server, asked(), other)
    with client:
        assert "got schema" in answer(reader)["error"]
    client, _, reader = stream(server, asked(wire="fp16"))
    with client:
        assert "got schema" in answer(reader)["error"]
    assert serves(server)


def test_rows_of_another_table_and_oversized_batches(server: Server) -> None:
    with (
        connect(server.address, table="wide", run="night") as wide,
        connect(server.address, table="clicks", run="night") as store,
    ):
        store.dim = 9  # as a worker that was built for the other table
        with pytest.raises(Refused, match="got 90 numbers for 10 keys, expected 40: table 'clicks' has dim 4"):
            store.push(KEYS, np.ones((10, 9), np.float32))
        store.dim = 4
        assert store.push(KEYS, ONES) == 0  # the stream is as good as before
        many = np.arange(1 << 16, dtype=np.uint64)
        link, layout = store._links[0], wire.LAYOUTS["fp32"]
        call = link.send(wire.Request(wire.PUSH), layout.pack(many, np.ones((1 << 16, 4), np.float32)))
        with pytest.raises(Refused, match="expected at most 1048576; make batches smaller or limit_mb larger"):
            link.wait(call)
        with pytest.raises(Refused, match="too much for one answer"):
            wide.pull(np.arange(120_000, dtype=np.uint64))
        assert store.pull(many).shape == (1 << 16, 4)


def request(kind: int = wire.PULL, **other: object) -> bytes:
    return wire.Request(kind, id=1, sequence=1, **other).pack()


def batch(keys: object = (1, 2), values: object = (), counts: object = ()) -> object:
    rows = [pa.array([x]).cast(t.type) for x, t in zip((list(keys), list(values), list(counts)), SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(rows, schema=SCHEMA)


SCHEMA = wire.LAYOUTS["fp32"].schema


@pytest.mark.parametrize(
    ("data", "head"),
    [
        (batch(), b""),
        (batch(), b"x" * 71),
        (batch(), request()[:-1]),
        (batch(), b"\0" * len(request())),
        (batch(), b"PSq1\xff" + request()[5:]),
    ],
)
def test_heads_that_are_none_end_the_stream(server: Server, data: object, head: bytes) -> None:
    client, writer, reader = stream(server, asked())
    with client:
        assert answer(reader)["dim"] == 4
        writer.write_with_metadata(data, head)
        with pytest.raises(StopIteration):
            reader.read_chunk()
    assert serves(server)


@pytest.mark.parametrize(
    ("data", "head", "why"),
    [
        (None, request(), "another shape"),
        (pa.RecordBatch.from_arrays([pa.array([], t.type) for t in SCHEMA], schema=SCHEMA), request(), "another shape"),
        (pa.RecordBatch.from_arrays([pa.array([None], t.type) for t in SCHEMA], schema=SCHEMA), request(), "nulls"),
        (batch([1, None]), request(), "nulls"),
        (batch(values=[1.0]), request(), "brings no values"),
        (batch(values=[1.0] * 7), request(wire.PUSH), "got 7 numbers for 2 keys"),
        (batch(values=[1.0] * 8, counts=[1.0]), request(wire.PUSH), "got 1 counts"),
        (batch(values=[1.0] * 8, counts=[1.0] * 4), request(wire.PUSH), "keeps no counters"),
        (batch(counts=[1.0] * 4), request(), "got 4 counts"),
        (batch(), request(wire.WAIT_ROUND, number=5, value=float("nan")), "deadline of nan"),
        (batch(), request(wire.WAIT_ROUND, number=5, value=1e9), "deadline of"),
        (batch(), request(wire.SET_LR, value=-1.0), "lr: got -1"),
        (batch(), request(wire.SET_LR, value=float("inf")), "lr: got inf"),
        (batch(values=[1.0] * 8), request(wire.CONTRIBUTE, number=1, workers=0), "got worker 0"),
    ],
)
def test_requests_that_make_no_sense_are_answered(server: Server, data: object, head: bytes, why: str) -> None:
    client, writer, reader = stream(server, asked())
    with client:
        answer(reader)
        if data is None:
            writer.write_metadata(head)
        else:
            writer.write_with_metadata(data, head)
        reply = wire.Reply.unpack(reader.read_chunk().app_metadata)
        assert reply.status == wire.REFUSED and why in reply.text
        writer.write_with_metadata(batch(), request())
        assert reader.read_chunk().data.column("values")[0].as_py() != []
    assert serves(server)


def test_client_that_leaves_in_the_middle(server: Server) -> None:
    for _ in range(20):
        client, writer, reader = stream(server, asked())
        writer.write_with_metadata(batch(range(20_000)), request())
        reader.cancel()
        client.close()
    until = time.monotonic() + 30
    while server.hosts["clicks"].num_workers and time.monotonic() < until:
        time.sleep(0.01)
    assert server.hosts["clicks"].num_workers == 0 and serves(server)


def test_bytes_that_are_no_protocol(server: Server) -> None:
    random = np.random.default_rng(0)
    for size in (1, 10, 1000, 20_000):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(random.bytes(size))
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.bytes(size))
    assert serves(server)


# ---- actions, metrics, time


@pytest.mark.parametrize(
    "name", ["../out", "/elsewhere/out", "a/b", "..", ".hidden", "", "a" * 65, "auto-0000000001", "lock", "a\0b", 5]
)
def test_names_of_saves_stay_in_the_folder(server: Server, name: object) -> None:
    assert server.state is not None
    before = sorted(server.state.folder.parent.rglob("*"))
    with pytest.raises(Refused, match="name of a save: got"):
        ask(server.address, "save", {"name": name})
    assert sorted(server.state.folder.parent.rglob("*")) == before


def test_saves_by_name_health_and_unknown_actions(server: Server) -> None:
    with connect(server.address, table="clicks", run="night") as store:
        store.push(KEYS, ONES)
        assert store.save("monday") == 10
        with pytest.raises(Refused, match="exists already"):
            store.save("monday")
        assert store.stats()[0]["tables"]["clicks"]["requests"]["push"] == 1
    assert ask(server.address, "health")[server.address] == {"status": "serving"}
    with pytest.raises(Refused, match="expected health, stat or save"):
        ask(server.address, "load", {"name": "/etc/passwd"})
    with Server(tables()) as bare, pytest.raises(Refused, match="no folder to save to"):
        ask(bare.address, "save", {})


def test_metrics_and_the_lines_of_stat(server: Server) -> None:
    from urllib.request import urlopen

    with connect(server.address, table="clicks", run="night") as store:
        store.pull(KEYS)
        store.push(KEYS, ONES)
        with urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10) as got:
            lines = dict(line.rsplit(" ", 1) for line in got.read().decode().splitlines())
        assert lines['plsc_ps_rows{table="clicks"}'] == "10" and lines['plsc_ps_workers{table="clicks"}'] == "1"
        assert lines['plsc_ps_keys_total{table="clicks",kind="push"}'] == "10"
        start = 'plsc_ps_seconds_bucket{table="clicks",kind="pull"'
        buckets = [int(value) for name, value in lines.items() if name.startswith(start)]
        assert buckets == sorted(buckets) and buckets[-1] == 1
        shown, seen = table_of(ask(server.address, "stat"), {}, 10.0)
        assert len(shown) == 3 and "clicks" in shown[1]
        store.push(KEYS, ONES)
        shown, _ = table_of(ask(server.address, "stat"), seen, 12.0)
        assert shown[1].split()[6] == "0.5"  # pushes a second
    with urlopen(f"http://127.0.0.1:{server.metrics_port}/healthz", timeout=10) as got:
        assert got.read() == b"ok\n"


def test_clocks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compares the time of day of two machines: a worker ten years ahead is like any other."""
    with Server(tables()) as server:
        monkeypatch.setattr(time, "time", lambda: 2e9)
        with connect(server.address, table="clicks") as store:
            store.push(KEYS, ONES)
            store.wait_round(0, deadline=1.0)
    sources = (Path(wire.__file__).parent / name for name in ("host", "link", "log", "modes", "remote", "server"))
    assert not [path for path in sources if "time.time()" in path.with_suffix(".py").read_text()]


def test_closing_sends_waiting_workers_away(server: Server) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        with connect(server.address, table="clicks", run="night", patience=0.3) as store:
            try:
                store.wait_round(1, deadline=600)
            except ServerLost as error:
                errors.append(error)

    worker = threading.Thread(target=wait)
    worker.start()
    meter = server.meters["clicks"]
    while not meter.running:
        assert worker.is_alive()
        time.sleep(0.01)
    server.close(save=True)
    worker.join(60)
    assert not worker.is_alive() and errors
