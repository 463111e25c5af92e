"""What plsc-data verify finds: broken images, repeats, one picture under two labels, gaps."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc.data import ImageFolder, ImageList
from plsc.data.health import count, verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k in range(9):
        path = tmp_path / f"P{k // 3}" / f"{k}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.random.default_rng(k).integers(0, 256, (8, 6 + k // 8, 3), np.uint8)).save(path)
    return tmp_path


def test_sound_data(folder: Path) -> None:
    report = verify(ImageFolder(folder))
    assert report.sound and report.num_read == 9 and report.sizes == {"6 x 8": 8, "7 x 8": 1}
    text = "\n".join(report.lines())
    assert "9 images, 3 classes; a class has 3 to 3" in text and "nothing that would stop" in text and "PNG RGB" in text


def test_everything_wrong_is_named(folder: Path) -> None:
    shutil.copy(folder / "P0/0.png", folder / "P0/again.png")
    Image.open(folder / "P1/3.png").save(folder / "P2/same.bmp")  # the same pixels in other bytes
    (folder / "P2/8.png").write_bytes((folder / "P2/8.png").read_bytes()[:-40])
    (folder / "P2/9.jpg").write_text("hello")
    report = verify(ImageFolder(folder))
    assert (report.num_broken, report.num_repeats, report.num_conflicts) == (2, 1, 1) and not report.sound
    text = "\n".join(report.lines())
    assert "P2/8.png" in text and "P2/9.jpg" in text and "2 images cannot be read: training draws others" in text
    assert "P0/again.png shows what P0/0.png shows" in text
    assert "P2/same.bmp (label 2) shows what P1/3.png does (label 1)" in text


def test_gaps_single_and_ignored(folder: Path) -> None:
    (folder / "list.txt").write_text("P0/0.png 4\nP0/1.png -1\nP0/2.png 1\nP1/3.png 1\ngone.png 1\n")
    data = ImageList(folder / "list.txt")
    text = "\n".join(count(data).lines())
    assert "1 samples are ignored" in text and "3 labels have no image" in text and "1 classes have one image" in text
    report = verify(data)
    assert report.num_broken == 1 and "line 5" in report.broken[0] and "gone.png" in report.broken[0]


def test_a_limit_looks_at_some(folder: Path) -> None:
    assert verify(ImageFolder(folder), limit=4).num_read == 4


def test_examples_are_few_and_printable(folder: Path) -> None:
    for k in range(30):
        (folder / "P0" / f"bad\n{k:02d}.jpg").write_bytes(b"")
    report = verify(ImageFolder(folder))
    assert report.num_broken == 30 and len(report.broken) == 10
    assert "30 images cannot be read: training stops, it takes 3 of 39" in report.lines()[3]
    assert all(line.isprintable() for line in report.lines()) and "... and 20 more" in "\n".join(report.lines())


def test_modes_and_rotation_at_their_own_size(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (10, 20)).save(file, "JPEG", exif=exif)
    (tmp_path / "a/1.jpg").write_bytes(file.getvalue())
    report = verify(ImageFolder(tmp_path))
    assert report.sizes == {"20 x 10": 1} and report.kinds == {"JPEG L": 1}


def test_jpegs_that_libjpeg_warns_of_are_listed(tmp_path: Path) -> None:
    """Lost pixels are a broken image; bytes too many before the end mark, which sound files have, too, are shown."""
    pytest.importorskip("simplejpeg")
    (tmp_path / "a").mkdir()
    for k in range(3):
        file = io.BytesIO()
        pixels = np.random.default_rng(k).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).resize((64, 64)).save(file, "JPEG")
        data = file.getvalue()
        damaged = [data, data[:-2] + b"abcdef" + data[-2:], data[: 2 * len(data) // 3] + data[-2:]][k]
        (tmp_path / f"a/{k}.jpg").write_bytes(damaged)
    report = verify(ImageFolder(tmp_path))
    assert (report.num_odd, report.num_broken) == (1, 1) and not report.sound
    assert "a/1.jpg" in report.odd[0] and "extraneous" in report.odd[0]
    assert "a/2.jpg" in report.broken[0] and "damaged JPEG (Corrupt JPEG data: premature end" in report.broken[0]
    (tmp_path / "a/2.jpg").unlink()
    text = "\n".join(verify(ImageFolder(tmp_path)).lines())
    assert "1 JPEGs are decoded with a warning" in text and "nothing that would stop" not in text
