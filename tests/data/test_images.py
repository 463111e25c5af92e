"""Image folders and archives: same samples, order, names of what is wrong."""

import errno
import logging
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from plsc.data import ImageFolder, ImageList, Loader, images
from plsc.data.images import PackedStrings

from .pictures import FILES, picture, samples


def test_folder_is_sorted_by_class_then_file(folder: Path) -> None:
    dataset = ImageFolder(folder, image_size=16)
    assert list(dataset.class_names) == ["Z", "a b", "b"] and dataset.num_classes == 3
    assert [dataset.name(i) for i in range(6)] == [
        "Z/u.bmp",
        "Z/é.jpeg",
        "a b/x.PNG",
        "a b/y.webp",
        "b/10.jpg",
        "b/2.png",
    ]
    assert dataset.labels.dtype == np.int64 and dataset.labels.tolist() == [0, 0, 1, 1, 2, 2]
    image, label = dataset[5]
    assert label == 2 and image.dtype == np.uint8
    assert (image == np.asarray(picture(0))).all()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("above", ["", "lfw/112/"])
def test_zip_gives_the_samples_of_the_folder(folder: Path, tmp_path: Path, method: int, above: str) -> None:
    path = tmp_path / "faces.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in FILES:
            archive.write(folder / name, above + name)
        archive.writestr("__MACOSX/b/._2.png", b"")
        archive.writestr("README.txt", b"")
    plain, packed = ImageFolder(folder, image_size=16), ImageFolder(path, image_size=16)
    assert samples(plain) == samples(packed)
    assert [plain.name(i) for i in range(6)] == [packed.name(i) for i in range(6)]
    assert samples(pickle.loads(pickle.dumps(packed))) == samples(plain)


def test_a_failing_disk_is_told_and_survived(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk that answers EIO for one file."""
    dataset, read = ImageFolder(folder, image_size=16), os.pread
    bad = os.stat(folder / dataset.name(2)).st_ino

    def fail(number: int, *args: int) -> bytes:
        if os.fstat(number).st_ino == bad:
            raise OSError(errno.EIO, "Input/output error")
        return read(number, *args)

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ValueError, match=r"sample 2 \(.*\) cannot be read: OSError: .*Input/output error"):
        list(Loader(dataset, 6).epochs(1))
    loader = Loader(dataset, 6, on_bad_image="redraw")
    assert sum(len(labels) for _, labels in loader.epochs(1)) == 6 and loader.num_bad >= 1


def test_folders_without_images(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a folder or a \.zip"):
        ImageFolder(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    (empty / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="no images found"):
        ImageFolder(empty)
    with pytest.raises(ValueError, match="no images found"):
        ImageFolder(folder / "b")  # a class folder given as root
    (folder / "c").mkdir()
    with pytest.raises(ValueError, match="1 class folders hold no images: c"):
        ImageFolder(folder)


def test_archives_of_another_layout(tmp_path: Path) -> None:
    def pack(*names: str) -> Path:
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            for name in names:
                archive.writestr(name, b"")
        return tmp_path / "x.zip"

    with pytest.raises(ValueError, match="lies in no class folder"):
        ImageFolder(pack("a.jpg"))
    with pytest.raises(ValueError, match=r"2 places \(train, val\)"):
        ImageFolder(pack("train/a/1.jpg", "val/a/1.jpg"))
    with pytest.raises(ValueError, match="no images found"):
        ImageFolder(pack("a/readme.txt"))


@pytest.mark.parametrize(
    ("names", "outcome"),
    [
        (["a/1.jpg", ".git/2.jpg", ".h/b/3.jpg", "b/.x.jpg", "b/4.jpg"], ["a/1.jpg", "b/4.jpg"]),
        (["a/1.jpg", "b/"], "1 class folders hold no images: b"),
        (["a/1.jpg", "b/notes.txt"], "1 class folders hold no images: b"),
        (["a/1.jpg", "a/notes.txt", "notes.txt"], ["a/1.jpg"]),
    ],
)
def test_folder_and_archive_have_one_rule(tmp_path: Path, names: list[str], outcome: list[str] | str) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive, zipfile.ZipFile(tmp_path / "y.zip", "w") as deeper:
        for name in names:
            archive.writestr(name, b"")
            deeper.writestr(f"set/112/{name}", b"")
    zipfile.ZipFile(tmp_path / "x.zip").extractall(tmp_path / "x")
    for name in ("x", "x.zip", "y.zip"):
        if isinstance(outcome, str):
            with pytest.raises(ValueError, match=outcome):
                ImageFolder(tmp_path / name)
        else:
            found = ImageFolder(tmp_path / name)
            assert [found.name(i) for i in range(len(found))] == outcome


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for content in (b"1", b"2"):
            archive.writestr("a/1.jpg", content)
    with pytest.raises(ValueError, match=r"a/1\.jpg is there more than once"):
        ImageFolder(tmp_path / "x.zip")


@pytest.mark.parametrize("honest", [True, False])
def test_archive_members_that_unpack_to_gigabytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, honest: bool
) -> None:
    """One that says its size, and one whose directory says less than it holds: no more is unpacked than that."""
    monkeypatch.setattr(images, "_MOST_BYTES", 2**20)
    path, size = tmp_path / "x.zip", 2**20 + 1 if honest else 2**28 + 12345
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "b/2.png", "a/0.png")
        archive.writestr("a/1.png", bytes(size))
    if not honest:
        data = path.read_bytes()
        assert data.count(struct.pack("<I", size)) == 2  # the member's own header, and the directory
        path.write_bytes(data.replace(struct.pack("<I", size), struct.pack("<I", 1000)))
    dataset = ImageFolder(path, image_size=16)
    assert dataset[0][0].shape == (16, 16, 3)
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than the 1048576" if honest else "size or checksum of the member"):
        dataset[1]
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_damaged_archive_member(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "faces.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "b/2.png", "b/2.png")
    dataset = ImageFolder(path, image_size=16)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        dataset[0]
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="no member at byte 0"):
        dataset[0]


@pytest.mark.parametrize("damage", ["cut", "text"])
def test_broken_image_is_named(folder: Path, damage: str) -> None:
    for name in ("b/2.png", "b/10.jpg"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2] if damage == "cut" else b"hello")
    dataset = ImageFolder(folder, image_size=16)
    for i in (4, 5):
        with pytest.raises(ValueError, match=f"{dataset.name(i)}: broken"):
            dataset[i]


def test_sizes_and_channels(folder: Path) -> None:
    colour = ImageFolder(folder, image_size=8)[0][0]
    grey = ImageFolder(folder, image_size=24, channels=1)[0][0]
    assert colour.shape == (8, 8, 3) and grey.shape == (24, 24, 1)
    for kwargs in ({"channels": 2}, {"image_size": 0}):
        with pytest.raises(ValueError, match=r"got (channels|image_size)"):
            ImageFolder(folder, **kwargs)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """Bytes of file names survive, whatever their encoding; they show with escapes."""
    root = os.fsencode(tmp_path / "faces")
    for name in (b"caf\xe9", b"plain"):
        os.makedirs(os.path.join(root, name))
        picture(1).save(os.fsdecode(os.path.join(root, name, b"\xff1.png")))
    dataset = ImageFolder(tmp_path / "faces", image_size=16)
    assert [dataset[i][1] for i in range(2)] == [0, 1] and os.fsencode(dataset.name(0)) == b"caf\xe9/\xff1.png"
    (tmp_path / "list.txt").write_bytes(b"caf\xe9/\xff1.png 3\n")
    assert ImageList(tmp_path / "list.txt", root=tmp_path / "faces", image_size=16)[0][1] == 3


def test_a_folder_that_changes_while_it_is_read(folder: Path) -> None:
    dataset = ImageFolder(folder, image_size=16)
    (folder / "b" / "new.png").write_bytes(b"")
    (folder / "b" / "2.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"b/2\.png"):
        dataset[5]
    assert len(dataset) == 6 and dataset[4][1] == 2  # the others are where they were
    loader = Loader(dataset, 6, on_bad_image="redraw")
    ((_, labels),) = loader.epochs(1)
    assert len(labels) == 6 and loader.num_bad == 1


def test_files_of_any_length_are_read_whole(tmp_path: Path) -> None:
    for size in (0, 1, 70_000):
        data = os.urandom(size)
        (tmp_path / "f").write_bytes(data)
        assert images.read_file(str(tmp_path / "f")) == data


def test_thin_classes_are_counted_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "b" / "2.png").unlink()
    with caplog.at_level(logging.WARNING):
        ImageFolder(folder)
    assert "1 of 3 classes have one image only" in caplog.text
    (folder / "list.txt").write_text("b/10.jpg 0\nb/10.jpg 0\nb/10.jpg 123456789012\n")
    with caplog.at_level(logging.WARNING):
        ImageList(folder / "list.txt")
    assert "1 of 123456789013 classes have one image only" in caplog.text
    assert "123456789011 of 123456789013 classes have no image" in caplog.text


def test_packed_strings() -> None:
    words = ["", "é", "abc", ""]
    packed = PackedStrings(word.encode() for word in words)
    assert list(packed) == words and packed[-2] == "abc" and packed[1:3] == ["é", "abc"]
    assert len(PackedStrings([])) == 0
    with pytest.raises(IndexError):
        packed[4]


def test_real_faces(shared: Path) -> None:
    dataset = ImageFolder(shared / "data/faces/lfw112_val.zip")
    assert len(dataset) == 1484 and dataset.num_classes == 500
    assert dataset[0][0].shape == (112, 112, 3)
