"""A server's folder: what its saves, its logs and their names go through, and that nothing acknowledged is left out."""

import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from plsc.ps import Table
from plsc.ps import wire as w
from plsc.ps.host import Host
from plsc.ps.log import State
from plsc.ps.remote import connect
from plsc.ps.reshard import reshard
from plsc.ps.server import Server

KEYS = np.arange(10, dtype=np.uint64)
ONES = np.ones((10, 2), np.float32)


def table() -> Table:
    return Table(2, rule="sgd", lr=1.0, init="zeros", locked=True)


def opened(folder: Path, durability: str = "log") -> tuple[State, Host]:
    state = State(folder, durability=durability, index=0, count=1)
    try:
        return state, state.load({"clicks": table()}, {"clicks": {}})["clicks"]
    except BaseException:
        state.close()
        raise


def pushes(folder: Path, durability: str = "log") -> float:
    """How many a row has, in a server's state that is opened and closed again."""
    state, host = opened(folder, durability)
    state.close()
    return float(-host.table.pull(KEYS, create=False)[0, 0])


def push(host: Host, count: int) -> None:
    client = host.join("one", 0)
    for _ in range(count):
        host.push(client, client.sequence + 1, KEYS, ONES)


def test_a_log_damaged_in_the_middle_is_not_cut_off(tmp_path: Path) -> None:
    """Only its last record can be one that was never acknowledged."""
    state, host = opened(tmp_path)
    push(host, 10)
    state.close()
    log = tmp_path / "log-0000000000"
    whole = log.read_bytes()
    one = len(whole) // 10
    for at in (0, one // 2, 4 * one + one // 2, 4 * one + 3):
        log.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=f"damaged at byte {at // one * one} of {len(whole)}, and writes"):
            opened(tmp_path)
        assert log.stat().st_size == len(whole)
    for torn in (whole[:-5], whole + whole[: one - 1], whole + bytes(300)):
        log.write_bytes(torn)
        assert pushes(tmp_path) == (9 if len(torn) < len(whole) else 10)


def test_a_write_that_is_refused_is_not_in_the_log(tmp_path: Path) -> None:
    """Else the next process could not apply it either, and would not start."""
    with (
        Server({"clicks": table()}, folder=tmp_path, durability="log") as server,
        connect(server.address, table="clicks") as store,
    ):
        store.push(KEYS, ONES)
        layout, link = w.LAYOUTS["fp32"], store._links[0]
        for request, batch in (
            (w.Request(w.PUSH), layout.pack(KEYS, ONES, np.ones((10, 2), np.float32))),
            (w.Request(w.SET_LR, value=float("nan")), layout.pack(None, None)),
            (w.Request(w.SET_LR, value=-1.0), layout.pack(None, None)),
        ):
            with pytest.raises(ValueError, match=r"counters|lr"):
                link.wait(link.send(request, batch))
        store.push(KEYS, ONES)
    assert pushes(tmp_path) == 2


def test_saves_do_not_take_the_names_of_logs(tmp_path: Path) -> None:
    state, host = opened(tmp_path)
    for name in ("log-0000000001", "auto-0000000001", "log-1", "lock"):
        with pytest.raises(ValueError, match="one of the server's own"):
            state.save(name)
    state.save("monday")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(ValueError, match="exists already"):
        state.save("nowhere")
    push(host, 3)
    state.save()
    state.close()
    assert pushes(tmp_path) == 3


def test_without_the_newest_save_the_one_before_and_both_logs_give_the_same(tmp_path: Path) -> None:
    state, host = opened(tmp_path)
    for _ in range(3):
        push(host, 1)
        state.save()
    host.contribute(host.join("two", 0), 1, KEYS, ONES, round=0, workers=2)
    state.save()
    push(host, 2)
    state.close()
    shutil.rmtree(max(tmp_path.glob("auto-*")))
    assert pushes(tmp_path) == 5
    state, host = opened(tmp_path)
    assert [(client.rank, round) for client, round, *_ in host.open_rounds()] == [(0, 0)]
    host.contribute(host.join("three", 1), 1, KEYS, ONES, round=0, workers=2)
    push(host, 1)
    state.close()
    assert pushes(tmp_path) == 7
    state, host = opened(tmp_path)
    state.save()
    state.save()
    push(host, 1)
    state.close()
    assert pushes(tmp_path) == 8
    assert len(list(tmp_path.glob("auto-*"))) == len(list(tmp_path.glob("log-*"))) == 2


def test_a_save_that_fails_gives_the_disk_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, host = opened(tmp_path)
    push(host, 1)
    before = sorted(path.name for path in tmp_path.iterdir())
    for broken in ("plsc.ps.log._write", "os.rename"):
        with monkeypatch.context() as patch:

            def full(*_: object) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(broken, full)
            with pytest.raises(OSError, match="No space left"):
                state.save()
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    push(host, 1)
    state.close()
    assert pushes(tmp_path) == 2


def test_an_empty_log_does_not_bind_a_folder_to_logs(tmp_path: Path) -> None:
    state, host = opened(tmp_path)
    push(host, 1)
    state.close()
    with pytest.raises(ValueError, match="holds writes that no save has"):
        opened(tmp_path, "save")
    state, _ = opened(tmp_path)
    state.save()
    state.close()
    assert pushes(tmp_path, "save") == 1


def test_a_server_that_does_not_come_up_leaves_its_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"metrics_port: {port} of 127"):
            Server({"clicks": table()}, folder=tmp_path, metrics_port=port)
    with Server({"clicks": table()}, folder=tmp_path, durability="log") as server:
        server.act("save", {})
    (tmp_path / "auto-0000000001" / "clicks.table").write_bytes(b"short")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"clicks\.table"):
            Server({"clicks": table()}, folder=tmp_path, durability="log")


def test_a_server_that_cannot_save_at_its_end_leaves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server({"clicks": table()}, folder=tmp_path, durability="log")
    with connect(server.address, table="clicks") as store:
        store.push(KEYS, ONES)
    with monkeypatch.context() as patch:
        patch.setattr("plsc.ps.log._write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            server.close(save=True)
    assert pushes(tmp_path) == 1


def test_saves_go_on_after_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it failed of, and not at once: with a log, writes wait meanwhile."""
    monkeypatch.setattr("plsc.ps.server.LOOK", 0.01)
    monkeypatch.setattr("plsc.ps.server.REST", 0.3)
    tries, save = [], State.save

    def failing(self: State, name: str | None = None) -> tuple[Path, int]:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise ValueError("for once")
        return save(self, name)

    monkeypatch.setattr(State, "save", failing)
    with Server({"clicks": table()}, folder=tmp_path, save_every=0.01):
        until = time.monotonic() + 60
        while not list(tmp_path.glob("auto-*")) and time.monotonic() < until:
            time.sleep(0.01)
    assert list(tmp_path.glob("auto-*")) and tries[1] - tries[0] >= 0.3


def test_figures_count_from_the_start_of_the_process(tmp_path: Path) -> None:
    """Rows that came with a save were not made for a pull; a worker that has pulled nothing yet is not stale by all."""
    with (
        Server({"clicks": table()}, folder=tmp_path, durability="log") as server,
        connect(server.address, table="clicks") as store,
    ):
        store.push(KEYS, ONES)
        server.act("save", {})
        store.push(KEYS + np.uint64(10), ONES)
    with Server({"clicks": table()}, folder=tmp_path, durability="log") as server:
        with connect(server.address, table="clicks") as store:
            store.pull(np.arange(25, dtype=np.uint64))
            stats = server.hosts["clicks"].stats()
            assert (stats["rows"], stats["born"], stats["writes"]) == (25, 5, 0)
            for _ in range(5):
                store.push(KEYS, ONES)
            with connect(server.address, table="clicks") as late:
                late.push(KEYS, ONES)
        staleness = server.meters["clicks"].staleness
    assert staleness.total == 0 + 1 + 2 + 3 + 4 + 0


def test_a_reshard_that_fails_can_be_tried_again(tmp_path: Path) -> None:
    state, host = opened(tmp_path / "old")
    push(host, 1)
    path, _ = state.save("monday")
    state.close()
    new = [tmp_path / "new-0", tmp_path / "new-1"]
    with pytest.raises(ValueError, match="a folder twice"):
        reshard([path], [new[0], tmp_path / "old" / ".." / "new-0"])
    content = (path / "clicks.table").read_bytes()
    (path / "clicks.table").write_bytes(content[:-30])
    with pytest.raises(ValueError, match=r"clicks\.table"):
        reshard([path], new)
    (path / "clicks.table").write_bytes(content)
    assert reshard([path], new) == len(KEYS)


def test_rows_keep_their_ages_where_servers_counted_different_pushes(tmp_path: Path) -> None:
    saves = []
    for index, (pushes, clock) in enumerate([(4, 5), (50, 51)]):
        state = State(tmp_path / f"old-{index}", durability="save", index=index, count=2)
        host = state.load({"clicks": table()}, {"clicks": {}})["clicks"]
        mine = np.array([100 * index + i for i in range(4)], np.uint64)
        client = host.join("one", 0)
        for i in range(pushes):
            host.push(client, client.sequence + 1, mine[i % 4 :][:1], ONES[:1])
        assert host.table.stats()["clock"] == clock
        saves.append(state.save("monday")[0])
        state.close()
    assert reshard(saves, [tmp_path / "new"]) == 8
    merged = Table.load(tmp_path / "new" / "auto-0000000001" / "clicks.table")
    assert merged.evict(max_age=4) == 0  # a save counts as one
    assert merged.evict(max_age=2) == 4 and merged.contains(np.array([2, 3, 100, 101], np.uint64)).all()
