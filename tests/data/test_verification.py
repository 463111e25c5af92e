"""Verification sets (.bin): every way they are written is read, what could run code is refused and not run."""

import io
import os
import pickle
import pickletools
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from plsc.data import VerificationSet
from plsc.data.verification import _build, read_bin


def png(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def python2(images: list[bytes], same: list[bool]) -> bytes:
    """What Python 2's cPickle writes: strings are bytes."""
    out = b"\x80\x02]q\x01("
    for k, image in enumerate(images):
        short = len(image) < 256
        out += b"U" + bytes([len(image)]) + image if short else b"T" + struct.pack("<i", len(image)) + image
        out += b"r" + struct.pack("<I", k + 2)
    out += b"e]q\x00(" + b"".join(b"\x88" if one else b"\x89" for one in same) + b"e\x86."
    assert pickle.loads(out, encoding="bytes") == (images, same)
    return out


def python2_text(images: list[bytes], flags: bytes) -> bytes:
    """What Python 2's pickle.dump writes unless told otherwise, protocol 0: strings as its repr prints them."""
    bins = b"".join(b"S%s\np%d\na" % (repr(image)[1:].encode(), k + 2) for k, image in enumerate(images))
    return b"((lp1\n" + bins + flags + b"tp0\n."


FLAGS = [True, False, True]
ARRAY = b"cnumpy.core.multiarray\n%s\n"
DTYPE = b"cnumpy\ndtype\np9%d\n(S'%s'\nI0\nI1\ntR(I3\nS'%s'\nNNNI-1\nI-1\nI0\ntb"
PYTHON2_FLAGS = {
    "booleans": b"(lp90\nI01\naI00\naI01\na",
    "long": b"(lp90\nL1L\naL0L\naL1L\na",
    "int64": ARRAY % b"_reconstruct"
    + b"p90\n(cnumpy\nndarray\np91\n(I0\ntS'b'\ntR(I1\n(I3\nt"
    + DTYPE % (2, b"i8", b"<")
    + b"I00\nS'"
    + rb"\x01\x00\x00\x00\x00\x00\x00\x00"
    + rb"\x00" * 8
    + rb"\x01"
    + rb"\x00" * 7
    + b"'\ntb",
    "bool_": b"(lp90\n"
    + ARRAY % b"scalar"
    + b"p91\n("
    + DTYPE % (2, b"b1", b"|")
    + b"p93\nS'"
    + rb"\x01"
    + b"'\ntRp94\na"
    + b"g91\n(g93\nS'"
    + rb"\x00"
    + b"'\ntRag94\na",
}


@pytest.mark.parametrize("flags", PYTHON2_FLAGS)
def test_text_pickles_of_python_2(tmp_path: Path, flags: str) -> None:
    images = [b"\xff\xd8'\"\\\n\r\t\0x", b"it's", b'"', png(1), bytes(range(256)), b"\\x41"]
    content = python2_text(images, PYTHON2_FLAGS[flags])
    loaded, same = pickle.loads(content, encoding="bytes")  # Python's own word for what it means
    assert loaded == images and list(map(bool, same)) == FLAGS
    (tmp_path / "a.bin").write_bytes(content)
    found, truth = read_bin(tmp_path / "a.bin")
    assert found == images and truth.tolist() == FLAGS


@pytest.mark.parametrize("text", [b"S'open\n", b"S\n", b"S'\n", b"Sopen\n", b"S'cut", rb"S'\x4'" + b"\n"])
def test_text_that_is_no_string(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(b"((l" + text + b"a(lt.")
    with pytest.raises(ValueError, match=r"a\.bin: broken"):
        read_bin(tmp_path / "a.bin")


def put(path: Path, content: object, protocol: int = 2) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


# Reading


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["bytes", "array", "column"])
@pytest.mark.parametrize(
    "flags", ["list", "tuple", "numbers", "array", "numpy booleans", "int32", ">i8", "uint8", "longs"]
)
def test_every_way_of_writing_gives_the_same(tmp_path: Path, protocol: int, kind: str, flags: str) -> None:
    images, same = [png(k) for k in range(6)], [True, False, True]
    arrays = [np.frombuffer(image, np.uint8) for image in images]
    kinds = {"bytes": images, "array": arrays, "column": [array.copy()[:, None] for array in arrays]}
    ways = {
        "list": same,
        "tuple": tuple(same),
        "numbers": [int(one) for one in same],
        "array": np.array(same),
        "numpy booleans": list(np.array(same)),
        "int32": np.array(same, np.int32),
        ">i8": np.array(same, ">i8"),
        "uint8": np.array(same, np.uint8)[:, None],
        "longs": list(np.array(same, np.int64)),
    }
    found, truth = read_bin(put(tmp_path / "a.bin", (kinds[kind], ways[flags]), protocol))
    assert found == images and truth.tolist() == same and truth.dtype == np.bool_


def test_python_2_files_and_old_numpy_names(tmp_path: Path) -> None:
    images = [b"\xff\x00short", png(1), b"\x80" * 300, b"x"]
    (tmp_path / "a.bin").write_bytes(python2(images, [True, False]))
    assert read_bin(tmp_path / "a.bin")[0] == images
    content = pickle.dumps(([np.frombuffer(png(k), np.uint8) for k in range(4)], [True, False]), 2)
    (tmp_path / "b.bin").write_bytes(content.replace(b"numpy._core", b"numpy.core"))
    assert read_bin(tmp_path / "b.bin")[0] == [png(k) for k in range(4)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.binary(min_size=1), st.binary(min_size=1, max_size=700), st.booleans())), st.integers(0, 5)
)
def test_round_trip(pairs: list[tuple[bytes, bytes, bool]], protocol: int) -> None:
    images, same = [one for pair in pairs for one in pair[:2]], [pair[2] for pair in pairs]
    assert _build(pickle.dumps((images, same), protocol)) == (images, same)
    assert _build(python2(images, same)) == (images, same)
    assert _build(python2_text(images, b"(l" + b"".join(b"I%02d\na" % one for one in same))) == (images, same)


def test_dataset_and_pairs(tmp_path: Path) -> None:
    same = [k % 3 == 0 for k in range(12)]
    dataset = VerificationSet(put(tmp_path / "a.bin", ([png(k) for k in range(24)], same)), image_size=16)
    assert len(dataset) == 24 and dataset.num_classes == 0 and dataset.labels.tolist() == [-1] * 24
    assert dataset.pairs.first.tolist() == list(range(0, 24, 2)) and dataset.pairs.same.tolist() == same
    assert dataset.pairs.second.tolist() == list(range(1, 24, 2)) and dataset.pairs.num_folds == 10
    image, label = dataset[5]
    assert label == -1 and (image == np.random.default_rng(5).integers(0, 256, (16, 16, 3), np.uint8)).all()
    assert dataset.name(5).endswith("a.bin, image 5 (pair 2)")
    again = pickle.loads(pickle.dumps(dataset))
    assert (again[23][0] == dataset[23][0]).all()
    for i in (-1, 24):
        with pytest.raises(IndexError):
            dataset[i]


def test_an_image_twice_is_held_once(tmp_path: Path) -> None:
    image = png(0) * 100
    found, _ = read_bin(put(tmp_path / "a.bin", ([image] * 2000, [True] * 1000)))
    assert len(found) == 2000 and len({id(one) for one in found}) == 1


# What is refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (([b"x"] * 18, [True] * 9), "9 pairs, expected at least one in each of 10 folds"),
        (([], []), "0 pairs"),
        (([b"x"] * 19, [True] * 10), "19 images for 10 pairs"),
        (([b"x"] * 20, [True] * 11), "20 images for 11 pairs"),
        (([b"x"] * 20, [True] * 9 + [2]), "got 2 for pair 9"),
        (([b"x"] * 20, np.arange(10)), "got 2 for pair 2"),
        (([b"x"] * 20, [np.int64(-1)] * 10), "got -1 for pair 0"),
        (([b"x"] * 20, [np.float64(1)] * 10), "an array of f8"),
        (([b"x"] * 19 + [np.zeros(3, np.int64)], [True] * 10), "got an array as image 19"),
        (([b"x"] * 20, [True] * 9 + [None]), "got NoneType for pair 9"),
        (([b"x"] * 20, 10), "got int for the pairs"),
        (([b"x"] * 19 + [b""], [True] * 10), "got an empty one as image 19"),
        (([b"x"] * 19 + ["text"], [True] * 10), "got str as image 19"),
        (([b"x"] * 19 + [np.zeros(3, bool)], [True] * 10), "got an array as image 19"),
        (([b"x"] * 19 + [np.zeros((2, 2), np.uint8)], [True] * 10), "one axis"),
        (([b"x"] * 19 + [np.zeros(2, np.float32)], [True] * 10), "an array of f4"),
        (([b"x"] * 19 + [np.array([os], object)[:0]], [True] * 10), "an array of O8"),
        ((b"xx", [True]), "got bytes as images"),
        ([b"x", b"y", b"z"], "got list"),
        ({"bins": [b"x"] * 20, "same": [True] * 10}, "EMPTY_DICT"),
        (7, "got int"),
        ({1, 2}, r"builtins\.set"),
        (1.5, "BINFLOAT"),
    ],
)
def test_content_that_is_no_set(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"a\.bin: .*{message}"):
        VerificationSet(put(tmp_path / "a.bin", content))


class Attack:
    def __init__(self, call: object, *args: object) -> None:
        self.step = (call, args)

    def __reduce__(self) -> tuple:
        return self.step


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_nothing_in_a_file_is_run(tmp_path: Path, protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "ran"
    monkeypatch.chdir(tmp_path)
    attacks = [
        Attack(os.system, f"touch {mark}"),
        Attack(eval, f"open({str(mark)!r}, 'w')"),
        Attack(exec, f"open({str(mark)!r}, 'w')"),
        Attack(open, str(mark), "w"),
        Attack(__import__, "this"),
        Attack(np.load, str(mark)),
        Attack(bytes, 2**40),
        Attack(bytearray, 2**40),
        Attack(np.zeros, (2**40,)),
        Attack(np.ndarray, (2**40,)),
        Attack(pickle.loads, pickle.dumps(Attack(os.system, f"touch {mark}"))),
    ]
    for attack in attacks:
        for content in (
            attack,
            ([attack] * 20, [True] * 10),
            ([b"x"] * 20, attack),
            ([b"x"] * 20, [True] * 9 + [attack]),
        ):
            with pytest.raises(ValueError, match=r"(nothing in it was run|broken)"):
                read_bin(put(tmp_path / "a.bin", content, protocol))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin"]


@pytest.mark.parametrize(
    "steps",
    [
        b"cos\nsystem\n(S'touch ran'\ntR.",
        b"(S'touch ran'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch ran'\no.",
        b"\x80\x02cos\nsystem\nU\x09touch ran\x85R.",
        b"\x80\x02cos\nsystem\nU\x09touch ran\x85\x81.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x09touch ran\x85R.",
        b"\x80\x02\x82\x01.",  # a registered extension
        b"\x80\x02U\x01xQ.",  # a persistent id
        b"\x80\x02cnumpy\nndarray\n}U\x08__call__K\x01sb.",  # a state for a class
        b"\x80\x02c_codecs\nencode\nN}U\x0c__defaults__K\x01s\x86b.",  # a state for a function
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncos\nsystem\nK\x00\x85U\x01b\x87R.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
        b"\x80\x02c__builtin__\nbytes\nM\xff\xff\x85R.",
    ],
)
def test_hand_made_steps_are_refused(tmp_path: Path, steps: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    list(pickletools.genops(steps))  # well formed
    Path("a.bin").write_bytes(steps)
    with pytest.raises(ValueError, match=r"a\.bin"):
        read_bin("a.bin")
    assert not Path("ran").exists()


def test_one_text_converted_over_and_over_is_refused(tmp_path: Path) -> None:
    """A small file that would become a large list: each conversion makes bytes anew."""
    text = b"X" + struct.pack("<I", 10**6) + b"a" * 10**6
    start = b"\x80\x02c_codecs\nencode\nq\x00" + text + b"X\x06\x00\x00\x00latin1\x86q\x01]("
    (tmp_path / "a.bin").write_bytes(start + b"h\x00h\x01R" * 10**4 + b"e.")
    with pytest.raises(ValueError, match="more bytes than the file holds"):
        read_bin(tmp_path / "a.bin")


def test_cut_short_at_every_byte(tmp_path: Path) -> None:
    images = [np.frombuffer(b"image", np.uint8), b"other", b"x", b"y"]
    text = python2_text([b"a", b"b\n"], b"(lI01\na")
    for content in (pickle.dumps((images, [True, False]), 2), python2([b"a", b"b"], [True]), text):
        for size in range(len(content)):
            (tmp_path / "a.bin").write_bytes(content[:size])
            with pytest.raises(ValueError, match="broken or not"):
                read_bin(tmp_path / "a.bin")


def test_arguments(tmp_path: Path) -> None:
    path = put(tmp_path / "a.bin", ([b"x"] * 4, [True, False]))
    assert VerificationSet(path, folds=2).pairs.num_folds == 2
    with pytest.raises(ValueError, match="folds=0"):
        VerificationSet(path, folds=0)
    with pytest.raises(ValueError, match=r"image 0 \(pair 0\): broken"):
        VerificationSet(path, folds=2)[0]
    with pytest.raises(FileNotFoundError):
        VerificationSet(tmp_path / "none.bin")
