"""Image folders, archives and lists: same samples, order, names of what is wrong."""

import errno
import io
import logging
import os
import pickle
import random
import struct
import tracemalloc
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc.data import ImageFolder, ImageList, Loader, decoding, images
from plsc.data.decoding import decode_image
from plsc.data.images import PackedStrings

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
    with pytest.raises(ValueError, match=rf"no file of the list was found, such as {tmp_path}/a.jpg; check data.root"):
        dataset[1]
    (tmp_path / "a.jpg").write_bytes(b"")
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


def test_a_list_of_wrong_paths_is_told_in_one_sentence(tmp_path: Path) -> None:
    """Though one sample after another is drawn: nothing is advised that is on already, the reason is given once."""
    path = tmp_path / "list.txt"
    path.write_text("".join(f"gone/{k}.jpg {k % 4}\n" for k in range(300)))
    with pytest.raises(ValueError, match="none of 101 samples drawn in turn") as caught:
        next(Loader(ImageList(path), 4, on_bad_image="redraw").epochs(1))
    text = str(caught.value)
    assert "on_bad_image" not in text and text.count("no file of the list was found") == 1 and "data.root" in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"a.jpg\0x 0", "byte of value 0 within it"),
        (b"train\t0\t123\t4", "TFRecord shards"),
    ],
)
def test_lists_that_no_file_can_be_meant_by(tmp_path: Path, line: bytes, words: str) -> None:
    (tmp_path / "list.txt").write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=rf"list\.txt, line 1: got a .*{words}"):
        ImageList(tmp_path / "list.txt")


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


def png(pixels: np.ndarray, depth: int, clear: list[int]) -> bytes:
    """A PNG by its specification: grey [H, W] or colour [H, W, 3] of `depth` bits, one value of which is clear."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    kind = 2 if pixels.ndim == 3 else 0
    numbers = pixels.reshape(len(pixels), -1)
    bits = (numbers[:, :, None] >> np.arange(depth)[::-1]) & 1  # the highest first
    rows = np.packbits(bits.reshape(len(pixels), -1).astype(np.uint8), axis=1)
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], depth, kind, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    parts = [(b"IHDR", head), (b"tRNS", struct.pack(f">{len(clear)}H", *clear)), (b"IDAT", body), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("depth", "colours"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 3), (16, 3)])
def test_the_one_clear_colour_of_a_png_is_laid_on_black(depth: int, colours: int, channels: int) -> None:
    most = 2**depth - 1
    pixels = np.random.default_rng(depth).integers(1, most + 1, (8, 8, colours))
    pixels[2, 3] = pixels[5, 1] = clear = (most * np.array([60, 50, 40])[:colours] // 60).tolist()
    wanted = pixels >> 8 if depth == 16 else pixels * 255 // most
    if colours == 1:
        wanted = np.repeat(wanted, 3, 2)
    wanted[(pixels == clear).all(2)] = 0
    if channels == 1:
        wanted = np.asarray(Image.fromarray(wanted.astype(np.uint8)).convert("L"))[:, :, None]
    found = decode_image(png(pixels.squeeze(2) if colours == 1 else pixels, depth, clear), 8, channels)
    assert (found == wanted).all() and (found[[2, 5], [3, 1]] == 0).all()


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
    assert decoding._decode_jpeg(noise, 112, "a") is not None
    monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
    assert abs(fast.astype(int) - decode_image(noise, 112)).max() <= 2
    for cut in (2, 3, 20, 200, len(noise) // 2, len(noise) - 30):  # whether a damaged one passes, too
        for absent in (True, False):
            if not absent:
                monkeypatch.undo()
            with pytest.raises(ValueError, match=r"a\.jpg: broken"):
                decode_image(noise[:cut], 112, name="a.jpg")
            monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)


@pytest.mark.parametrize("size", [(112, 112), (500, 500), (224, 225), (300, 701), (120, 118), (30, 40), (1000, 900)])
@pytest.mark.parametrize("kind", [{}, {"progressive": True}, {"subsampling": 0}])
def test_jpegs_of_other_sizes_are_scaled_alike_by_both(
    size: tuple[int, int], kind: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("simplejpeg")
    file = io.BytesIO()
    picture(5, (size[0] // 8, size[1] // 8)).resize(size).save(file, "JPEG", quality=85, **kind)
    fast = decode_image(file.getvalue(), 112).astype(int)
    monkeypatch.setattr(decoding, "_simplejpeg", lambda: None)
    assert abs(fast - decode_image(file.getvalue(), 112)).max() <= 2


def lossy(damage: str, **how: int) -> bytes:
    """A JPEG whose scan lost bytes, or has some too many; its frame is whole."""
    data = saved(picture(3, (8, 8)).resize((64, 64)), "JPEG", **how)
    scan = data.index(b"\xff\xda") + 14
    middle = scan + (len(data) - scan) // 3
    return {
        "cut": data[:middle] + data[-2:],  # two thirds are missing, the end mark is there
        "lost": data[:middle] + data[middle + 512 :],
        "none": data,
        "padded": data[:-2] + b"\1\2\3\4\5" + data[-2:],
        "followed": data + b"a maker's note",
        "revision": data.replace(b"JFIF\0\1", b"JFIF\0\7"),
    }[damage]


@pytest.mark.parametrize("orientation", [0, 6])  # without and with EXIF data: simplejpeg or Pillow decodes
@pytest.mark.parametrize("size", [64, 20])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpegs_that_lost_pixels_are_refused(orientation: int, size: int, channels: int) -> None:
    """libjpeg fills what is missing with grey and warns; what it warns of without losing pixels still loads."""
    pytest.importorskip("simplejpeg")
    whole = decode_image(lossy("none", orientation=orientation), size, channels)
    for damage in ("cut", "lost"):
        with pytest.raises(ValueError, match=r"a\.jpg: damaged JPEG \(Corrupt JPEG data: .*fetch"):
            decode_image(lossy(damage, orientation=orientation), size, channels, name="a.jpg")
    for oddity in ("padded", "followed", "revision"):
        assert (decode_image(lossy(oddity, orientation=orientation), size, channels) == whole).all()


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
