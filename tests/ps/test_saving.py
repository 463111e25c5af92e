"""Tables on disk: exact round trips, deltas, damaged files, full disks, a death while saving."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from plsc.ps import RULES, Adagrad, PythonRule, Table
from plsc.ps.files import atomic_path

KEYS = np.random.default_rng(0).integers(0, 2**64 - 1, 3000, np.uint64)


def filled(**options: object) -> Table:
    random = np.random.default_rng(1)
    table = Table(6, **options)
    for _ in range(3):
        table.push(KEYS, random.standard_normal((len(KEYS), 6), np.float32))
    return table


def step(table: Table) -> np.ndarray:
    """Rows after one more push: optimizer states must agree, too."""
    table.push(KEYS, np.random.default_rng(2).standard_normal((len(KEYS), 6), np.float32))
    return table.pull(KEYS)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("rule", RULES)
def test_round_trip_is_exact(tmp_path: Path, rule: str, dtype: str) -> None:
    table = filled(rule=rule, dtype=dtype, counters=True, seed=5, init="normal", lr=0.03)
    assert table.save(tmp_path / "t") == len(KEYS)
    loaded = Table.load(tmp_path / "t", stripes=4, locked=True)
    assert loaded.rule == table.rule and loaded.lr == table.lr and loaded.last_save == table.last_save
    np.testing.assert_array_equal(loaded.pull(KEYS), table.pull(KEYS))
    np.testing.assert_array_equal(loaded.counters(KEYS), table.counters(KEYS))
    np.testing.assert_array_equal(step(loaded), step(table))
    new = np.arange(9, dtype=np.uint64)
    np.testing.assert_array_equal(loaded.pull(new), table.pull(new))
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_empty_table(tmp_path: Path) -> None:
    assert Table(4).save(tmp_path / "t") == 0
    assert len(Table.load(tmp_path / "t")) == 0


class Halve(PythonRule):
    name = "halve"

    def state_size(self, dim: int) -> int:
        return 1

    def update(self, values: np.ndarray, state: np.ndarray, grads: np.ndarray, lr: float) -> None:
        state += 1
        values /= 1 + state


def test_python_rule(tmp_path: Path) -> None:
    table = filled(rule=Halve())
    table.save(tmp_path / "t")
    with pytest.raises(ValueError, match="halve"):
        Table.load(tmp_path / "t")
    np.testing.assert_array_equal(step(Table.load(tmp_path / "t", rule=Halve())), step(table))


def test_delta_holds_what_was_touched(tmp_path: Path) -> None:
    table = filled()
    with pytest.raises(ValueError, match="full save"):
        table.save(tmp_path / "d", delta=True)
    table.save(tmp_path / "base")
    table.push(KEYS[:10], np.ones((10, 6), np.float32))
    new = np.arange(5, dtype=np.uint64)
    table.pull(new)
    assert table.save(tmp_path / "d", delta=True) == 15
    loaded = Table.load(tmp_path / "base", deltas=[tmp_path / "d"])
    assert len(loaded) == len(table) and loaded.contains(new).all()
    np.testing.assert_array_equal(step(loaded), step(table))
    with pytest.raises(ValueError, match="is a delta"):
        Table.load(tmp_path / "d")
    other = filled()
    other.save(tmp_path / "other")
    with pytest.raises(ValueError, match="its base"):
        Table.load(tmp_path / "other", deltas=[tmp_path / "d"])
    table.erase(new)
    with pytest.raises(ValueError, match="erased"):
        table.save(tmp_path / "d", delta=True)


def test_every_cut_and_flip_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = Table(2, stripes=2)
    table.pull(np.arange(6, dtype=np.uint64))
    table.save(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 3):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="expected a whole file"):
            Table.load(path)
    for at in range(len(whole) % 2, len(whole), 2):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="expected a whole file"):
            Table.load(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="goes on"):
        Table.load(path)
    path.write_bytes(b"PK\x03\x04 an archive")
    with pytest.raises(ValueError, match="is not a table"):
        Table.load(path)
    with pytest.raises(OSError, match="No such file"):
        Table.load(tmp_path / "missing")


def test_rules_of_the_project_come_from_the_file(tmp_path: Path) -> None:
    filled().save(tmp_path / "t")
    for rule in (Adagrad(eps=1e-3), "adagrad", Halve()):
        with pytest.raises(ValueError, match="leave rule out"):
            Table.load(tmp_path / "t", rule=rule)


MEMORY = """
import sys
import numpy as np
from plsc.ps import Table
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
table = Table(64, stripes=4)
for start in range(0, 400_000, 50_000):
    table.pull(np.arange(start, start + 50_000, dtype=np.uint64))
before = peak()
table.save(sys.argv[1])
table.save(sys.argv[1] + ".delta", delta=True)
print(peak() - before)
"""


@pytest.mark.slow
def test_saving_needs_megabytes(tmp_path: Path) -> None:
    """Rows of 200 MB go to the disk through a block at a time."""
    run = subprocess.run([sys.executable, "-c", MEMORY, tmp_path / "t"], capture_output=True, text=True, timeout=120)
    assert (tmp_path / "t").stat().st_size > 200_000_000 and int(run.stdout) < 8 << 20, run.stderr


FULL_DISK = """
import resource, sys
import numpy as np
from plsc.ps import Table
path, arena = sys.argv[1:]
table = Table.load(path)
table.pull(np.arange(200_000, dtype=np.uint64))
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
try:
    table.save(path)
except OSError as error:
    print("save:", error.filename or error)
small = Table(16, arena=arena, stripes=8)
try:
    for start in range(0, 200_000, 1000):
        small.push(np.arange(start, start + 1000, dtype=np.uint64), np.ones((1000, 16), np.float32))
except OSError as error:
    print("arena:", error)
rows = len(small)
keys = np.concatenate([keys for keys, _ in small.items()])
assert rows > 1000 and len(keys) == rows
assert np.isfinite(small.pull(keys)).all() and (small.pull(np.arange(1000, dtype=np.uint64)) < -0.03).all()
"""


@pytest.mark.slow
def test_full_disk_loses_nothing(tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk."""
    path = tmp_path / "t"
    table = filled()
    table.save(path)
    run = subprocess.run([sys.executable, "-c", FULL_DISK, path, tmp_path], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "save:" in run.stdout and "arena:" in run.stdout
    np.testing.assert_array_equal(Table.load(path).pull(KEYS), table.pull(KEYS))
    assert [file.name for file in tmp_path.iterdir()] == ["t"]


SAVE_FOR_EVER = """
import sys
import numpy as np
from plsc.ps import Table
table = Table.load(sys.argv[1])
print("ready", flush=True)
while True:
    table.pull(np.arange(100_000, dtype=np.uint64))
    table.save(sys.argv[1])
"""


@pytest.mark.slow
def test_death_while_saving(tmp_path: Path) -> None:
    path = tmp_path / "t"
    filled().save(path)
    for round_ in range(6):
        with subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, path], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            time.sleep(0.02 * (round_ + 1))
            os.kill(process.pid, signal.SIGKILL)
        assert Table.load(path).contains(KEYS).all()


def test_a_delta_says_all_or_is_refused(tmp_path: Path) -> None:
    """What happens to rows that no push touches: decay, and the bound at loading."""
    table = filled(counters=True)
    table.save(tmp_path / "base")
    table.decay(0.5)
    with pytest.raises(ValueError, match="decayed since"):
        table.save(tmp_path / "d", delta=True)
    table.save(tmp_path / "base")
    assert table.save(tmp_path / "d", delta=True) == 0
    loaded = Table.load(tmp_path / "base", deltas=tmp_path / "d")
    np.testing.assert_array_equal(loaded.counters(KEYS), table.counters(KEYS))
    bounded = Table.load(tmp_path / "base", stripes=1, max_rows=100)
    assert len(bounded) <= 100
    with pytest.raises(ValueError, match="rows were erased"):
        bounded.save(tmp_path / "d", delta=True)


def test_writers_of_one_path_do_not_meet(tmp_path: Path) -> None:
    """Each writes a file of its own; what the dead have left is removed, what the living write is not."""
    path = tmp_path / "t[1]"
    (tmp_path / ".t[1].dead.partial").write_bytes(b"half")
    with atomic_path(path) as one:
        Path(one).write_bytes(b"one")
        with atomic_path(path) as two:
            Path(two).write_bytes(b"two")
        assert path.read_bytes() == b"two"
    assert path.read_bytes() == b"one" and [file.name for file in tmp_path.iterdir()] == ["t[1]"]
    with pytest.raises(KeyError), atomic_path(path):
        raise KeyError
    assert path.read_bytes() == b"one" and len(list(tmp_path.iterdir())) == 1


def test_deltas_come_oldest_first(tmp_path: Path) -> None:
    """An older one laid over a younger one would bring rows of before back, and say nothing."""
    table = filled()
    table.save(tmp_path / "base")
    places = [tmp_path / "1", tmp_path / "2"]
    for place in places:
        step(table)
        table.save(place, delta=True)
    for deltas in (places, places[1:], [*places, places[1]]):
        np.testing.assert_array_equal(Table.load(tmp_path / "base", deltas=deltas).pull(KEYS), table.pull(KEYS))
    with pytest.raises(ValueError, match="1 after a younger one, expected the oldest first"):
        Table.load(tmp_path / "base", deltas=places[::-1])
