"""Processes that are killed, cut off, replaced and slowed: every acknowledged push counts exactly once afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from plsc.ps import Table
from plsc.ps.ask import ask
from plsc.ps.launch import free_ports, serve_command
from plsc.ps.log import Log, State, read_log
from plsc.ps.remote import connect
from plsc.ps.reshard import reshard
from plsc.ps.server import Server
from plsc.ps.store import place

KEYS = np.arange(200, dtype=np.uint64)
SETTINGS = """
[server]
durability = "{durability}"
[tables.clicks]
dim = 2
rule = "sgd"
lr = 1.0
init = "zeros"
"""
# Each push takes 1 from every row it names: a row counts its pushes, exactly.
WORKER = """
import logging, sys, numpy as np, plsc
logging.disable(logging.WARNING)
servers, rank, pushes, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = plsc.ps.connect(servers, table="clicks", rank=rank, timeout=20, patience=60)
made = {"direct": lambda: plsc.ps.Direct(store), "async": lambda: plsc.ps.Async(store, merge=4),
        "geo": lambda: plsc.ps.Geo(store, every=5, weight=1.0)}[mode]()
random = np.random.default_rng(rank)
for number in range(pushes):
    keys = random.permutation(200)[:50].astype(np.uint64)
    made.pull(keys)
    made.push(keys, np.ones((50, 2), np.float32))
    if number % 20 == 0:
        print(number, flush=True)
made.close()
print("done", flush=True)
"""


def expected(ranks: list[int], pushes: int) -> np.ndarray:
    counts = np.zeros(len(KEYS))
    for rank in ranks:
        random = np.random.default_rng(rank)
        for _ in range(pushes):
            counts[random.permutation(200)[:50]] += 1
    return -np.repeat(counts[:, None], 2, axis=1)


class Processes:
    """Servers with folders of their own, and workers; all are gone at the end."""

    def __init__(self, folder: Path, durability: str = "log") -> None:
        self.folder = folder
        self.settings = folder / "tables.toml"
        self.settings.write_text(SETTINGS.format(durability=durability))
        self.ports: list[int] = []
        self.all: list[subprocess.Popen[str]] = []

    def serve(self, index: int, count: int) -> subprocess.Popen[str]:
        if not self.ports:
            self.ports = free_ports(count)
        flags = ["--port", str(self.ports[index]), "--index", str(index), "--count", str(count)]
        command = serve_command(self.settings, *flags, "--folder", str(self.folder / f"server-{index}"))
        return self.start(command, "serving")

    def work(self, rank: int, pushes: int, mode: str = "direct") -> subprocess.Popen[str]:
        words = [sys.executable, "-c", WORKER, self.addresses, str(rank), str(pushes), mode]
        return self.start(words, "0")

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, command: list[str], first: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.all.append(child)
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith(first), line
        return child

    def close(self) -> None:
        for child in self.all:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[..., Processes]]:
    with ExitStack() as stack:

        def make(durability: str = "log") -> Processes:
            made = Processes(tmp_path, durability)
            stack.callback(made.close)
            return made

        yield make


def finished(*workers: subprocess.Popen[str]) -> None:
    for worker in workers:
        out, _ = worker.communicate(timeout=240)
        assert worker.returncode == 0 and out.endswith("done\n"), out


# ---- quick: files alone


def test_a_log_that_was_cut_short_loses_its_last_record_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    arrays = [{"keys": np.arange(n, dtype=np.uint64), "grads": np.full((n, 2), n, np.float32)} for n in (3, 0, 5)]
    ends = []
    for number, each in enumerate(arrays):
        log.write({"number": number}, each)
        ends.append(log.size)
    log.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        found = list(read_log(path))
        kept = sum(end <= size for end in ends)
        assert [facts["number"] for facts, _ in found] == list(range(kept))
        assert path.stat().st_size == ([0, *ends])[kept]
    for (_, got), put in zip(found, arrays, strict=True):
        for name in put:
            np.testing.assert_array_equal(got[name], put[name])
    damaged = bytearray(whole)
    damaged[ends[1] + 40] ^= 1
    path.write_bytes(damaged)
    assert len(list(read_log(path))) == 2


def test_a_full_disk_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "log")
    log.write({"number": 0}, {})
    write, calls = os.write, []

    def full(file: int, data: bytes) -> int:
        calls.append(0)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        log.write({"number": 1}, {})
    monkeypatch.undo()
    log.write({"number": 2}, {})
    assert [facts["number"] for facts, _ in read_log(log.path)] == [0, 2]


def test_old_saves_and_logs_are_forgotten_and_named_ones_stay(tmp_path: Path) -> None:
    state = State(tmp_path, durability="log", index=0, count=1)
    state.load({"clicks": Table(2)}, {"clicks": {}})
    state.save("monday")
    for _ in range(4):
        state.save()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["auto-0000000003", "auto-0000000004", "lock", "log-0000000003", "log-0000000004", "monday"]
    state.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"index": 0, "count": 3}, "server 0 of 1, got server 0 of 3; spread the saves anew with plsc-ps reshard"),
        ({"durability": "save"}, "holds writes that no save has"),
        ({"dim": 3}, "holds a table with dim 2"),
        ({"durability": "often"}, "durability: got 'often'"),
    ],
)
def test_folders_of_something_else(tmp_path: Path, change: dict[str, object], why: str) -> None:
    def open_state(dim: int = 2, **other: object) -> State:
        options = {"durability": "log", "index": 0, "count": 1} | other
        state = State(tmp_path, **options)
        try:
            state.load({"clicks": Table(dim)}, {"clicks": {}})
        except BaseException:
            state.close()
            raise
        return state

    state = open_state()
    state.save()
    host = state.hosts["clicks"]
    host.push(host.join("someone", 0), 1, KEYS[:1], np.ones((1, 2), np.float32))
    state.close()
    with pytest.raises(ValueError, match=why):
        open_state(**change)


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 2), (2, 1)])
def test_another_number_of_servers_has_every_row_bit_for_bit(tmp_path: Path, old: int, new: int) -> None:
    """Values, optimizer state and counters: what follows is the same, too."""

    def table() -> Table:
        return Table(3, rule="adam", counters=True, locked=True, dtype="fp16")

    keys = np.random.default_rng(0).integers(0, 2**63, 5000, np.uint64)
    grads = np.random.default_rng(1).standard_normal((5000, 3)).astype(np.float32)
    whole = table()
    servers = [Server({"t": table()}, index=i, count=old, folder=tmp_path / f"old{i}") for i in range(old)]
    with connect(",".join(s.address for s in servers), table="t") as store:
        for clicks in (None, np.ones(5000, np.float32)):
            store.push(keys, grads, clicks=clicks)
            whole.push(keys, grads, clicks=clicks)
        store.save("monday")
    for server in servers:
        server.close()
    folders = [tmp_path / f"new{i}" for i in range(new)]
    saves = [tmp_path / f"old{i}" / "monday" for i in range(old)]
    assert reshard(saves[::-1], folders) == 5000
    servers = [Server({"t": table()}, index=i, count=new, folder=folders[i]) for i in range(new)]
    with connect(",".join(s.address for s in servers), table="t") as store:
        np.testing.assert_array_equal(store.pull(keys, create=False), whole.pull(keys))
        store.push(keys, grads)
        whole.push(keys, grads)
        np.testing.assert_array_equal(store.pull(keys), whole.pull(keys))
    for index, server in enumerate(servers):
        mine = keys[place(keys, new) == index]
        assert len(server.hosts["t"].table) == len(mine)
        np.testing.assert_array_equal(server.hosts["t"].table.counters(mine), whole.counters(mine))
        server.close()
    with pytest.raises(ValueError, match="is not empty"):
        reshard(saves, folders)
    if old > 1:
        with pytest.raises(ValueError, match="expected one of each"):
            reshard([saves[0], saves[0]], [tmp_path / "more"])


# ---- slow: processes


@pytest.mark.slow
def test_servers_killed_under_load(processes: Callable[..., Processes]) -> None:
    """kill -9 of each server in turn while workers of three modes push; every push is there once."""
    made = processes()
    servers = [made.serve(i, 2) for i in range(2)]
    workers = [made.work(rank, 2000, mode) for rank, mode in enumerate(("direct", "async", "geo"))]
    for turn in range(3):
        time.sleep(0.5)
        servers[turn % 2].kill()
        servers[turn % 2].wait()
        if turn == 1:
            ask(f"127.0.0.1:{made.ports[0]}", "save", {})  # what follows is in another log
        servers[turn % 2] = made.serve(turn % 2, 2)
    assert any(worker.poll() is None for worker in workers)  # else nothing was shown
    finished(*workers)
    with connect(made.addresses, table="clicks") as store:
        np.testing.assert_array_equal(store.pull(KEYS), expected([0, 1, 2], 2000))


@pytest.mark.slow
def test_with_saves_alone_a_killed_server_goes_back_to_its_last(processes: Callable[..., Processes]) -> None:
    made = processes("save")
    server = made.serve(0, 1)
    with connect(made.addresses, table="clicks") as store:
        store.push(KEYS, np.ones((200, 2), np.float32))
        ask(made.addresses, "save", {})
        store.push(KEYS, np.ones((200, 2), np.float32))
        server.kill()
        server.wait()
        made.serve(0, 1)
        np.testing.assert_array_equal(store.pull(KEYS), -1)


@pytest.mark.slow
def test_rolling_restart_loses_nothing(processes: Callable[..., Processes]) -> None:
    """SIGTERM: requests under way are finished, all is saved, the next process goes on; with either durability."""
    made = processes("save")
    servers = [made.serve(i, 2) for i in range(2)]
    workers = [made.work(rank, 2000) for rank in range(2)]
    for index in (0, 1):
        time.sleep(0.5)
        servers[index].terminate()
        assert servers[index].wait(60) == 0
        servers[index] = made.serve(index, 2)
    finished(*workers)
    with connect(made.addresses, table="clicks") as store:
        np.testing.assert_array_equal(store.pull(KEYS), expected([0, 1], 2000))


@pytest.mark.slow
def test_more_servers_from_a_save(processes: Callable[..., Processes]) -> None:
    """Killed after a save, its rows spread over three new processes, where workers go on."""
    made = processes()
    server = made.serve(0, 1)
    finished(made.work(0, 300))
    ask(made.addresses, "save", {"name": "moving"})
    server.kill()
    server.wait()
    names = [f"server-{index}" for index in range(3)]
    (made.folder / names[0]).rename(made.folder / "old")
    assert reshard([made.folder / "old" / "moving"], [made.folder / name for name in names]) == len(KEYS)
    made.ports.clear()
    servers = [made.serve(index, 3) for index in range(3)]
    workers = [made.work(rank, 500) for rank in (1, 2)]
    time.sleep(0.3)
    servers[1].kill()
    servers[1].wait()
    made.serve(1, 3)
    finished(*workers)
    with connect(made.addresses, table="clicks") as store:
        np.testing.assert_array_equal(store.pull(KEYS), expected([0], 300) + expected([1, 2], 500))


@pytest.mark.slow
def test_worker_killed_and_another_joins(processes: Callable[..., Processes]) -> None:
    made = processes()
    made.serve(0, 1)
    steady, doomed = made.work(0, 300), made.work(1, 10**6)
    time.sleep(0.5)
    doomed.kill()
    doomed.wait()
    joined = made.work(2, 300)
    finished(steady, joined)
    with connect(made.addresses, table="clicks") as store:
        rest = expected([0, 2], 300) - store.pull(KEYS)
        assert (rest >= 0).all() and (rest[:, 0] == rest[:, 1]).all()  # whole pushes of the one that died
        assert rest[:, 0].sum() % 50 == 0
        assert store.num_workers == 1


@pytest.mark.slow
def test_slow_server_holds_workers_back_and_keeps_its_memory(processes: Callable[..., Processes]) -> None:
    """Stopped for a while: queues are bounded on both sides, nobody gives up, nothing is lost."""
    made = processes()
    server = made.serve(0, 1)
    workers = [made.work(rank, 2000, "async") for rank in range(2)]
    memory = [_memory(child.pid) for child in (server, *workers)]
    for _ in range(3):
        server.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        grown = [_memory(child.pid) - old for child, old in zip((server, *workers), memory, strict=True)]
        assert max(grown) < 100e6
        server.send_signal(signal.SIGCONT)
        time.sleep(0.2)
    finished(*workers)
    with connect(made.addresses, table="clicks") as store:
        np.testing.assert_array_equal(store.pull(KEYS), expected([0, 1], 2000))


def _memory(pid: int) -> int:
    """Bytes in RAM; 0 for a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


@pytest.mark.slow
def test_network_cut_and_healed(processes: Callable[..., Processes]) -> None:
    """A worker in a network namespace whose link goes down for seconds: no packet, no reset, then all is well again."""
    names = ("plscps0", "plscps1")

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs the right to make network namespaces: {done.stderr.strip()}")

    made = processes()
    ip("netns", "add", names[0])
    try:
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        ip("link", "set", names[1], "netns", names[0])
        ip("addr", "add", "10.77.0.1/24", "dev", names[0])
        ip("link", "set", names[0], "up")
        ip("-n", names[0], "addr", "add", "10.77.0.2/24", "dev", names[1])
        ip("-n", names[0], "link", "set", names[1], "up")
        (port,) = free_ports(1)
        os.environ["PLSC_PS_TOKEN"] = "0123456789abcdef"
        flags = ["--host", "10.77.0.1", "--port", str(port), "--folder", str(made.folder / "server")]
        made.start(serve_command(made.settings, *flags), "serving")
        program = WORKER.replace("timeout=20", "timeout=2")
        words = [sys.executable, "-c", program, f"10.77.0.1:{port}", "0", "2000", "direct"]
        worker = made.start(["ip", "netns", "exec", names[0], *words], "0")
        for _ in range(2):
            ip("link", "set", names[0], "down")
            time.sleep(4)
            assert worker.poll() is None
            ip("link", "set", names[0], "up")
            time.sleep(0.5)
        finished(worker)
        with connect(f"10.77.0.1:{port}", table="clicks") as store:
            np.testing.assert_array_equal(store.pull(KEYS), expected([0], 2000))
    finally:
        os.environ.pop("PLSC_PS_TOKEN", None)
        subprocess.run(["ip", "link", "del", names[0]], capture_output=True)
        subprocess.run(["ip", "netns", "del", names[0]], capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ties processes by prctl")
def test_nothing_outlives_a_launch_that_is_killed(tmp_path: Path) -> None:
    """Servers save at their end, as after SIGTERM."""
    (tmp_path / "tables.toml").write_text(SETTINGS.format(durability="save"))
    (tmp_path / "script.py").write_text(
        "import time, numpy as np, plsc\n"
        "plsc.ps.connect(table='clicks').push(np.arange(9, dtype=np.uint64), np.ones((9, 2), np.float32))\n"
        "print('working', flush=True)\n"
        "time.sleep(600)\n"
    )
    start = f"import sys; sys.path[:] = {sys.path!r}; from plsc.cli import ps; sys.exit(ps())"
    words = ["launch", "--folder", "state", "--", "script.py"]
    run = subprocess.Popen([sys.executable, "-P", "-c", start, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert [run.stdout.readline() for _ in range(2)][1:] == ["working\n"]
    run.kill()
    out, _ = run.communicate(timeout=100)  # ends when the last process that holds the pipe has ended
    assert out == "stopping\n"
    state = State(tmp_path / "state" / "server-0", durability="save", index=0, count=1)
    table = Table(2, rule="sgd", lr=1.0, init="zeros")
    saved = state.load({"clicks": table}, {"clicks": {}})["clicks"].table
    np.testing.assert_array_equal(saved.pull(KEYS[:9]), -np.ones((9, 2)))
    state.close()


@pytest.mark.slow
def test_launch_starts_servers_and_workers_and_the_dead_again(tmp_path: Path) -> None:
    """The first worker kills a server, then itself; both are started again, and every push of the rest counts."""
    (tmp_path / "tables.toml").write_text(SETTINGS.format(durability="log"))
    (tmp_path / "script.py").write_text(
        "import os, signal, subprocess, numpy as np, plsc\n"
        "store = plsc.ps.connect(table='clicks')\n"
        "rank, once = int(os.environ['RANK']), 'died'\n"
        "if rank == 0 and not os.path.exists(once):\n"
        "    open(once, 'w').close()\n"
        "    pids = subprocess.run(['pgrep', '-P', str(os.getppid())], capture_output=True, text=True).stdout.split()\n"
        "    os.kill(int(pids[0]), signal.SIGKILL)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "for _ in range(50):\n"
        "    store.push(np.arange(9, dtype=np.uint64), np.ones((9, 2), np.float32))\n"
        "open(f'done{rank}', 'w').write(os.environ['WORLD_SIZE'])\n"
    )
    start = f"import sys; sys.path[:] = {sys.path!r}; from plsc.cli import ps; sys.exit(ps())"
    words = ["launch", "--servers", "2", "--workers", "2", "--folder", "state", "--", "script.py"]
    run = subprocess.run(
        [sys.executable, "-P", "-c", start, *words], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    assert "server 0 ended with status -9; starting it again" in run.stderr
    assert "worker 0 ended with status -9; starting it again" in run.stderr
    assert [(tmp_path / f"done{rank}").read_text() for rank in range(2)] == ["2", "2"]
    total = 0.0
    for index in range(2):
        state = State(tmp_path / "state" / f"server-{index}", durability="log", index=index, count=2)
        table = Table(2, rule="sgd", lr=1.0, init="zeros")
        total += state.load({"clicks": table}, {"clicks": {}})["clicks"].table.pull(KEYS[:9]).sum()
        state.close()
    assert total == -2 * 50 * 9 * 2
