"""Damaged record files and wrong indices: named and survived."""

import random
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data import RecordIO, RecordWriter
from plsc.data.records import MAGIC, Span, pack, scan, unpack

from .record_files import lines, png, reindex, write, write_raw

GARBAGE = 18446744073709551615


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
