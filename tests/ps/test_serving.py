"""Exported tables: equal to the table they come from, within what their dtype can hold; damaged files are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from plsc.ps import Served, Table, export

KEYS = np.random.default_rng(0).integers(0, 2**64 - 1, 70_000, np.uint64)


@pytest.fixture(scope="module")
def table() -> Table:
    table = Table(6, seed=4, init_scale=0.3)
    table.push(KEYS, np.random.default_rng(1).standard_normal((len(KEYS), 6), np.float32))
    return table


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_serves_what_the_table_holds(table: Table, dtype: str, tmp_path: Path) -> None:
    assert export(table, tmp_path / "t", dtype=dtype) == len(table) == len(Served(tmp_path / "t"))
    served, keys = Served(tmp_path / "t"), np.r_[KEYS[::7], np.arange(10, dtype=np.uint64), np.uint64(2**64 - 1)]
    exact, got = table.pull(keys, create=False), served.pull(keys)
    known = len(KEYS[::7])
    largest = np.abs(exact).max(1, keepdims=True)
    bound = {"fp32": 0 * largest, "fp16": largest * 2.0**-11, "int8": largest / 254 * 1.001}[dtype]
    assert (np.abs(got - exact)[:known] <= bound[:known]).all()
    np.testing.assert_array_equal(got[known:], exact[known:])
    tensor = served.pull(torch.from_numpy(keys))
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), got)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_is_a_safetensors_file(table: Table, tmp_path: Path) -> None:
    export(table, tmp_path / "t")
    arrays = load_file(tmp_path / "t")
    assert (np.diff(arrays["keys"]) > 0).all()
    np.testing.assert_array_equal(arrays["values"], table.pull(arrays["keys"]))


def test_empty_table(tmp_path: Path) -> None:
    empty = Table(3)
    assert export(empty, tmp_path / "t", dtype="int8") == 0
    np.testing.assert_array_equal(Served(tmp_path / "t").pull(KEYS[:5]), empty.pull(KEYS[:5], create=False))
    assert Served(tmp_path / "t").pull(KEYS[:0]).shape == (0, 3)


def test_bad_files(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "t"
    export(table, path)
    whole = path.read_bytes()
    for data in (whole[:-1], whole + b"x", whole[:40], b"", b"PK\x03\x04 an archive of something else"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="not an exported table"):
            Served(path)
    with pytest.raises(ValueError, match="fp16"):
        export(table, path, dtype="int4")


def test_every_flip_is_noticed(tmp_path: Path) -> None:
    path, small = tmp_path / "t", Table(3, seed=1)
    small.pull(KEYS[:5])
    export(small, path, dtype="int8")
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="not an exported table"):
            Served(path)
        try:
            Served(path, verify=False)
        except ValueError as error:
            assert "not an exported table" in str(error)
    path.write_bytes(whole)
    np.testing.assert_array_equal(Served(path, verify=False).pull(KEYS[:9]), Served(path).pull(KEYS[:9]))


def test_values_beyond_half_precision(tmp_path: Path) -> None:
    """As in a table of halves."""
    values = np.array([[1e38, -7e4, 3.0]], np.float32)
    table, half = Table(3), Table(3, dtype="fp16")
    for each in (table, half):
        each.assign(KEYS[:1], values)
    export(table, tmp_path / "t", dtype="fp16")
    np.testing.assert_array_equal(Served(tmp_path / "t").pull(KEYS[:1]), half.pull(KEYS[:1]))


def test_int8_of_the_smallest_floats(tmp_path: Path) -> None:
    """Their scale is rounded so far that they are more than 127 of it: they stay at 127 and keep their sign."""
    table, keys = Table(1), np.arange(3, dtype=np.uint64)
    table.assign(keys, np.array([[2.5e-43], [-2.5e-43], [1.3e-43]], np.float32))
    export(table, tmp_path / "e", dtype="int8")
    np.testing.assert_array_equal(np.sign(Served(tmp_path / "e").pull(keys))[:, 0], [1, -1, 1])
    with pytest.raises(ValueError, match="table: got Served"):
        export(Served(tmp_path / "e"), tmp_path / "f")
