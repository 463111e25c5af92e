"""Image folders, archives and lists: same samples, order, names of what is wrong."""

import errno
import io
import logging
import os
import pickle
import random
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc.data import ImageFolder, ImageList, Loader, images
from plsc.data.images import PackedStrings, decode_image

FILES = ["b/2.png", "b/10.jpg", "a b/x.PNG", "a b/y.webp", "Z/u.bmp", "Z/é.jpeg"]


def picture(seed: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "faces"
    names = FILES.copy()
    random.Random(0).shuffle(names)  # made in an order that is not the sorted one
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(FILES.index(name)).save(root / name)
    (root / "README.txt").write_text("not a class")
    (root / "b" / "notes.txt").write_text("not an image")
    (root / "b" / "._2.png").write_bytes(b"left by an archiver")
    (root / ".hidden").mkdir()
    return root


def samples(dataset: ImageFolder | ImageList) -> list[tuple[bytes, int]]:
    return [(dataset[i][0].tobytes(), dataset[i][1]) for i in range(len(dataset))]


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


def test_list_gives_the_samples_of_the_folder(folder: Path, tmp_path: Path) -> None:
    dataset = ImageFolder(folder, image_size=16)
    lines = [f"{dataset.name(i)}{' ' if i % 2 else chr(9)}{dataset.labels[i]}" for i in range(6)]
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([lines[0], "", *lines[1:], "  ", ""]).encode())
    listed = ImageList(path, root=folder, image_size=16)
    assert samples(listed) == samples(dataset) and listed.num_classes == 3
    assert [listed.name(i) for i in range(6)] == [dataset.name(i) for i in range(6)]
    assert [listed.line(i) for i in range(6)] == [1, 3, 4, 5, 6, 7]
    assert samples(pickle.loads(pickle.dumps(listed))) == samples(dataset)


def test_list_keeps_its_order_and_its_own_folder(folder: Path) -> None:
    path = folder / "list.txt"
    path.write_text("b/2.png 7\nZ/u.bmp -1\n b/10.jpg \t 7 \n")
    dataset = ImageList(path, image_size=16)
    assert dataset.labels.tolist() == [7, -1, 7] and dataset.num_classes == 8
    assert [dataset.name(i) for i in range(3)] == ["b/2.png", "Z/u.bmp", "b/10.jpg"]
    assert ImageList(path, image_size=16, num_classes=100).num_classes == 100
    with pytest.raises(ValueError, match=r"num_classes=7, .* label 7: give at least 8"):
        ImageList(path, num_classes=7)


@pytest.mark.parametrize(
    "line",
    ["a.jpg 1.5", "a.jpg -2", "a.jpg", "7", "a.jpg Anna", "a.jpg,3", "a.jpg 1_0", "a.jpg +1", "a.jpg " + "9" * 30],
)
def test_list_names_the_wrong_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "list.txt"
    path.write_text(f"a.jpg 0\n\n{line}\n")
    with pytest.raises(ValueError, match=r"list\.txt, line 3: got '.*expected `path label`"):
        ImageList(path)


def test_list_names_the_line_of_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("\n\na.jpg 0\n\nb c.jpg 1\n")
    dataset = ImageList(path)
    with pytest.raises(ValueError, match=r"line 5: cannot read .*b c\.jpg \(No such file.*; check data.root"):
        dataset[1]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.lst", ["1\tb/2.png\t7\t10\t10\t90\t90", "0\tb c/10.jpg\t-1"]),  # aligned, path, label, box
        ("a.tsv", ["idx\tpath\tlabel", "5\tb/2.png\t7", "", "9\tb c/10.jpg\t-1"]),
        ("a.lst", ["17\t7.000000\tb/2.png", "3\t-1\tb c/10.jpg"]),  # im2rec: number, label, path
        ("a.lst", ["17\t7\t0.25\t3\tb/2.png", "3\t-1.0\t0.5\t4\tb c/10.jpg"]),  # several labels
        ("a.lst", ["b/2.png\t7", "b c/10.jpg -1"]),  # a plain list of that name
    ],
)
def test_tables_of_others(tmp_path: Path, name: str, lines: list[str]) -> None:
    for end in ("\n", "\r\n"):
        (tmp_path / name).write_text("\ufeff" + end.join(lines) + end, encoding="utf-8", newline="")
        found = ImageList(tmp_path / name)
        assert [found.name(i) for i in range(2)] == ["b/2.png", "b c/10.jpg"]
        assert found.labels.tolist() == [7, -1] and found.line(1) == len(lines)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1\t2.5\tb.png", "number TAB label TAB path"),
        ("1\tAnna\tx", "number TAB label TAB path"),
        ("1\tb.png\tAnna", "number TAB path TAB label"),
        ("1\tb.png", "number TAB path TAB label"),
        ("junk", "number TAB path TAB label"),
    ],
)
def test_tables_name_the_wrong_line(tmp_path: Path, line: str, expected: str) -> None:
    first = "1\t3\ta" if expected.endswith("path") else "1\ta.jpg\t0"
    (tmp_path / "x.lst").write_text(f"{first}\n{line}\n")
    with pytest.raises(ValueError, match=f"x.lst, line 2: got '.*expected `{expected}`"):
        ImageList(tmp_path / "x.lst")


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


def test_lists_without_content(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    with pytest.raises(ValueError, match="expected a text file"):
        ImageList(path)
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="no lines"):
        ImageList(path)
    path.write_text("a.jpg -1\n")
    with pytest.raises(ValueError, match="every label is -1"):
        ImageList(path)
    assert ImageList(path, num_classes=3).num_classes == 3
    with pytest.raises(ValueError, match="relative paths start"):
        ImageList(path, root=tmp_path / "nowhere")


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


def test_decoding_of_other_modes(tmp_path: Path) -> None:
    def encoded(image: Image.Image, name: str) -> bytes:
        image.save(tmp_path / name)
        return (tmp_path / name).read_bytes()

    base = picture(0, (64, 64))
    for mode in ("L", "P", "RGBA", "1"):
        assert decode_image(encoded(base.convert(mode), f"{mode}.png"), 64).shape == (64, 64, 3)
    assert decode_image(encoded(base.convert("CMYK"), "c.jpg"), 64).shape == (64, 64, 3)
    deep = encoded(Image.fromarray(np.full((8, 8), 40_000, np.uint16)), "deep.png")
    assert (decode_image(deep, 8) == 40_000 >> 8).all() and (decode_image(deep, 8, 1) == 40_000 >> 8).all()
    with pytest.raises(ValueError, match="broken or unknown"):
        decode_image(encoded(base, "a.gif"), 64)
    # A large JPEG is decoded at a reduced scale: close to the full way.
    smooth = Image.fromarray(np.linspace(0, 255, 256, dtype=np.uint8)[None].repeat(256, 0)).convert("RGB")
    small = decode_image(encoded(smooth, "s.jpg"), 32).astype(int)
    assert abs(small - np.asarray(smooth.resize((32, 32), Image.Resampling.BOX)).astype(int)).max() <= 4


def saved(image: Image.Image, kind: str, *, orientation: int = 0, quality: int = 95) -> bytes:
    file = io.BytesIO()
    if orientation:
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(file, kind, exif=exif, quality=quality)
    else:
        image.save(file, kind, quality=quality)
    return file.getvalue()


def test_alpha_is_laid_on_black() -> None:
    pixels = np.full((4, 4, 4), 200, np.uint8)
    pixels[:, 0, 3], pixels[:, 1, 3] = 0, 255
    found = decode_image(saved(Image.fromarray(pixels), "PNG"), 4)
    assert (found[:, 0] == 0).all() and (found[:, 1] == 200).all() and abs(found[:, 2:].astype(int) - 157).max() <= 1
    grey = Image.fromarray(pixels).convert("LA")
    assert (decode_image(saved(grey, "PNG"), 4, 1)[:, 0] == 0).all()
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 250, 10, 10])
    palette.info["transparency"] = 1
    file = io.BytesIO()
    palette.save(file, "PNG", transparency=1)
    assert (decode_image(file.getvalue(), 4) == 0).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(kind: str, orientation: int) -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16, :16] = 240  # the upper left quarter is white, in the file
    found = decode_image(saved(Image.fromarray(pixels), kind, orientation=orientation), 32)
    row, column = [(0, 0), (0, 1), (1, 1), (1, 0), (0, 0), (0, 1), (1, 1), (1, 0)][orientation - 1]
    quarter = found[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
    assert quarter.mean() > 230 and found.mean() < 70


def test_damaged_exif_costs_no_image() -> None:
    data = saved(picture(0), "JPEG", orientation=6).replace(b"Exif\0\0MM", b"Exif\0\0XX").replace(b"\0\0II", b"\0\0XX")
    assert decode_image(data, 16).shape == (16, 16, 3)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_both_jpeg_decoders_give_the_same(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    noise = saved(picture(1, (112, 112)).convert(mode), "JPEG", quality=80)
    fast = decode_image(noise, 112)
    assert images._decode_jpeg(noise, 112) is not None
    monkeypatch.setattr(images, "_simplejpeg", lambda: None)
    assert abs(fast.astype(int) - decode_image(noise, 112)).max() <= 2
    for cut in (2, 3, 20, 200, len(noise) // 2, len(noise) - 30):  # whether a damaged one passes, too
        for absent in (True, False):
            if not absent:
                monkeypatch.undo()
            with pytest.raises(ValueError, match=r"a\.jpg: broken"):
                decode_image(noise[:cut], 112, name="a.jpg")
            monkeypatch.setattr(images, "_simplejpeg", lambda: None)


def test_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = saved(Image.new("L", (3000, 3000)), "PNG")
    assert len(bomb) < 20_000
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8_000_000)
    for kind in ("always", "error"):
        with warnings.catch_warnings(), pytest.raises(ValueError, match=r"b\.png: broken .*(3000 x 3000|9000000)"):
            warnings.simplefilter(kind)  # type: ignore[arg-type]
            decode_image(bomb, 112, name="b.png")


@pytest.mark.parametrize("data", [b"", b"\0" * 1000, b"hello", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_image_is_named(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"x\.jpg: broken or unknown image"):
        decode_image(data, 112, name="x.jpg")


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


def test_index_takes_few_bytes_an_image(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("".join(f"{i // 10:08d}/{i:08d}.jpg {i // 10}\n" for i in range(5000)))
    assert len(pickle.dumps(ImageList(path))) < 5000 * (21 + 16 + 2) + 2000


def test_real_faces(shared: Path) -> None:
    dataset = ImageFolder(shared / "data/faces/lfw112_val.zip")
    assert len(dataset) == 1484 and dataset.num_classes == 500
    assert dataset[0][0].shape == (112, 112, 3)
