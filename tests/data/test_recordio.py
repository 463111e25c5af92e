"""Reading record files: any index, labels that float32 rounds, the cache, several processes."""

import logging
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from plsc.data import Loader, RecordIO
from plsc.data.records import pack, unpack

from .record_files import images, lines, png, reindex, slow_records, write, write_raw


def test_images_labels_and_range(tmp_path: Path) -> None:
    dataset = RecordIO(write(tmp_path / "a.rec", [1, 0, -1]), image_size=16)
    image, label = dataset[1]
    assert image.shape == (16, 16, 3) and label == 0
    assert (image == np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8)).all()
    assert dataset.labels.dtype == np.int64 and dataset.labels.tolist() == [1, 0, -1] and dataset.num_classes == 2
    assert RecordIO(dataset.path, image_size=8, channels=1)[0][0].shape == (8, 8, 1)
    for i in (-1, 3):
        with pytest.raises(IndexError, match=f"sample {i}"):
            dataset[i]


def test_keys_in_any_order_sparse_from_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [0, 1, 2, 3])
    offsets = [offset for _, offset in lines(path)]
    reindex(path, [(70, offsets[0]), (1, offsets[3]), (3, offsets[1]), (2**40, offsets[2])])
    dataset = RecordIO(path)
    assert dataset.labels.tolist() == [3, 1, 0, 2]
    assert images(dataset) == [(png(i), i) for i in (3, 1, 0, 2)]
    assert [dataset.name(i).split()[-1] for i in range(4)] == ["1", "3", "70", str(2**40)]


def test_index_lines_may_have_crlf_and_blanks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [0, 1, 2])
    text = path.with_suffix(".idx").read_text()
    path.with_suffix(".idx").write_bytes(text.replace("\n", "\r\n").encode() + b"\r\n")
    assert RecordIO(path).labels.tolist() == [0, 1, 2]
    path.with_suffix(".idx").write_text(text.rstrip("\n").replace("\t", "  "))
    assert RecordIO(path).labels.tolist() == [0, 1, 2]


def test_a_long_index_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.rec", [k % 3 for k in range(50)])
    whole = RecordIO(path)
    monkeypatch.setattr("plsc.data.record_index._TEXT_BLOCK", 20)
    monkeypatch.setattr("plsc.data.recordio._BLOCK", 4)
    parts = RecordIO(path)
    assert (parts._rows == whole._rows).all()
    reindex(path, [*lines(path)[:40], (999, "x")])
    with pytest.raises(ValueError, match="line 41"):
        RecordIO(path)


def test_several_labels_with_an_image_are_no_header(tmp_path: Path) -> None:
    """Two numbers and an image at key 0, or 237 of them (masks), are images; headers are two numbers and nothing."""
    path = write(tmp_path / "a.rec", [[4, 1.0], [2.0] * 237, [3]])
    assert RecordIO(path).labels.tolist() == [4, 2, 3]
    payloads = [pack([1, 4], b""), pack(2, b"x"), pack(1, b"yy"), pack([1, 2], b"")]
    assert RecordIO(write_raw(tmp_path / "b.rec", payloads)).labels.tolist() == [2, 1]


def test_property_states_the_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "train.rec", [0, 1, 1])
    for text, classes, words in (
        ("2,112,112\n", 2, ""),
        ("9,112,112\n3\nshuffled\n", 9, "says 9 classes, the records have labels up to 1"),
        ("1,112,112\n", 2, "says 1 classes"),
        ("\x80\x02]q", 2, "expected `classes,height,width`"),
        ("", 2, "expected `classes,height,width`"),
    ):
        caplog.clear()
        (tmp_path / "property").write_text(text)
        assert RecordIO(tmp_path).num_classes == classes
        assert words in caplog.text and ("/property: " in caplog.text) == bool(words)
    (tmp_path / "train.rec").rename(tmp_path / "other.rec")
    (tmp_path / "train.idx").rename(tmp_path / "other.idx")
    assert RecordIO(tmp_path / "other.rec").num_classes == 2  # of which it says nothing


def test_a_missing_index_is_made_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dialect in ("plain", "insightface"):
        path = write(tmp_path / f"{dialect}.rec", [0, 1, 1, 3], dialect=dialect)
        wanted, text = images(RecordIO(path)), path.with_suffix(".idx").read_text()
        path.with_suffix(".idx").unlink()
        with caplog.at_level(logging.INFO, "plsc.data.recordio"):
            assert images(RecordIO(path)) == wanted
        assert "made anew from" in caplog.text
        assert path.with_suffix(".idx").read_text() == text  # the ids in the records are the keys
        reindex(path, [(0, 4), (0, -1)])
        with pytest.raises(ValueError, match="rebuild"):
            RecordIO(path)
        assert images(RecordIO(path, index="rebuild")) == wanted and path.with_suffix(".idx").read_text() == text
    assert not list(tmp_path.glob("*.tmp-*"))


def test_an_index_that_cannot_be_written_serves_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.rec", [0, 1])
    path.with_suffix(".idx").unlink()

    def refuse(*args: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", refuse)
    assert RecordIO(path).labels.tolist() == [0, 1]
    assert "cannot write it" in caplog.text


def test_records_that_share_an_id_are_counted_instead(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.rec", [pack(k, b"x") for k in (2, 0, 1)], keys=[7, 8, 9])
    dataset = RecordIO(path, index="rebuild")
    assert dataset.labels.tolist() == [2, 0, 1] and [key for key, _ in lines(path)] == [0, 1, 2]


# Labels that float32 cannot hold


def test_large_classes_come_from_id2(tmp_path: Path) -> None:
    labels = [0, 2**24 - 1, 2**24, 2**24 + 1, [2**24 + 3, 1.0], 2**30 + 7, 10**8 + 1, 2**53 - 1]
    path = write(tmp_path / "a.rec", labels)
    assert RecordIO(path).labels.tolist() == [label[0] if isinstance(label, list) else label for label in labels]
    stored = [unpack(payload) for payload in slow_records(path.read_bytes()).values()]
    assert [record.id2 for record in stored[:4]] == [0, 0, 2**24, 2**24 + 1]  # small ones as mxnet writes them


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (pack(2**24, b"x"), "float32 may have rounded"),
        (pack(2**24, b"x", id2=2**24 + 2), "float32 may have rounded"),
        (pack(-(2**24), b"x"), "no class"),
        (pack(float("nan"), b"x"), "no class"),
        (pack(float("inf"), b"x", id2=2**60), "no class"),
        (pack([1e30, 1], b"x"), "float32 may have rounded"),
        (pack(1.5, b"x"), "no class"),
        (pack(-2, b"x"), "no class"),
        (pack([0.25, 1, 1], b"x"), "no class"),
        (b"short", "too short"),
        (struct.pack("<IfQQ", 2, 0, 0, 0) + bytes(7), "too short"),
        (struct.pack("<IfQQ", 2**32 - 1, 0, 0, 0), "too short"),
    ],
)
def test_what_is_no_class_is_refused(tmp_path: Path, payload: bytes, message: str) -> None:
    path = write_raw(tmp_path / "a.rec", [pack(0, b"x"), payload], keys=[5, 6])
    with pytest.raises(ValueError, match=rf"key 6 .*{message}") as caught:
        RecordIO(path)
    if message != "too short":  # the file is wrong, not its index
        assert "write the file anew" in str(caught.value) and "rebuild" not in str(caught.value)


def test_a_small_label_stands_whatever_id2_says(tmp_path: Path) -> None:
    assert RecordIO(write_raw(tmp_path / "a.rec", [pack(3, b"x", id2=77)])).labels.tolist() == [3]


# Cache, processes


def test_cache_is_used_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write(tmp_path / "a.rec", [2, 0, 1]), tmp_path / "labels.npy"
    wanted = images(RecordIO(path, cache=cache))
    size = len(pickle.dumps(RecordIO(path, cache=cache)))
    with monkeypatch.context() as patch:
        patch.setattr("plsc.data.recordio._read_rows", None)  # any read of the file itself would fail
        cached = RecordIO(path, cache=cache)
        again = pickle.loads(pickle.dumps(cached))
    assert images(cached) == images(again) == wanted and again.labels.tolist() == [2, 0, 1]
    assert size < 600  # no arrays travel
    reindex(path, lines(path)[1:])
    assert RecordIO(path, cache=cache).labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match="changed since"):
        pickle.loads(pickle.dumps(cached))
    for content in (b"", b"junk", cache.read_bytes()[:-8]):
        cache.write_bytes(content)
        assert RecordIO(path, cache=cache).labels.tolist() == [0, 1]
    np.save(cache, np.zeros((3, 5)))
    assert RecordIO(path, cache=cache).labels.tolist() == [0, 1]
    assert RecordIO(path, cache=tmp_path / "no such folder" / "x.npy").labels.tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_worker_processes_read_the_same(tmp_path: Path, start_method: str) -> None:
    path = write(tmp_path / "a.rec", [k % 4 for k in range(24)])
    dataset = RecordIO(path, image_size=16, cache=tmp_path / "a.npy")
    dataset[0]  # the map is open before the workers start
    alone = [(x.numpy().copy(), y.tolist()) for x, y in Loader(dataset, 8).epochs(1)]
    loader = Loader(dataset, 8, workers=2, start_method=start_method)
    together = [(x.numpy().copy(), y.tolist()) for x, y in loader.epochs(1)]
    loader.close()
    assert all((a == b).all() and u == v for (a, u), (b, v) in zip(alone, together, strict=True))


def test_an_index_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [3, 1, 2])
    index = path.with_suffix(".idx")
    index.write_bytes(b"\xef\xbb\xbf" + index.read_bytes())
    assert RecordIO(path).labels.tolist() == [3, 1, 2]
