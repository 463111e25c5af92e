"""Tar shards: archives of other writers, damaged ones, and what is wrong in one is named."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from plsc.data import (
    TarShards,
)
from plsc.data.tar import TarWriter

from .contents import jpeg, pack


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_other_writers(tmp_path: Path, form: int) -> None:
    long = "d" * 90 + "/" + "k" * 80
    path = pack(
        tmp_path / "x.tar",
        ("README.txt", b"not a sample"),
        ("a/1.jpg", jpeg(1)),
        ("a/1.cls", b"3\n"),
        (f"{long}.cls", b"0"),
        (f"{long}.jpg", jpeg(2)),
        ("b/2.seg.png", b"of another kind but an image"),
        ("b/2.json", json.dumps({"label": 1, "text": "x" * 3000}).encode()),
        ("b/2.txt", b"words"),
        form=form,
    )
    data = TarShards(path, image_size=8)
    assert data.labels.tolist() == [3, 0, 1] and data.num_classes == 4
    assert data.encoded(0) == jpeg(1) and data.encoded(1) == jpeg(2) and data.name(1) == f"{long}.jpg"


def test_shards_in_order_of_their_names(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        pack(tmp_path / f"s-{number:03d}.tar", ("0.jpg", jpeg(number)), ("0.cls", b"%d" % number))
    for path in (tmp_path, tmp_path / "s-*.tar", tmp_path / "s-0[01]?.tar"):
        assert TarShards(path).labels.tolist() == [1, 2, 10]
    with pytest.raises(ValueError, match=r"no \.tar files"):
        TarShards(tmp_path / "t-*.tar")


def linked(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("a.jpg")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


SAMPLE = (("a.jpg", jpeg(0)), ("a.cls", b"0"))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ((*SAMPLE, ("/etc/b.jpg", b"x")), "/etc/b.jpg leads out of the archive"),
        ((*SAMPLE, ("x/../../b.jpg", b"x")), "leads out of the archive"),
        ((*SAMPLE, linked(tarfile.SYMTYPE)), "a.jpg is a link, expected plain files"),
        ((*SAMPLE, linked(tarfile.LNKTYPE)), "a.jpg is a link"),
        ((*SAMPLE, linked(tarfile.FIFOTYPE)), "a.jpg is a pipe"),
        ((("a.jpg", b"x"),), "a has no label"),
        ((("a.cls", b"1"),), "a has no image"),
        ((("a.jpg", b"x"), ("b.jpg", b"x"), ("a.cls", b"1")), "a has no label"),
        ((("a.jpg", b"x"), ("a.png", b"x"), ("a.cls", b"1")), "a has two images"),
        ((("a.jpg", b"x"), ("a.cls", b"Anna")), "got b'Anna' as the label in a.cls"),
        ((("a.jpg", b"x"), ("a.cls", b"-2")), "got b'-2' as the label"),
        ((("a.jpg", b"x"), ("a.json", b'{"label": true}')), "got True as the label"),
        ((("a.jpg", b"x"), ("a.json", b"[1]")), "got None as the label"),
        ((("a.jpg", b"x"), ("a.json", b"{")), "as the label in a.json"),
        ((("a.jpg", b"x"), ("a.cls", b"-1")), "every label is -1"),
        ((("a.txt", b"x"),), "no samples"),
    ],
)
def test_what_is_wrong_in_a_tar_is_named(tmp_path: Path, members: tuple, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        TarShards(pack(tmp_path / "x.tar", *members))
    assert words in str(caught.value) and "x.tar" in str(caught.value)


def test_truncated_damaged_and_compressed_tars(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", *SAMPLE)
    whole = path.read_bytes()
    end = 2 * 512 + -(-len(jpeg(0)) // 512) * 512  # of the label's header
    for cut in range(1, end, 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"x\.tar: (the file ends|a has no label|no samples)"):
            TarShards(path)
    path.write_bytes(whole[:600] + b"\1" * 20 + whole[620:])
    assert TarShards(path).labels.tolist() == [0]  # the image's bytes: found when it is decoded
    for at in (0, 100, 124, 150):
        path.write_bytes(whole[:at] + b"\xfe" + whole[at + 1 :])
        with pytest.raises(ValueError, match="no tar header at byte 0"):
            TarShards(path)
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))
    with pytest.raises(ValueError, match="is compressed"):
        TarShards(path)
    path.write_bytes(whole)
    data = TarShards(path)
    path.write_bytes(whole[:700])
    with pytest.raises(ValueError, match="changed or is cut short"):
        data[0]


def test_random_damage_to_tars_is_an_error_or_nothing(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", *SAMPLE, ("d/" + "n" * 150 + ".jpg", b"x"), ("d/" + "n" * 150 + ".cls", b"7"))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(0, len(data) // 2, 3).tolist():
            data[at] = int(rng.integers(256))
        path.write_bytes(data[: int(rng.integers(len(data)))] if rng.random() < 0.3 else data)
        try:
            found = TarShards(path)
        except ValueError:
            continue
        assert all(found.encoded(i) is not None for i in range(len(found)))


def test_a_tar_writer_leaves_nothing_after_an_error(tmp_path: Path) -> None:
    def twice() -> None:
        with TarWriter(tmp_path / "x-{}.tar", max_bytes=600) as tar:
            for _ in range(2):
                tar.write("a/1", ".jpg", 0, jpeg(0))

    with pytest.raises(ValueError, match="twice"):
        twice()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no dot"), TarWriter(tmp_path / "x.tar") as tar:
        tar.write("a/1.2", ".jpg", 0, jpeg(0))
    with TarWriter(tmp_path / "x-{}.tar", max_bytes=2000) as tar:
        for k in range(5):
            tar.write(f"a/{k}", ".jpg", 0, jpeg(k))
    assert len(list(tmp_path.iterdir())) > 2 and len(TarShards(tmp_path)) == 5
