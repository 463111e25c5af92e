"""LMDB: environments of other writers, layouts that are refused, a file that grows."""

import pickle
from pathlib import Path

import pytest

from plsc.data import (
    LMDBImages,
    keyvalue,
    open_images,
)
from plsc.data.keyvalue import LMDBWriter

from .contents import jpeg


def test_lmdb_as_others_write_it(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "x"), map_size=2**22) as environment, environment.begin(write=True) as transaction:
        for k in range(3):
            transaction.put(b"image-%09d" % (k + 1), jpeg(k))
            transaction.put(b"label-%09d" % (k + 1), b"%d" % (2 - k))
        transaction.put(b"num-samples", b"3")
    data = open_images(tmp_path / "x", image_size=8)
    assert isinstance(data, LMDBImages) and data.labels.tolist() == [2, 1, 0] and data.encoded(1) == jpeg(1)
    assert data.name(2) == "image-000000003"
    assert pickle.loads(pickle.dumps(data)).encoded(0) == jpeg(0)
    with pytest.raises(IndexError, match="expected 0 to 2"):
        data.encoded(3)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ({}, "num-samples: got nothing, expected a whole number"),
        ({b"num-samples": b"x"}, "num-samples: got b'x'"),
        ({b"num-samples": b"0"}, "got 0 as num-samples"),
        ({b"num-samples": b"999999999999", b"labels": b""}, "as num-samples, but the file holds 2 keys"),
        ({b"num-samples": b"2", b"label-000000001": b"0"}, "label-000000002: got nothing"),
        ({b"num-samples": b"1", b"label-000000001": b"Anna"}, "label-000000001: got b'Anna'"),
        ({b"num-samples": b"1", b"label-000000001": b"-1"}, "got labels from -1 to -1"),
        ({b"num-samples": b"1", b"label-000000001": b"0"}, "got nothing under image-000000001"),
        ({b"num-samples": b"1", b"label-000000001": b"0", b"image-000000001": b"x"}, "image-000000001: broken"),
    ],
)
def test_lmdb_of_another_layout(tmp_path: Path, pairs: dict[bytes, bytes], words: str) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "x.lmdb"), subdir=False) as environment, environment.begin(write=True) as transaction:
        for key, value in pairs.items():
            transaction.put(key, value)
    with pytest.raises(ValueError) as caught:
        LMDBImages(tmp_path / "x.lmdb")[0]
    assert words in str(caught.value) and "x.lmdb" in str(caught.value)


def test_lmdb_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lmdb")
    (tmp_path / "x.lmdb").write_bytes(b"hello" * 3000)
    with pytest.raises(ValueError, match="cannot be read as LMDB"):
        LMDBImages(tmp_path / "x.lmdb")
    with pytest.raises(ValueError, match="check the path"):
        LMDBImages(tmp_path / "gone.lmdb")
    with pytest.raises(RuntimeError, match="stop"), LMDBWriter(tmp_path / "y.lmdb") as writer:
        writer.write("a", 0, b"x")
        raise RuntimeError("stop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.lmdb"]
    monkeypatch.setitem(__import__("sys").modules, "lmdb", None)
    with pytest.raises(ValueError, match=r"needs lmdb.*plsc-torch\[lmdb\]"):
        LMDBImages(tmp_path / "x.lmdb")


def test_an_lmdb_file_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lmdb")
    monkeypatch.setattr(keyvalue, "_FIRST_SIZE", 2**16)
    monkeypatch.setattr(keyvalue, "_BATCH", 10)
    with LMDBWriter(tmp_path / "x.lmdb") as writer:
        for k in range(300):
            writer.write(f"{k}", k % 7, bytes([k % 251]) * 3000)
    data = LMDBImages(tmp_path / "x.lmdb")
    assert all(data.encoded(k) == bytes([k % 251]) * 3000 and data.name(k) == str(k) for k in range(300))
