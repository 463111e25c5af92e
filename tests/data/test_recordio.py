"""Record files: mxnet's bytes, both kinds of file, any index, labels that float32 rounds, damage named and survived."""

import hashlib
import io
import logging
import os
import pickle
import random
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from plsc.data import Loader, RecordIO, RecordWriter
from plsc.data.records import MAGIC, Record, Span, find_records, pack, read_record, scan, unpack

GARBAGE = 18446744073709551615
PIECES = st.one_of(st.just(MAGIC), st.just(MAGIC[:2]), st.binary(min_size=1, max_size=9))
IMAGES = st.lists(PIECES, min_size=1, max_size=8).map(b"".join)


def png(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def write(path: Path, labels: list, *, dialect: str = "plain") -> Path:
    with RecordWriter(path, dialect=dialect) as writer:
        for k, label in enumerate(labels):
            writer.write(label, png(k))
    return path


def write_raw(path: Path, payloads: list[bytes], keys: list[int] | None = None) -> Path:
    """Frames payloads without cutting (they hold no magic) and writes the index, straight from the format's text."""
    data, lines = b"", ""
    for key, payload in zip(keys or range(len(payloads)), payloads, strict=True):
        lines += f"{key}\t{len(data)}\n"
        data += struct.pack("<II", 0xCED7230A, len(payload)) + payload + bytes(-len(payload) % 4)
    path.write_bytes(data)
    path.with_suffix(".idx").write_text(lines)
    return path


def slow_records(data: bytes) -> dict[int, bytes]:
    """The format read by its definition, a word at a time: payload by offset."""
    found, at = {}, 0
    while at < len(data):
        start, payload, first = at, b"", True
        while True:
            magic, word = struct.unpack("<II", data[at : at + 8])
            assert magic == 0xCED7230A
            kind, length = word >> 29, word % 2**29
            payload += (b"" if first else struct.pack("<I", magic)) + data[at + 8 : at + 8 + length]
            at, first = at + 8 + (length + 3) // 4 * 4, False
            if kind in (0, 3):
                break
        found[start] = payload
    return found


def lines(path: Path) -> list[tuple[int, int]]:
    return [tuple(map(int, line.split())) for line in path.with_suffix(".idx").read_text().splitlines()]


def reindex(path: Path, entries: list[tuple[object, object]]) -> None:
    path.with_suffix(".idx").write_text("".join(f"{key}\t{offset}\n" for key, offset in entries))


def images(dataset: RecordIO) -> list[tuple[bytes, int]]:
    return [(dataset.record(i).image, int(dataset.labels[i])) for i in range(len(dataset))]


# Writing


def test_bytes_are_those_of_mxnet(tmp_path: Path) -> None:
    """The digest is of a file written from these payloads by libmxnet.so 1.9.1 (MXRecordIOWriterWriteRecord)."""
    rng = random.Random(3)
    with RecordWriter(tmp_path / "a.rec") as writer:
        for k in range(300):
            pieces = (
                rng.choice([MAGIC, MAGIC * 2, rng.randbytes(k % 9 + 1), rng.randbytes(40)]) for _ in range(k % 7 + 1)
            )
            writer.write(k % 7 if k % 2 else [float(k % 7), *[1.0] * (k % 4)], b"".join(pieces))
    assert (
        hashlib.sha256((tmp_path / "a.rec").read_bytes()).hexdigest()
        == "75f377589a0e0679d1c74e6fc770c7e856c3cd7d33d095182067cf19b96326e7"
    )
    assert lines(tmp_path / "a.rec") == list(enumerate(slow_records((tmp_path / "a.rec").read_bytes())))


def test_a_payload_is_cut_at_aligned_magic_only(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(5, b"abcd" + MAGIC + b"x" + MAGIC, id=9)
    head = struct.pack("<IfQQ", 0, 5, 9, 0)
    first, last = head + b"abcd", b"x" + MAGIC
    wanted = MAGIC + struct.pack("<I", 1 << 29 | 28) + first + MAGIC + struct.pack("<I", 3 << 29 | 5) + last + bytes(3)
    assert (tmp_path / "a.rec").read_bytes() == wanted
    assert (tmp_path / "a.idx").read_bytes() == b"9\t0\n"


@settings(max_examples=60, deadline=None)
@given(st.lists(IMAGES, min_size=1, max_size=6), st.booleans(), st.randoms(use_true_random=False))
def test_round_trip(bodies: list[bytes], framed: bool, rng: random.Random) -> None:
    labels = sorted(rng.randrange(4) for _ in bodies)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.rec")
        with RecordWriter(path, dialect="insightface" if framed else "plain") as writer:
            for label, body in zip(labels, bodies, strict=True):
                writer.write([label, 1.0] if rng.random() < 0.5 else label, body)
        data = path.read_bytes()
        slow = slow_records(data)
        assert [(span.start, span.payload) for span in scan(path)] == list(slow.items())
        assert list(find_records(data)) == list(slow)
        for index in ("auto", "rebuild"):
            assert images(RecordIO(path, index=index)) == list(zip(bodies, labels, strict=True))
        assert pickle.loads(pickle.dumps(RecordIO(path))).record(0).image == bodies[0]


def test_insightface_dialect_is_laid_out_as_its_readers_expect(tmp_path: Path) -> None:
    path = write(tmp_path / "train.rec", [0, 0, 2, 2, 2, [5, 1.0]], dialect="insightface")
    index, records = dict(lines(path)), slow_records(path.read_bytes())
    header, classes = unpack(records[index[0]]), [unpack(records[index[key]]) for key in (7, 8, 9)]
    assert header.is_header and header.labels.tolist() == [7, 10] and header.id == 0
    assert [one.labels.tolist() for one in classes] == [[1, 3], [3, 6], [6, 7]]
    assert all(one.is_header for one in classes) and [one.id for one in classes] == [7, 8, 9]
    assert sorted(index) == list(range(10))
    dataset = RecordIO(tmp_path)  # a folder with train.rec
    assert dataset.labels.tolist() == [0, 0, 2, 2, 2, 5] and dataset.num_classes == 6
    assert dataset.name(5) == f"{path}, key 6"


def test_nothing_appears_unless_the_writer_is_closed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [0, 1])
    before = path.read_bytes(), lines(path)
    with pytest.raises(RuntimeError), RecordWriter(path) as writer:
        writer.write(0, b"x")
        raise RuntimeError
    assert (path.read_bytes(), lines(path)) == before and len(list(tmp_path.iterdir())) == 2
    writer = RecordWriter(path)
    writer.write(3, png(0))
    assert path.read_bytes() == before[0]
    writer.close()
    writer.close()
    assert RecordIO(path).labels.tolist() == [3] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("label", "image", "id", "message"),
    [
        (0.5, b"x", None, "whole number"),
        (float("nan"), b"x", None, "whole number"),
        (-2, b"x", None, "whole number"),
        (2**60, b"x", None, "whole number"),
        ([], b"x", None, "no label"),
        (1, b"", None, "empty image"),
        (1, b"x", 3, "above 3"),
        (1, b"x", 2**63, "above 3"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, label: float, image: bytes, id: int | None, message: str) -> None:
    writer = RecordWriter(tmp_path / "a.rec")
    writer.write(0, b"x", id=3)
    with pytest.raises(ValueError, match=message):
        writer.write(label, image, id=id)  # type: ignore[arg-type]
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_what_the_insightface_dialect_cannot_say(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "a.rec", dialect="insightface")
    writer.write(3, b"x")
    for label, id, message in ((2, None, "rising order"), (3, 7, "count from 1")):
        with pytest.raises(ValueError, match=message):
            writer.write(label, b"x", id=id)
    writer._key = 2**24 - 3
    writer.write(3, b"x")
    with pytest.raises(ValueError, match=r"2\*\*24"):
        writer.write(3, b"x")
    writer.discard()
    with pytest.raises(ValueError, match="dialect"):
        RecordWriter(tmp_path / "a.rec", dialect="mxnet")
    with pytest.raises(ValueError, match="name of the"):
        RecordWriter(tmp_path / "a.idx")


# Reading


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
    monkeypatch.setattr("plsc.data.recordio._TEXT_BLOCK", 20)
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


# Damage


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((1, GARBAGE), f"line 2.*{GARBAGE}"),
        ((1, -8), "line 2.*-8"),
        ((1, 2**62), f"key 1 at byte {2**62}"),
        ((1, 10**30), "line 2"),
        ((1, 6), "key 1 at byte 6"),
        ((1, 12), "byte 12 for key 1 is no record"),
        ((-1, 12), "line 2"),
        ((0, 12), "key 0 stands more than once"),
        ((1, 0), "begins inside"),
        (("x", 0), "line 2"),
        ((1, "1 2"), "line 2"),
        ((1, 1.5), "line 2"),
    ],
)
def test_a_wrong_index_is_named(tmp_path: Path, entry: tuple[object, object], message: str) -> None:
    path = write(tmp_path / "a.rec", [0, 1, 2])
    reindex(path, [lines(path)[0], entry, *lines(path)[2:]])
    with pytest.raises(ValueError, match=f"{message}.*rebuild"):
        RecordIO(path)


def test_the_middle_of_a_record_is_no_record(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(0, b"abcd" + MAGIC + b"efgh")
    reindex(tmp_path / "a.rec", [(0, 36)])
    with pytest.raises(ValueError, match="middle of a record"):
        RecordIO(tmp_path / "a.rec")


def test_an_index_that_leaves_records_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.rec", [0, 1, 2, 3])
    reindex(path, lines(path)[1:3])
    assert RecordIO(path).labels.tolist() == [1, 2]
    assert "are not in the index" in caplog.text
    path = write(tmp_path / "b.rec", [0, 1, 2, 3], dialect="insightface")
    reindex(path, [entry for entry in lines(path) if entry[0] != 3])
    with pytest.raises(ValueError, match="lists 3 images, the header record says 4"):
        RecordIO(path)
    assert len(RecordIO(path, index="rebuild")) == 4


def test_an_index_of_another_file_is_refused(tmp_path: Path) -> None:
    path, other = write(tmp_path / "a.rec", [0, 1, 2]), write(tmp_path / "b.rec", [[k, 1.0] for k in range(5)])
    other.with_suffix(".idx").replace(path.with_suffix(".idx"))
    with pytest.raises(ValueError, match="rebuild"):
        RecordIO(path)


def test_truncated_at_every_byte_of_the_last_record(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    with RecordWriter(path) as writer:
        for k in range(3):
            writer.write(k, b"image" + MAGIC * k)
    data, starts = path.read_bytes(), [offset for _, offset in lines(path)]
    for size in range(starts[-1], len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="key 2"):
            RecordIO(path)
        spans = list(scan(path))
        assert [span.payload is not None for span in spans[:2]] == [True, True]
        if size == starts[-1]:
            assert len(spans) == 2 and len(RecordIO(path, index="rebuild")) == 2
            write_raw(path, [])
            path.with_suffix(".idx").write_text("".join(f"{k}\t{start}\n" for k, start in enumerate(starts)))
        else:
            assert spans[2:] == [Span(starts[-1], size, None, spans[2].problem)]
            with pytest.raises(ValueError, match=r"cannot make an index.*scan"):
                RecordIO(path, index="rebuild")


def test_a_changed_length_is_found_when_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [0, 1, 2])
    data, at = bytearray(path.read_bytes()), lines(path)[1][1]
    data[at + 4 : at + 8] = struct.pack("<I", struct.unpack("<I", data[at + 4 : at + 8])[0] + 4)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="begins inside the record before"):
        RecordIO(path)


def test_a_broken_image_names_its_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [0, 1])
    data = path.read_bytes().replace(png(1), bytes(len(png(1))))
    path.write_bytes(data)
    dataset = RecordIO(path, image_size=16)
    dataset[0]
    with pytest.raises(ValueError, match=r"a\.rec, key 1, byte 884: broken"):
        dataset[1]


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no records"):
        RecordIO(tmp_path / "missing.rec")
    (tmp_path / "empty.rec").touch()
    with pytest.raises(ValueError, match="empty"):
        RecordIO(tmp_path / "empty.rec")
    assert list(scan(tmp_path / "empty.rec")) == []
    for content in (b"x", bytes(4096), b"\x0a\x23\xd7\xce"):
        (tmp_path / "bad.rec").write_bytes(content)
        with pytest.raises(ValueError, match="cannot make an index"):
            RecordIO(tmp_path / "bad.rec")
    path = write(tmp_path / "a.rec", [0])
    path.with_suffix(".idx").write_text("")
    with pytest.raises(ValueError, match="index is empty"):
        RecordIO(path)
    with pytest.raises(ValueError, match="got index"):
        RecordIO(path, index="make")
    with pytest.raises(ValueError, match="without an image"):
        RecordIO(write_raw(tmp_path / "b.rec", [pack([1, 1], b"")]))
    with pytest.raises(ValueError, match="every label"):
        RecordIO(write(tmp_path / "c.rec", [-1, -1]))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_scan_finds_what_damage_left(data: st.DataObject) -> None:
    """Overwriting, losing or adding bytes in one record costs that record and no other; spans tile the file."""
    rng = random.Random(data.draw(st.integers(0, 10**9)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.rec")
        bodies = [rng.randbytes(rng.randrange(1, 60)) + MAGIC * rng.randrange(2) + b"end" for _ in range(6)]
        with RecordWriter(path) as writer:
            for k, body in enumerate(bodies):
                writer.write(k, body)
        clean, starts = path.read_bytes(), [offset for _, offset in lines(path)]
        hit = rng.randrange(1, 5)
        start = starts[hit]
        how = data.draw(st.sampled_from(["magic", "length", "lost", "added"]))
        if how == "magic":
            dirty = clean[:start] + b"\0" + clean[start + 1 :]
        elif how == "length":  # reaches beyond the file
            dirty = clean[: start + 4] + struct.pack("<I", 2**29 - 1) + clean[start + 8 :]
        elif how == "lost":
            dirty = clean[:start] + clean[start + rng.randrange(1, 12) :]
        else:
            dirty = clean[:start] + rng.randbytes(rng.randrange(1, 12)) + clean[start:]
        path.write_bytes(dirty)
        spans = list(scan(path))
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])] and spans[-1].stop == len(
            dirty
        )
        found = [unpack(span.payload).image for span in spans if span.payload is not None]
        assert found == [body for k, body in enumerate(bodies) if k != hit or how == "added"]
        (damage,) = [span for span in spans if span.payload is None]
        assert damage.start == start and damage.problem


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


def test_a_record_is_taken_apart_as_it_was_put_together() -> None:
    payload = pack([3, 0.5], b"body", id=7, id2=2**63)
    record = unpack(payload)
    assert (record.flag, record.id, record.id2, record.image) == (2, 7, 2**63, b"body")
    assert record.labels.tolist() == [3, 0.5] and not record.is_header
    assert Record(2, record.labels, 0, 0, b"").is_header
    framed = MAGIC + struct.pack("<I", len(payload)) + payload
    assert read_record(framed, 0) == (payload, len(framed))


def test_an_index_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [3, 1, 2])
    index = path.with_suffix(".idx")
    index.write_bytes(b"\xef\xbb\xbf" + index.read_bytes())
    assert RecordIO(path).labels.tolist() == [3, 1, 2]
