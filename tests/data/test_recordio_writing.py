"""Writing record files: mxnet's bytes, InsightFace's layout, what cannot be said in either."""

import hashlib
import pickle
import random
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data import RecordIO, RecordWriter
from plsc.data.records import MAGIC, Record, find_records, pack, read_record, scan, unpack

from .record_files import images, lines, png, slow_records, write

PIECES = st.one_of(st.just(MAGIC), st.just(MAGIC[:2]), st.binary(min_size=1, max_size=9))
IMAGES = st.lists(PIECES, min_size=1, max_size=8).map(b"".join)


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


def test_a_record_is_taken_apart_as_it_was_put_together() -> None:
    payload = pack([3, 0.5], b"body", id=7, id2=2**63)
    record = unpack(payload)
    assert (record.flag, record.id, record.id2, record.image) == (2, 7, 2**63, b"body")
    assert record.labels.tolist() == [3, 0.5] and not record.is_header
    assert Record(2, record.labels, 0, 0, b"").is_header
    framed = MAGIC + struct.pack("<I", len(payload)) + payload
    assert read_record(framed, 0) == (payload, len(framed))
