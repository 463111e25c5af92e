"""datasets/*/prepare.py on small inputs made here: each ends in something the library opens. Nothing is fetched."""

import io
import json
import lzma
import runpy
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc.data import ImageFolder, ImageList, convert, open_images
from plsc.train.export import export_embeddings

ROOT = Path(__file__).resolve().parents[1] / "datasets"


def picture(seed: int, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 20, 3), np.uint8)).save(file, kind)
    return file.getvalue()


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    for k in range(6):
        path = tmp_path / "faces" / f"P{k // 3}" / f"P{k // 3}_{k % 3 + 1:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(k))
    return tmp_path / "faces"


def prepare(name: str, *args: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, args)])
    runpy.run_path(str(ROOT / name / "prepare.py"), run_name="__main__")


@pytest.mark.parametrize("folder", sorted(path for path in ROOT.iterdir() if path.is_dir()), ids=lambda path: path.name)
def test_each_has_a_page_and_a_program(folder: Path) -> None:
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert page.startswith("# ") and (folder / "prepare.py").is_file()


def test_omniglot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives = []
    for name, characters in (("a.zip", (1, 2)), ("b.zip", (2, 3))):
        archives.append(tmp_path / name)
        with zipfile.ZipFile(archives[-1], "w") as archive:
            for character in characters:
                for drawing in (1, 2):
                    member = f"{name[0]}/Greek/character{character:02d}/{character:04d}_{drawing:02d}.png"
                    archive.writestr(member, picture(character, "PNG"))
    prepare("omniglot", *archives, tmp_path / "x.tar", monkeypatch=monkeypatch)
    found = open_images(tmp_path / "x.tar")
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2] and found.name(0) == "Greek_character01/0001_01.png"


def test_omniglot_held_out_alphabets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for k, alphabet in enumerate(("Greek", "Latin", "Greek", "Korean")):
            for drawing in (1, 2):
                archive.writestr(f"a/{alphabet}/character{k:02d}/{k:04d}_{drawing:02d}.png", picture(k, "PNG"))
    train, test = tmp_path / "new/train.rec", tmp_path / "new/test.tar"
    args = (tmp_path / "a.zip", train, "--test", test, "--held-out", "Greek", "Korean")
    prepare("omniglot", *args, monkeypatch=monkeypatch)
    assert open_images(train).labels.tolist() == [0, 0] and open_images(test).labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert open_images(test).name(0) == "Greek_character00/0000_01.png"


def glyphs48(folder: Path, codes: list[int], designs: list[int]) -> np.ndarray:
    """The files of glyphs48: noise for each code point and design."""
    pixels = np.random.default_rng(0).integers(0, 2, (len(codes), 48, 48), np.uint8)
    folder.mkdir()
    arrays = {
        "img": np.packbits(pixels.reshape(len(codes), -1), axis=1),
        "cp": np.array(codes, np.uint32),
        "design": np.array(designs, np.uint8),
    }
    for name, array in arrays.items():
        with lzma.open(folder / f"glyphs48_train_{name}.npy.xz", "wb") as file:
            np.save(file, array)
    (folder / "glyphs48.json").write_text(json.dumps({"designs": [["Sans", "a"], ["Serif", "b"], ["Kai", "c"]]}))
    return pixels


def test_glyphs66k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    codes = [code for code in range(0x4E00, 0x4E08) for _ in range(3)]
    pixels = glyphs48(tmp_path / "source", codes, [0, 1, 2] * 8)
    train, test = tmp_path / "train.rec", tmp_path / "test.tar"
    args = (tmp_path / "source", train, test, "--held-out", 3, "--gallery", "Serif")
    prepare("glyphs66k", *args, monkeypatch=monkeypatch)
    kept, held = open_images(train, image_size=48, channels=1), open_images(test, image_size=48, channels=1)
    assert (len(kept), kept.num_classes, len(held), held.num_classes) == (15, 5, 9, 3)
    assert [held.name(i).rpartition("_")[2] for i in range(3)] == ["Serif.png", "Sans.png", "Kai.png"]
    for i in range(9):  # every picture is the one of its code point and design
        code, design = int(held.name(i)[2:7], 16), ["Sans", "Serif", "Kai"].index(held.name(i)[:-4].rpartition("_")[2])
        assert (held[i][0][:, :, 0] == 255 * pixels[codes.index(code) + design]).all()
    found = set(map(bytes, (kept[i][0] for i in range(15)))) | set(map(bytes, (held[i][0] for i in range(9))))
    assert len(found) == 24
    rows = np.repeat(np.eye(4)[:3], 3, axis=0) + np.array([[0, 0, 0, 0.1], [0, 0, 0, 0], [0.2, 0, 0, 0]] * 3)
    names = [held.name(i) for i in range(9)]
    export_embeddings(tmp_path / "e.safetensors", rows, labels=held.labels, digest="0" * 64, names=names)
    monkeypatch.setattr("sys.argv", ["rank1.py", str(tmp_path / "e.safetensors")])
    capsys.readouterr()
    runpy.run_path(str(ROOT / "glyphs66k" / "rank1.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [[d, "3", "6", "1.0000", "1.0000"] for d in ("Kai", "Sans", "Serif")]
    with pytest.raises(SystemExit):
        prepare("glyphs66k", *args[:-1], "Comic", monkeypatch=monkeypatch)


def test_omniglot_of_real_drawings(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archives = sorted((shared / "data/omniglot").glob("*.zip"))
    prepare("omniglot", *archives, tmp_path / "x.rec", monkeypatch=monkeypatch)
    found = open_images(tmp_path / "x.rec")
    assert len(found) == 242 * 20 and found.num_classes == 242 and found[0][0].shape == (112, 112, 3)


def test_webface42m(faces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    faces.rename(tmp_path / "tree" / "part0")
    prepare("webface42m", tmp_path / "tree", tmp_path / "x-{}.tar", monkeypatch=monkeypatch)
    found = open_images(tmp_path / "x-*.tar")
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1] and found.encoded(4) == picture(4)


def test_lfw(faces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("lfw", faces, tmp_path / "out", "--crop", 10, "--image-size", 16, monkeypatch=monkeypatch)
    found = ImageFolder(tmp_path / "out", image_size=16)
    assert (
        len(found) == 6 and found.name(5) == "P1/P1_0003.jpg" and Image.open(io.BytesIO(found.encoded(0))).width == 16
    )


def test_insightface(
    faces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set").mkdir()
    convert(ImageFolder(faces), tmp_path / "set" / "train.rec")
    (tmp_path / "set" / "property").write_text("2,112,112\n")
    prepare("insightface", tmp_path / "set", monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert (
        "6 images, 2 classes" in out and "property says: 2,112,112" in out and "plsc-train faces --data.kind rec" in out
    )


def test_label_files(
    faces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["P0/P0_0001.jpg\t7", "gone.jpg\t9", "P1/P1_0001.jpg\t3", "P1/P1_0002.jpg\t-1"]
    (tmp_path / "label.txt").write_text("\r\n".join(lines))
    prepare("plsc", tmp_path / "label.txt", tmp_path / "x.txt", "--root", faces, monkeypatch=monkeypatch)
    found = ImageList(tmp_path / "x.txt")
    assert found.labels.tolist() == [1, 0, -1] and found.encoded(0) == picture(0)
    assert "1 files are missing" in capsys.readouterr().out
