"""The sparse table: what pull and push answer, where rows come from, what is refused."""

import contextlib
import copy
import ctypes
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc.ps import RULES, SGD, Table
from plsc.ps.arrays import as_floats, as_keys, as_output, empty_like_kind

MASK = 2**64 - 1


def keys_of(*keys: int) -> np.ndarray:
    return np.array(keys, np.uint64)


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def born(seed: int, key: int, dim: int, scale: float) -> np.ndarray:
    """The documented uniform initial value, in Python's own integers."""
    golden = 0x9E3779B97F4A7C15
    stream = mix(mix((seed + golden) & MASK) ^ ((key * 0xD1342543DE82EF95 + 1) & MASK))
    draws = [mix((stream + (i + 1) * golden) & MASK) >> 40 for i in range(dim)]
    return ((2 * np.array(draws, np.float32) / np.float32(2**24)) - np.float32(1)) * np.float32(scale)


@pytest.mark.parametrize("dim", [1, 5, 8, 16, 19, 64])  # wide draws and their tails
@pytest.mark.parametrize("key", [0, 1, 12345, 2**63, MASK])
def test_row_is_born_from_seed_and_key(key: int, dim: int) -> None:
    table = Table(dim, seed=7, init_scale=0.5)
    np.testing.assert_array_equal(table.pull(keys_of(key))[0], born(7, key, dim, 0.5))


@pytest.mark.parametrize("init", ["uniform", "normal", "zeros", "constant"])
def test_birth_depends_on_nothing_else(init: str) -> None:
    keys = np.random.default_rng(0).integers(0, MASK, 5000, np.uint64)
    one = Table(8, init=init, init_scale=0.1, seed=3)
    many = Table(8, init=init, init_scale=0.1, seed=3, stripes=1, locked=True, rule="adam")
    many.pull(keys[::-1].copy())
    rows = one.pull(keys)
    np.testing.assert_array_equal(rows, many.pull(keys))
    np.testing.assert_array_equal(rows, Table(8, init=init, init_scale=0.1, seed=3).pull(keys, create=False))
    mean, deviation = {"uniform": (0, 0.1 / 3**0.5), "normal": (0, 0.1), "zeros": (0, 0), "constant": (0.1, 0)}[init]
    assert abs(rows.mean() - mean) < 2e-3 and abs(rows.std() - deviation) < 2e-3


def test_reading_creates_nothing() -> None:
    table = Table(4)
    first = table.pull(keys_of(1, 2), create=False)
    assert len(table) == 0 and not table.contains(keys_of(1)).any()
    np.testing.assert_array_equal(table.pull(keys_of(1, 2)), first)
    assert len(table) == 2 and table.contains(keys_of(2, 3)).tolist() == [True, False]


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("dim", [1, 16, 1024])
def test_dimensions_and_growth(dim: int, locked: bool) -> None:
    count = 20_000 if dim < 100 else 300
    keys = np.arange(count, dtype=np.uint64) * np.uint64(977)
    table = Table(dim, rule="sgd", lr=1.0, init="zeros", locked=locked)
    for some in np.array_split(keys, 7):
        table.push(some, np.repeat(some[:, None] % 1000, dim, axis=1).astype(np.float32))
    np.testing.assert_array_equal(table.pull(keys), -np.repeat(keys[:, None] % 1000, dim, axis=1).astype(np.float32))
    stats = table.stats()
    assert len(table) == stats["rows"] == stats["born"] == count


def test_batch_larger_than_a_chunk() -> None:
    keys = np.random.default_rng(1).integers(0, 50_000, 200_001, np.uint64)
    table = Table(1, rule="sgd", lr=1.0, init="zeros", locked=True)
    table.push(keys, np.ones((len(keys), 1), np.float32))
    unique, counts = np.unique(keys, return_counts=True)
    np.testing.assert_array_equal(table.pull(unique)[:, 0], -counts.astype(np.float32))
    out = np.empty((len(keys), 1), np.float32)
    assert table.pull(keys, out=out) is out
    np.testing.assert_array_equal(out, table.pull(unique)[np.searchsorted(unique, keys)])


@pytest.mark.parametrize("locked", [False, True])
def test_repeated_keys_step_in_order(locked: bool) -> None:
    keys, grads = keys_of(5, 9, 5, 5), np.array([[1.0], [2.0], [3.0], [-1.0]], np.float32)
    batch, single = Table(1, locked=locked), Table(1, locked=locked)
    batch.push(keys, grads)
    for i in range(4):
        single.push(keys[i : i + 1], grads[i : i + 1])
    np.testing.assert_array_equal(batch.pull(keys), single.pull(keys))


def test_kind_that_came_in_goes_out() -> None:
    table = Table(3)
    numbers = table.pull(keys_of(0, MASK))
    assert isinstance(numbers, np.ndarray)
    signed = table.pull(torch.tensor([0, -1]))
    assert isinstance(signed, torch.Tensor) and signed.dtype == torch.float32
    np.testing.assert_array_equal(signed.numpy(), numbers)
    unsigned = table.pull(torch.tensor([0, MASK], dtype=torch.uint64), out=torch.empty(2, 3))
    assert torch.equal(unsigned, signed)
    table.push(torch.tensor([0]), torch.ones(1, 3, requires_grad=True))
    strided = np.arange(10, dtype=np.uint64)[::2]
    np.testing.assert_array_equal(table.pull(strided), table.pull(strided.copy()))


def test_arrays_are_used_where_they_are() -> None:
    """Numpy and torch, keys and floats: what the core reads and writes is the caller's memory."""
    keys, floats = np.arange(3, dtype=np.uint64), np.zeros((3, 2), np.float32)
    for x, y in ((keys, floats), (torch.arange(3), torch.zeros(3, 2)), (torch.arange(3).to(torch.uint64), floats)):
        assert np.shares_memory(as_keys(x), np.asarray(x)) and np.shares_memory(
            as_floats(y, (3, 2), "y"), np.asarray(y)
        )
        out, memory = empty_like_kind(x, (3, 2))
        assert np.shares_memory(np.asarray(out), memory) and np.shares_memory(as_output(y, (3, 2)), np.asarray(y))


def test_whole_numbers_of_numpy_are_taken() -> None:
    table = Table(np.int64(4), seed=np.uint64(3), stripes=np.int32(2), lr=np.float32(0.5))
    np.testing.assert_array_equal(table.pull(keys_of(1)), Table(4, seed=3).pull(keys_of(1)))


def test_tables_are_not_copied() -> None:
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="save it and load"):
            copied(Table(4))


def test_empty_batches() -> None:
    table = Table(4)
    nothing = np.empty(0, np.uint64)
    assert table.pull(nothing).shape == (0, 4)
    assert table.push(nothing, np.empty((0, 4), np.float32)) == 0
    assert table.erase(nothing) == 0 and len(table) == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_gradients_that_are_not_finite(rule: str, bad: float) -> None:
    table = Table(9, rule=rule)
    keys = keys_of(1, 2, 1)
    table.push(keys, np.ones((3, 9), np.float32))
    before = table.pull(keys)
    grads = np.zeros((3, 9), np.float32)
    grads[0, 8] = grads[2, 0] = bad
    assert table.push(keys[[0, 2]], grads[[0, 2]]) == 2
    np.testing.assert_array_equal(table.pull(keys), before)
    assert table.stats()["refused"] == 2


@pytest.mark.parametrize("rule", RULES)
def test_gradients_too_large_to_square(rule: str) -> None:
    """2^50 is refused as an infinity is: it would freeze Adagrad's rows. Below, or clipped, a row goes on moving."""
    table, keys = Table(300, rule=rule, lr=1e-3), keys_of(1)
    before = table.pull(keys)
    assert table.push(keys, np.full((1, 300), -(2.0**50), np.float32)) == 1
    np.testing.assert_array_equal(table.pull(keys), before)
    largest = np.nextafter(np.float32(2**50), np.float32(0))
    for _ in range(50):
        assert table.push(keys, np.full((1, 300), largest, np.float32)) == 0
    before = table.pull(keys)
    assert np.isfinite(before).all()
    table.push(keys, np.full((1, 300), -largest, np.float32))
    assert np.isfinite(table.pull(keys)).all() and (table.pull(keys) != before).all()
    clipped = Table(2, rule=SGD(clip_value=1.0), lr=1.0, init="zeros")
    assert clipped.push(keys, np.array([[3e38, -3e38]], np.float32)) == 0
    assert clipped.pull(keys).tolist() == [[-1.0, 1.0]]


def test_halves_stay_finite() -> None:
    table, keys = Table(2, rule="sgd", lr=1.0, init="zeros", dtype="fp16"), keys_of(1)
    table.push(keys, np.array([[1e6, -1e6]], np.float32))
    assert table.pull(keys).tolist() == [[-65504.0, 65504.0]]
    table.push(keys, np.array([[-65504.0, 65504.0]], np.float32))
    assert table.pull(keys).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", ["sgd", "ftrl"])
def test_other_numbers_that_are_not_finite(bad: float, rule: str) -> None:
    """Differences and counts are refused and counted as gradients are; values from outside are an error."""
    table, keys = Table(5, rule=rule, counters=True), keys_of(1, 2)
    table.push(keys, np.ones((2, 5), np.float32))
    rows, counters = table.pull(keys), table.counters(keys)
    floats = np.ones((2, 5), np.float32)
    floats[1, 4] = bad
    assert table.add(keys, floats) == 1
    np.testing.assert_array_equal(table.pull(keys)[1], rows[1])
    assert (table.pull(keys)[0] != rows[0]).all()
    rows, counts = table.pull(keys), np.array([bad, 1], np.float32)
    ones = np.ones((2, 5), np.float32)
    assert table.push(keys[:1], ones[:1], shows=counts[:1]) == table.push(keys[:1], ones[:1], clicks=counts[:1]) == 1
    np.testing.assert_array_equal(table.pull(keys), rows)
    np.testing.assert_array_equal(table.counters(keys), counters)
    with pytest.raises(ValueError, match="infinity for key 2"):
        table.assign(keys, floats)
    np.testing.assert_array_equal(table.pull(keys), rows)
    assert table.stats()["refused"] == 3


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_values(dtype: str) -> None:
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    table = Table(7, dtype=dtype, init_scale=1.0)
    keys = np.arange(200, dtype=np.uint64)
    exact = torch.from_numpy(Table(7, init_scale=1.0).pull(keys))
    assert torch.equal(torch.from_numpy(table.pull(keys)), exact.to(torch_dtype).float())
    values = torch.randn(4096, 7) * 10.0 ** torch.randint(-8, 5, (4096, 1))
    values[0] = torch.tensor([65504.0, 65519.0, 65520.0, 1e-8, -5.96e-8, 0.0, -0.0])
    table.assign(torch.arange(4096), values)
    if dtype == "fp16":
        values = values.clamp(-65504, 65504)
    assert torch.equal(table.pull(torch.arange(4096)), values.to(torch_dtype).float())


def test_arena_in_a_file_gives_the_same_rows(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    memory, disk = Table(16, rule="adam"), Table(16, rule="adam", arena=tmp_path)
    for _ in range(5):
        keys = random.integers(0, 20_000, 10_000, np.uint64)
        grads = random.standard_normal((10_000, 16), np.float32)
        memory.push(keys, grads)
        disk.push(keys, grads)
    keys = np.arange(20_000, dtype=np.uint64)
    np.testing.assert_array_equal(memory.pull(keys), disk.pull(keys))
    assert list(tmp_path.iterdir()) == []


def forget_pages(folder: Path) -> None:
    """Has the system drop this process' row files from memory: their pages are read from the disk again."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(os.path.realpath(folder)):
                files[os.fstat(int(name)).st_ino] = int(name)
    assert files
    libc = ctypes.CDLL(None)
    for file in files.values():
        os.fsync(file)
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, _, _, inode, *_ = line.split()
        if int(inode) in files:
            start, end = (int(x, 16) for x in where.split("-"))
            assert libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 4) == 0  # MADV_DONTNEED
    for file in files.values():
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("dim", [3, 700])  # many rows a page; rows over several pages
def test_rows_are_read_back_from_their_file(locked: bool, dim: int, tmp_path: Path) -> None:
    random = np.random.default_rng(dim)
    memory, disk = (Table(dim, locked=locked, stripes=4, arena=arena) for arena in (None, tmp_path))
    for _ in range(3):
        keys = random.integers(0, 4_000, 2_000, np.uint64)
        grads = random.standard_normal((2_000, dim), np.float32)
        forget_pages(tmp_path)
        np.testing.assert_array_equal(memory.pull(keys), disk.pull(keys))
        forget_pages(tmp_path)
        memory.push(keys, grads)
        disk.push(keys, grads)
    keys = np.arange(4_000, dtype=np.uint64)  # some without a row
    forget_pages(tmp_path)
    disk.save(tmp_path / "saved")
    np.testing.assert_array_equal(memory.pull(keys, create=False), Table.load(tmp_path / "saved").pull(keys))
    forget_pages(tmp_path)
    np.testing.assert_array_equal(memory.pull(keys, create=False), disk.pull(keys, create=False))


def test_erased_keys_start_anew() -> None:
    table = Table(2, stripes=1)
    keys = np.arange(1000, dtype=np.uint64)
    first = table.pull(keys)
    table.push(keys, np.ones((1000, 2), np.float32))
    trained = table.pull(keys)
    assert table.erase(keys[::2]) == 500 and table.erase(keys[::2]) == 0 and len(table) == 500
    np.testing.assert_array_equal(table.pull(keys[1::2]), trained[1::2])
    np.testing.assert_array_equal(table.pull(keys[::2]), first[::2])
    table.push(keys[::2], np.ones((500, 2), np.float32))
    np.testing.assert_array_equal(table.pull(keys), trained)


def test_items_are_all_rows() -> None:
    table = Table(3)
    keys = np.arange(500, dtype=np.uint64)
    rows = table.pull(keys)
    found = {int(key): value for some, values in table.items() for key, value in zip(some, values, strict=True)}
    assert sorted(found) == keys.tolist()
    np.testing.assert_array_equal(np.stack([found[key] for key in range(500)]), rows)


def test_same_pushes_same_bits() -> None:
    def run() -> np.ndarray:
        random = np.random.default_rng(5)
        table = Table(16, rule="adagrad", seed=1)
        for _ in range(10):
            table.push(random.integers(0, 999, 5000, np.uint64), random.standard_normal((5000, 16), np.float32))
        return table.pull(np.arange(999, dtype=np.uint64))

    np.testing.assert_array_equal(run(), run())


def _pull_in_child(table: Table, keys: np.ndarray, expected: np.ndarray) -> None:
    same = np.array_equal(table.pull(keys), expected)
    table.push(keys, np.ones((len(keys), table.dim), np.float32))
    raise SystemExit(0 if same else 3)


def test_fork_takes_a_copy() -> None:
    table = Table(4)
    keys = np.arange(100, dtype=np.uint64)
    rows = table.pull(keys)
    child = multiprocessing.get_context("fork").Process(target=_pull_in_child, args=(table, keys, rows))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    np.testing.assert_array_equal(table.pull(keys), rows)


def test_a_table_that_outlives_python_says_nothing() -> None:
    """As one that a thread of the user's still holds."""
    script = (
        "import threading, plsc.ps; table = plsc.ps.Table(4); hold = threading.Event(); "
        "threading.Thread(target=lambda: (table, hold.wait()), daemon=True).start()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dim": 0}, "dim"),
        ({"dim": 2.0}, "dim"),
        ({"rule": "sdg"}, "adagrad"),
        ({"lr": 0.0}, "positive"),
        ({"lr": float("nan")}, "positive"),
        ({"lr": "0.1"}, "positive"),
        ({"init_scale": float("nan")}, "init_scale"),
        ({"init_scale": -1.0}, "init_scale"),
        ({"init_scale": 1e5, "dtype": "fp16"}, "at most 65504"),
        ({"locked": "no"}, "True or False"),
        ({"max_rows": 1e6}, "whole number"),
        ({"admit_probability": "half"}, "admit_probability"),
        ({"init": "gauss"}, "normal"),
        ({"dtype": "float16"}, "fp16"),
        ({"stripes": 48}, "power of two"),
        ({"seed": -1}, "seed"),
        ({"arena": "/no/such/folder"}, "existing folder"),
        ({"max_rows": 10}, "fewer stripes"),
        ({"policy": "lfu"}, "counters=True"),
        ({"admit_probability": 0.0}, "admit_probability"),
    ],
)
def test_bad_options(options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Table(**{"dim": 4, **options})


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        (np.zeros(2, np.int32), "int32"),
        (np.zeros(2), "float64"),
        (np.zeros((2, 1), np.uint64), "reshape"),
        ([1, 2], "list"),
        (torch.zeros(2), "float32"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "CPU"),
    ],
)
def test_bad_keys(keys: object, word: str) -> None:
    table = Table(4)
    with pytest.raises(ValueError, match=word):
        table.pull(keys)
    with pytest.raises(ValueError, match=word):
        table.push(keys, np.zeros((2, 4), np.float32))
    assert len(table) == 0


@pytest.mark.parametrize(
    ("grads", "word"),
    [
        (np.zeros((2, 5), np.float32), r"\(2, 5\)"),
        (np.zeros((3, 4), np.float32), r"\(3, 4\)"),
        (np.zeros(8, np.float32), "shape"),
        (np.zeros((2, 4)), "float64"),
        (torch.zeros(2, 4, dtype=torch.float16), "float16"),
    ],
)
def test_bad_gradients(grads: object, word: str) -> None:
    table = Table(4)
    with pytest.raises(ValueError, match=word):
        table.push(keys_of(1, 2), grads)
    assert len(table) == 0


def test_bad_outputs() -> None:
    table = Table(4)
    for out in (np.empty((2, 5), np.float32), np.empty((2, 4)), np.empty((4, 2), np.float32).T):
        with pytest.raises(ValueError, match="out"):
            table.pull(keys_of(1, 2), out=out)


@pytest.mark.slow
def test_hundred_million_keys_in_a_batch() -> None:
    """Scratch memory does not grow with the batch: 1.2 GB are the keys and the answer."""
    keys = np.arange(100_000_000, dtype=np.uint64) & np.uint64(0xFFFF)
    table = Table(1, rule="sgd", lr=1.0, init="zeros")
    table.assign(keys[: 1 << 16], np.arange(1 << 16, dtype=np.float32)[:, None])
    rows = table.pull(keys)
    assert len(table) == 1 << 16 and (rows[:, 0] == keys).all()


@pytest.mark.parametrize("locked", [False, True])
def test_refused_gradients_are_as_if_never_sent(locked: bool) -> None:
    """No row, no sighting, no age: the twin is sent the others alone."""
    random = np.random.default_rng(4)
    for options in ({}, {"admit_after": 3}, {"counters": True}):
        tables = [Table(4, locked=locked, **options) for _ in range(2)]
        for _ in range(6):
            keys = random.integers(0, 40, 60, np.uint64)
            grads = random.standard_normal((60, 4), np.float32)
            bad = random.random(60) < 0.4
            grads[bad, 2] = random.choice([np.nan, np.inf, -1e16], bad.sum())
            assert tables[0].push(keys, grads) == bad.sum()
            tables[1].push(keys[~bad], grads[~bad])
        mine, twin = tables
        every = np.arange(40, dtype=np.uint64)
        for age in (3, 1, 0):
            np.testing.assert_array_equal(mine.contains(every), twin.contains(every))
            np.testing.assert_array_equal(mine.pull(every, create=False), twin.pull(every, create=False))
            assert mine.stats()["unadmitted"] == twin.stats()["unadmitted"]
            assert mine.evict(max_age=age) == twin.evict(max_age=age)
    table = Table(4)
    assert table.add(keys_of(5), np.full((1, 4), np.nan, np.float32)) == 1 and len(table) == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_rows_stay_finite(rule: str, dtype: str) -> None:
    """A step whose row would not be finite is refused and counted, and the row goes on from where it was."""
    table, keys = Table(16, rule=RULES[rule](weight_decay=1.0), lr=1e30, dtype=dtype), keys_of(1, 2)
    largest = 6e4 if dtype == "fp16" else 3e38
    table.assign(keys, np.array([[largest], [1.0]], np.float32).repeat(16, 1))
    refused = 0
    for grad in (1e14, -1e15, 1.0, 3e14):
        before = table.pull(keys)
        now = table.push(keys[:1], np.full((1, 16), grad, np.float32))
        if now:
            np.testing.assert_array_equal(table.pull(keys), before)
        refused += now
        assert np.isfinite(table.pull(keys)).all()
    assert table.stats()["refused"] == refused and (refused > 0 or dtype == "fp16")
    before = table.pull(keys)
    for _ in range(2):
        table.add(keys, np.full((2, 16), 3e38, np.float32))
    assert np.isfinite(table.pull(keys)).all() and np.isfinite(np.concatenate([v for _, v in table.items()])).all()


def test_values_and_counters_beyond_a_dtype() -> None:
    table, keys = Table(2, dtype="bf16", counters=True), keys_of(1)
    table.assign(keys, np.array([[3.4e38, -3.4e38]], np.float32))
    most = torch.finfo(torch.bfloat16).max
    assert table.pull(keys).tolist() == [[most, -most]]
    for _ in range(3):
        table.push(keys, np.zeros((1, 2), np.float32), shows=np.array([3e38], np.float32))
    assert np.isfinite(table.counters(keys)).all()
    table.decay(0.0)
    assert table.counters(keys).tolist() == [[0, 0]]
    assert np.isfinite(Table(64, init="normal", init_scale=3e38).pull(np.arange(99, dtype=np.uint64))).all()
