"""The commands of a parameter server: what they print, what they make of settings, what they refuse."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from plsc.cli import ps
from plsc.ps import Adagrad, Server, Table, connect
from plsc.ps.launch import serve_command
from plsc.ps.settings import read_settings

SETTINGS = """
[server]
port = 7000
folder = "state"
durability = "log"
save_every = 600
token_file = "secret"
tls_certificate = "cert.pem"
tls_key = "key.pem"
[tables.clicks]
dim = 16
rule = "adagrad"
rule_args = { initial = 0.1 }
lr = 0.25
stripes = 8
admit_after = 3
[tables.users]
dim = 4
locked = false
"""


def test_settings_become_tables_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables.toml").write_text(SETTINGS)
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    tables, options = read_settings(tmp_path / "tables.toml", {"port": 7001, "index": 1, "count": 2, "run": None})
    assert list(tables) == ["clicks", "users"]
    assert tables["clicks"].rule == Adagrad(initial=0.1) and tables["clicks"].lr == 0.25 and tables["users"].dim == 4
    assert options == {
        "port": 7001,
        "index": 1,
        "count": 2,
        "folder": str(tmp_path / "state"),
        "durability": "log",
        "save_every": 600,
        "token": "0123456789abcdef",
        "tls": (str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")),
        "load_options": {"clicks": {"locked": True, "stripes": 8, "admit_after": 3}, "users": {"locked": False}},
    }
    monkeypatch.setenv("PLSC_PS_TOKEN", "from-the-environment")
    (tmp_path / "tables.toml").write_text("[tables.a]\ndim = 1\n")
    assert read_settings(tmp_path / "tables.toml", {})[1]["token"] == "from-the-environment"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[server", "is not TOML"),
        ("", "names no table"),
        ("server = 3\n[tables.a]\ndim = 1", "server is 3, expected a section such as [server]"),
        ("tables = 'a'", "tables is 'a', expected a section such as [tables.clicks]"),
        ("[tables]\n", "names no table"),
        ("[servers]\n[tables.a]\ndim = 1", "unknown servers; expected server, tables"),
        ("[server]\nprt = 1\n[tables.a]\ndim = 1", "unknown prt; expected host, port"),
        ("[server]\nport = 'x'\n[tables.a]\ndim = 1", "port is 'x', expected int"),
        ("[server]\nsync = 1\n[tables.a]\ndim = 1", "sync is 1, expected bool"),
        ("[server]\ntls_key = 'k'\n[tables.a]\ndim = 1", "tls_certificate and tls_key go together"),
        ("[tables]\na = 3", "is 3, expected a table of options"),
        ("[tables.a]\nsize = 3", "unknown size; expected dim"),
        ("[tables.a]\nlr = 0.1", "dim"),
        ("[tables.a]\ndim = 0", "dim: got 0"),
        ("[tables.a]\ndim = 1\nrule = 'adam9'", "rule is 'adam9', expected one of"),
        ("[tables.a]\ndim = 1\nrule = 'sgd'\nrule_args = {eps = 1}", "unknown eps"),
        ("[tables.'../a']\ndim = 1", "expected up to 64 letters, digits"),
        (f"[tables.{'a' * 65}]\ndim = 1", "expected up to 64 letters, digits"),
        ("[tables.a]\ndim = 1\nrule = ['sgd']", "rule is ['sgd'], expected one of"),
        ("[tables.a]\ndim = 1\nrule = 'none.cc'", "none.cc"),
        ("[tables.a]\ndim = 1\nrule_args = 3", "rule_args is 3, expected a table"),
        ("[tables.a]\ndim = 1\nrule_args = {eps = 'a'}", "eps is 'a', expected a number"),
        ("[tables.a]\ndim = 1\nadmit_after = 0", "admit_after: got 0"),
        ("[tables.a]\ndim = 1\nadmit_probability = 2.0", "admit_probability: got 2.0"),
        ("[tables.a]\ndim = 1\nmax_rows = 3", "max_rows: got 3, expected at least"),
        ("[tables.a]\ndim = 1\npolicy = 'fifo'", "policy: got 'fifo', expected one of lru, lfu"),
        ("[tables.a]\ndim = 1\npolicy = 'lfu'", "expected counters=True"),
        ("[tables.a]\ndim = 1\narena = 'nowhere'", "nowhere, expected an existing folder"),
        ("[tables.a]\ndim = 1\nslots = 3", "unknown slots; expected dim"),
    ],
)
def test_settings_that_are_wrong(text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tables.toml").write_text(text)
    assert ps(["serve", str(tmp_path / "tables.toml")]) == 2
    said = capsys.readouterr().err
    assert why in said and "tables.toml" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("port = 99999999", "port: got 99999999, expected 1 to 65535"),
        ("metrics_port = -5", "metrics_port: got -5"),
        ("limit_mb = 0", "limit_mb: got 0"),
        ("durability = 'disk'", "durability: got 'disk', expected one of log, save, none"),
        ("durability = 'log'", "needs a folder"),
        ("save_every = 10", "save_every: got no folder to save to"),
        ("folder = 's'\nsave_every = -1", "save_every: got -1 seconds"),
        ("index = 2\ncount = 2", "got index 2 of 2 servers"),
        ("host = '0.0.0.0'", "with neither a token nor client_ca"),
        ("client_ca = 'ca.pem'", "client_ca: workers' certificates need tls"),
        ("token_file = 'none'", "no such file"),
    ],
)
def test_servers_that_cannot_be_say_so_at_once(
    line: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PLSC_PS_TOKEN", raising=False)
    (tmp_path / "tables.toml").write_text(f"[server]\n{line}\n[tables.a]\ndim = 1\n")
    assert ps(["serve", str(tmp_path / "tables.toml")]) in (1, 2)
    said = capsys.readouterr().err
    assert why in said and "Traceback" not in said


def test_rows_in_a_file_lie_beside_the_settings(tmp_path: Path) -> None:
    """Paths in tables.toml are relative to it, wherever the command is given."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "tables.toml").write_text("[tables.a]\ndim = 1\narena = 'disk'\n")
    tables, options = read_settings(tmp_path / "tables.toml", {})
    assert options["load_options"]["a"]["arena"] == str(tmp_path / "disk") and len(tables["a"]) == 0


def test_stat_save_and_reshard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = np.arange(50, dtype=np.uint64)
    with Server({"clicks": Table(3, locked=True)}, folder=tmp_path / "old") as server:
        with connect(server.address, table="clicks") as store:
            store.push(keys, np.ones((50, 3), np.float32))
            rows = store.pull(keys)
        assert ps(["stat", server.address, "--once"]) == 0
        line = capsys.readouterr().out.splitlines()[1].split()
        assert line[:3] == [server.address, "clicks", "50"]
        assert ps(["save", server.address, "monday"]) == 0
        assert capsys.readouterr().out == f"{server.address}: 50 rows in {tmp_path / 'old' / 'monday'}\n"
        assert ps(["save", server.address, "../monday"]) == 2
        assert "name of a save" in capsys.readouterr().err
    new = [str(tmp_path / f"new{i}") for i in range(2)]
    assert ps(["reshard", "--saves", str(tmp_path / "old" / "monday"), "--folders", *new]) == 0
    assert capsys.readouterr().out == "50 rows from 1 to 2 servers\n"
    servers = [Server({"clicks": Table(3)}, index=i, count=2, folder=new[i]) for i in range(2)]
    with connect(",".join(each.address for each in servers), table="clicks") as store:
        np.testing.assert_array_equal(store.pull(keys, create=False), rows)
    for each in servers:
        each.close()


def test_wrong_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert ps(["launch", "--servers", "2"]) == 2
    assert "got no script" in capsys.readouterr().err
    assert ps(["serve"]) == 2
    assert ps(["stat", "127.0.0.1:1", "--once"]) == 1
    said = capsys.readouterr().err
    assert "error: server 127.0.0.1:1 was not reached" in said and "Traceback" not in said
    assert ps(["serve", "--help"]) == 0


def test_a_live_view_goes_on_without_a_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while it is started again; its counts then begin anew."""
    server, looks = Server({"clicks": Table(3, locked=True)}), []

    def sleep(seconds: float) -> None:
        looks.append(capsys.readouterr().out.splitlines()[1:])
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("plsc.cli_ps.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with server:
        ps(["stat", f"127.0.0.1:1,{server.address}"])
    assert [[line.split()[0] for line in lines] for lines in looks] == [[server.address, "server"]] * 2
    assert all("127.0.0.1:1 was not reached" in lines[1] for lines in looks)


def test_a_server_that_cannot_save_at_its_end_says_so_and_ends(tmp_path: Path) -> None:
    """Although the stream of a worker is still open."""
    (tmp_path / "tables.toml").write_text("[server]\nfolder = 'state'\n[tables.a]\ndim = 1\n")
    command = serve_command(tmp_path / "tables.toml")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = child.stdout.readline().split()[3].rstrip(",")
        with connect(address, table="a") as store:
            store.pull(np.arange(3, dtype=np.uint64))
            (tmp_path / "state" / "auto-0000000001").write_text("in the way")
            child.terminate()
            out, said = child.communicate(timeout=100)
    assert child.returncode == 1 and out == "stopping\n"
    assert "error: could not save, the last save stands" in said and "auto-0000000001 exists already" in said
