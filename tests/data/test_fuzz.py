"""Files damaged at random: every reader either reads them or says what is wrong; none crashes, hangs or hoards."""

import logging
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from plsc.data import ImageList, RecordIO, RecordWriter, TarShards, read_pairs
from plsc.data.records import MAGIC, scan
from plsc.data.tar import TarWriter
from plsc.data.verification import read_bin
from plsc.train.templates import read_landmarks, read_template_media, read_template_pairs, read_template_subjects

QUICK, SLOW, PARTS = 200, 4_000, 5  # inputs a reader; slow: in parts, 100,000 over the five readers of data
WORDS = [
    MAGIC,
    MAGIC + struct.pack("<I", 1 << 29),
    b"\xff" * 4,
    bytes(4),
    b"18446744073709551615",
    b"-1",
    b"\t",
    b"\n",
    b"\r",
]
WORDS += [
    b"0",
    b"nan",
    b"1e9",
    "²".encode(),
    b"\x80\x02",
    b"\x94",
    b"(",
    b"r\xff\xff\xff\x7f",
    b"c__builtin__\neval\n",
    b"R",
]

Read = Callable[[Path, bytes, random.Random], None]


def damage(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 30))
        what = rng.randrange(6)
        if what == 0:
            data = data[:at] + rng.randbytes(length) + data[at + length :]
        elif what == 1:
            data = data[:at] + data[at + length :]
        elif what == 2:
            data = data[:at] + rng.choice(WORDS) + data[at:]
        elif what == 3:
            data = data[:at]
        elif what == 4:
            data = data[:at] + data[at - length :]
        else:
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if at < len(data) else data
    return data


def record_seed(folder: Path, rng: random.Random) -> bytes:
    """A record file and its index in one, a mark between them."""
    framed = rng.random() < 0.5
    with RecordWriter(folder / "seed.rec", dialect="insightface" if framed else "plain") as writer:
        for k in range(4):
            writer.write([k, 1.0] if rng.random() < 0.3 else k, b"body" + MAGIC * rng.randrange(2) + rng.randbytes(9))
    return (folder / "seed.rec").read_bytes() + b"==" + (folder / "seed.idx").read_bytes()


def bin_seed(folder: Path, rng: random.Random) -> bytes:
    images: list[object] = [rng.randbytes(rng.choice((3, 300))) for _ in range(4)]
    if rng.random() < 0.5:
        images = [np.frombuffer(image, np.uint8) for image in images]
    same = rng.choice(([True, np.True_], np.array([1, 0]), [np.int64(0), np.int32(1)]))
    found = pickle.dumps((images, same), rng.randrange(6))
    lines = (b"S%s\na" % repr(image)[1:].encode() for image in images if isinstance(image, bytes))  # Python 2's
    text = b"((l" + b"".join(lines) + b"(lI01\naI00\nat."
    return text if isinstance(images[0], bytes) and rng.random() < 0.5 else found


def list_seed(folder: Path, rng: random.Random) -> bytes:
    return b"a/b.jpg 0\nc d.png\t3\n\n" * rng.randrange(1, 4)


def table_seed(folder: Path, rng: random.Random) -> bytes:
    kinds = (b"0\ta/b.jpg\t3\t1 2 3 4\n1\tc d.png\t-1\n", b"5\t7.000000\ta/b.jpg\n6\t1\t0.5\tc.png\n")
    return rng.choice(kinds) * rng.randrange(1, 4)


def tar_seed(folder: Path, rng: random.Random) -> bytes:
    with TarWriter(folder / "seed.tar") as writer:
        for k in range(3):
            writer.write("é" * rng.choice((1, 60)) + f"/{k}", ".jpg", k, rng.randbytes(rng.choice((5, 900))))
    return (folder / "seed.tar").read_bytes()


def pairs_seed(folder: Path, rng: random.Random) -> bytes:
    return b"2 1\n" + b"ann 1 2\nann 1 bob 1\n" * 2


def read_record_file(path: Path, data: bytes, rng: random.Random) -> None:
    content, _, index = data.partition(b"==")
    path.write_bytes(content)
    path.with_suffix(".idx").write_bytes(index)
    spans = list(scan(path))
    assert [span.start for span in spans] == [0, *(span.stop for span in spans)][: len(spans)]
    assert (spans[-1].stop if spans else 0) == len(content)
    dataset = RecordIO(path, index=rng.choice(("auto", "rebuild")))
    for i in range(len(dataset)):
        try:
            dataset[i]
        except ValueError as error:
            assert "key" in str(error)


def read_bin_file(path: Path, data: bytes, rng: random.Random) -> None:
    path.write_bytes(data)
    images, same = read_bin(path)
    assert len(images) == 2 * len(same) and all(type(image) is bytes for image in images)


def read_list_file(path: Path, data: bytes, rng: random.Random) -> None:
    path.write_bytes(data)
    dataset = ImageList(path)
    for i in range(len(dataset)):
        assert dataset.name(i) and dataset.line(i) > i and -1 <= dataset.labels[i] < dataset.num_classes


def read_table_file(path: Path, data: bytes, rng: random.Random) -> None:
    read_list_file(path.with_suffix(rng.choice((".lst", ".tsv"))), data, rng)


def read_tar_file(path: Path, data: bytes, rng: random.Random) -> None:
    path.write_bytes(data)
    dataset = TarShards(path)
    for i in range(len(dataset)):
        assert len(dataset.encoded(i)) <= len(data) and ".." not in dataset.name(i).split("/")


def read_pairs_file(path: Path, data: bytes, rng: random.Random) -> None:
    path.write_bytes(data)
    pairs = read_pairs(path, ["ann_0001", "ann_0002", "bob_0001"])
    assert len(pairs.first) == len(pairs.second) == len(pairs.same)


def text(seed: bytes, parse: Callable[[Path], object]) -> tuple[Callable[[Path, random.Random], bytes], Read]:
    """A text format: a sound file and its reader."""

    def read(path: Path, data: bytes, rng: random.Random) -> None:
        path.write_bytes(data)
        parse(path)

    return lambda folder, rng: seed * rng.randrange(1, 4), read


READERS: dict[str, tuple[Callable[[Path, random.Random], bytes], Read]] = {
    "records": (record_seed, read_record_file),
    "bin": (bin_seed, read_bin_file),
    "list": (list_seed, read_list_file),
    "table": (table_seed, read_table_file),
    "tar": (tar_seed, read_tar_file),
    "pairs": (pairs_seed, read_pairs_file),
    "template media": text(b"1.jpg 4 5\n2.jpg 4 6\n", read_template_media),
    "template pairs": text(b"1 2 0\n3 4 1\n", read_template_pairs),
    "template subjects": text(b"1,2,a.jpg\n3,4,b.jpg\n", read_template_subjects),
    "landmarks": text(b"1.jpg" + b" 10.5" * 10 + b" 0.99\n", read_landmarks),
}


SLOWLY = [pytest.param(SLOW, part, marks=pytest.mark.slow) for part in range(1, PARTS + 1)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Else the log of thousands of broken files is kept, and is what grows."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def resident() -> int:
    """Bytes of memory this process holds, 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.filterwarnings("ignore:loadtxt", "ignore:invalid escape")
@pytest.mark.parametrize(("count", "part"), [(QUICK, 0), *SLOWLY])
@pytest.mark.parametrize("reader", list(READERS))
def test_damaged_files(reader: str, count: int, part: int, tmp_path: Path) -> None:
    make, read = READERS[reader]
    rng = random.Random(part)
    before, files, refused = 0, 0, 0
    for number in range(count):
        if number % 50 == 0:
            seed = make(tmp_path, rng)
            read(tmp_path / "a.rec", seed, rng)  # whole: must be read
        try:
            read(tmp_path / "a.rec", damage(seed, rng), rng)
        except ValueError as error:
            assert str(error)
            refused += 1
        if number == count // 4:
            before, files = resident(), open_files()
    assert count // 20 < refused < count, "the damage is too weak, or too strong, to test anything"
    assert resident() - before < 64 * 2**20
    assert open_files() <= files
