"""Pictures of characters: which faces and characters count, what merges, the cache, the split."""

import importlib.util
import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest

from plsc.data import Glyphs, Loader
from plsc.data.fonts import find_fonts, list_faces

pytest.importorskip("fontTools")
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTCollection, TTFont

Box = tuple[int, int, int, int]  # left, bottom, right, top in thousandths of an em
BLANK: list[Box] = []


def boxes(*shape: Box) -> list[Box]:
    return list(shape)


SQUARE, TALL, WIDE = boxes((0, 0, 600, 600)), boxes((0, 0, 200, 700)), boxes((0, 0, 700, 150))
STEPS = [boxes((0, 0, 100 + 60 * k, 300), (0, 300, 80, 700)) for k in range(10)]


def make_font(path: Path, name: str, shapes: dict[str, list[Box]], names: dict[str, str] | None = None) -> Path:
    """A font whose characters are boxes; glyph 0, the mark of a missing character, is a narrow box."""
    names = names or {}
    glyphs = {".notdef": boxes((0, 0, 300, 350))}
    cmap = {}
    for character, shape in shapes.items():
        glyph = names.get(character, f"uni{ord(character):04X}" if ord(character) < 65536 else f"u{ord(character):X}")
        glyphs[glyph], cmap[ord(character)] = shape, glyph
    drawn = {}
    for glyph, shape in glyphs.items():
        pen = TTGlyphPen(None)
        for left, bottom, right, top in shape:
            pen.moveTo((left, bottom))
            for point in ((left, top), (right, top), (right, bottom)):
                pen.lineTo(point)
            pen.closePath()
        drawn[glyph] = pen.glyph()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(list(glyphs))
    builder.setupCharacterMap(cmap)
    builder.setupGlyf(drawn)
    builder.setupHorizontalMetrics({glyph: (800, 0) for glyph in glyphs})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": name, "styleName": "Regular", "fullName": name})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return path


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fonts hold the second they were made in: without this, one made again may be another file."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


def make_fonts(folder: Path, *faces: dict[str, list[Box]]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [make_font(folder / f"face{k}.ttf", f"Face {k}", shapes) for k, shapes in enumerate(faces)]


def glyphs(tmp_path: Path, *faces: dict[str, list[Box]], **kwargs: object) -> Glyphs:
    options = {"split": "all", "min_faces": 2, "image_size": 24, "cache": tmp_path / "cache", **kwargs}
    return Glyphs(fonts=make_fonts(tmp_path / "fonts", *faces), **options)


def test_one_class_a_character_one_image_a_face(tmp_path: Path) -> None:
    face = {"a": SQUARE, "b": TALL, "c": WIDE}
    data = glyphs(tmp_path, face, {"a": STEPS[0], "b": STEPS[1]}, {"b": STEPS[4], "d": TALL})
    assert data.class_names == ["U+0061 LATIN SMALL LETTER A", "U+0062 LATIN SMALL LETTER B"]
    assert data.labels.tolist() == [0, 0, 1, 1, 1] and data.labels.dtype == np.int64 and data.num_classes == 2
    assert [data.name(i) for i in (0, 4)] == ["U+0061 Face 0", "U+0062 Face 2"]
    image, label = data[0]
    assert image.shape == (24, 24, 1) and image.dtype == np.uint8 and label == 0
    rows, columns = np.nonzero(image[:, :, 0])
    assert image.max() == 255 and abs(rows.mean() - 11.5) <= 0.5 and abs(columns.mean() - 11.5) <= 0.5  # centred
    assert 9 <= np.ptp(rows) + 1 <= 12  # 600 of 1000 units at 18 pixels an em
    assert (glyphs(tmp_path, face, face, channels=3)[0][0] == glyphs(tmp_path, face, face)[0][0]).all()
    assert glyphs(tmp_path, face, face, min_faces=2).num_classes == 3
    with pytest.raises(ValueError, match="no character of split 'all' has 3 images in 2 faces"):
        glyphs(tmp_path, face, face, min_faces=3)


def test_large_characters_are_scaled_down(tmp_path: Path) -> None:
    huge = {"a": boxes((0, -500, 2500, 1500))}
    image = glyphs(tmp_path, huge, huge)[0][0]
    assert (image > 0).any(0).sum() == 24 and 17 <= (image > 0).any(1).sum() <= 21


def test_coinciding_characters_are_one_class(tmp_path: Path) -> None:
    # A, Alpha and Cyrillic A look alike in most faces that have both; the last face draws Alpha its own way.
    faces = [{"A": STEPS[k], "B": STEPS[k + 4]} for k in range(3)]
    for face in faces[:2]:
        face["\u0391"] = face["\u0410"] = face["A"]
    faces[2]["\u0391"] = WIDE
    data = glyphs(tmp_path, *faces)
    assert data.class_names[0] == "U+0041 LATIN CAPITAL LETTER A (and U+0391 U+0410)"
    assert data.num_classes == 2 and data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.codes.tolist() == [0x41, 0x42]


def test_equal_outlines_are_one_class_wherever_they_lie(tmp_path: Path) -> None:
    # A third of a pixel higher: other pictures, the same shape.
    faces = [{".": STEPS[k], "\u00b7": [(x, y + 19, u, v + 19) for x, y, u, v in STEPS[k]]} for k in range(2)]
    assert glyphs(tmp_path, *faces).codes.tolist() == [ord(".")]


def test_one_slip_does_not_merge(tmp_path: Path) -> None:
    faces = [{"A": STEPS[k], "B": STEPS[k + 4]} for k in range(4)]
    faces[3]["B"] = faces[3]["A"]
    faces.append({"A": STEPS[9]})
    data = glyphs(tmp_path, *faces)
    # The picture both show in face 3 belongs to A, which stands in more faces.
    assert data.num_classes == 2 and data.labels.tolist() == [0] * 5 + [1] * 3


def test_coinciding_in_the_only_shared_face_does_not_merge(tmp_path: Path) -> None:
    faces = [{"A": SQUARE, "B": SQUARE}, {"A": TALL}, {"A": WIDE}, {"B": STEPS[0]}, {"B": STEPS[1]}]
    data = glyphs(tmp_path, *faces)
    assert data.codes.tolist() == [0x41, 0x42] and data.labels.tolist() == [0, 0, 0, 1, 1]


def test_what_joined_ones_join_is_joined(tmp_path: Path) -> None:
    alike = [{"A": SQUARE, "B": SQUARE}, {"A": STEPS[2], "B": STEPS[2]}, {"B": TALL, "C": TALL}]
    faces = [*alike, {"B": WIDE, "C": WIDE, "D": STEPS[0]}, {"D": STEPS[1]}]
    data = glyphs(tmp_path, *faces)
    assert [name.split(" (")[-1] for name in data.class_names] == [
        "and U+0042 U+0043)",
        "U+0044 LATIN CAPITAL LETTER D",
    ]
    assert data.labels.tolist() == [0, 0, 0, 0, 1, 1]


def test_blank_missing_private_and_shared_placeholders_are_left_out(tmp_path: Path) -> None:
    face = {"a": SQUARE, " ": BLANK, "\u2800": BLANK, "b": boxes((0, 0, 300, 350)), "\ue000": TALL, "\u0378": TALL}
    face |= {chr(0x4E00 + k): WIDE for k in range(70)}  # boxes drawn for characters the face does not have
    assert glyphs(tmp_path, face, face).codes.tolist() == [ord("a")]


def test_faces_that_do_not_follow_unicode_are_left_out(tmp_path: Path) -> None:
    letters = {character: STEPS[k] for k, character in enumerate("abcdefghij")}
    good = make_font(tmp_path / "good.ttf", "Good", letters)
    arrows = make_font(tmp_path / "bad.ttf", "Arrows", letters, {"a": "arrowup", "b": "arrowleft"})
    last = make_font(tmp_path / "last.ttf", "Last Resort", letters)
    twice = make_font(tmp_path / "twice.ttf", "Good", letters)
    broken = tmp_path / "broken.ttf"
    broken.write_bytes(b"no font")
    assert [face.path for face in list_faces([arrows, good, last, twice, broken])] == [str(good)]


def test_collections_hold_several_faces(tmp_path: Path) -> None:
    fonts = make_fonts(tmp_path / "fonts", {"a": SQUARE, "b": TALL}, {"a": WIDE, "b": SQUARE})
    collection = TTCollection()
    collection.fonts = [TTFont(path) for path in fonts]
    (tmp_path / "both").mkdir()
    collection.save(tmp_path / "both" / "both.ttc")
    options = {"split": "all", "min_faces": 2, "image_size": 24, "cache": tmp_path / "cache"}
    one, two = Glyphs(fonts=tmp_path / "both", **options), Glyphs(fonts=fonts, **options)
    assert one.face_names == two.face_names == ["Face 0", "Face 1"]
    assert all((one[i][0] == two[i][0]).all() for i in range(4))


def test_repeated_pictures_can_be_dropped(tmp_path: Path) -> None:
    faces = [{"a": SQUARE, "b": STEPS[k]} for k in range(3)]
    assert glyphs(tmp_path, *faces).labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert glyphs(tmp_path, *faces, repeats="drop").codes.tolist() == [ord("b")]


def test_split_holds_out_classes_whatever_min_faces(tmp_path: Path) -> None:
    characters = [chr(0x4E00 + k) for k in range(400)]
    shapes = [boxes((0, 0, 20 + 30 * (k % 20), 20 + 30 * (k // 20))) for k in range(400)]
    faces = [dict(zip(characters[:count], shapes[:count], strict=True)) for count in (400, 400, 200)]
    parts = {split: glyphs(tmp_path, *faces, split=split, image_size=32) for split in ("all", "train", "test")}
    codes = {split: set(data.codes.tolist()) for split, data in parts.items()}
    assert codes["train"] | codes["test"] == codes["all"] and not codes["train"] & codes["test"]
    assert 0.08 < len(codes["test"]) / len(codes["all"]) < 0.24
    fewer = glyphs(tmp_path, *faces, split="test", min_faces=3, image_size=32)
    assert set(fewer.codes.tolist()) <= codes["test"]
    other = glyphs(tmp_path, *faces, split="test", seed=1, image_size=32)
    assert set(other.codes.tolist()) != codes["test"]
    for data in parts.values():
        assert set(data.labels.tolist()) == set(range(data.num_classes))


def test_the_cache_is_drawn_once_and_read_by_workers(tmp_path: Path) -> None:
    face, calls = {"a": SQUARE, "b": TALL}, []
    first = glyphs(tmp_path, face, face, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(2, 4), (4, 4)]
    again = glyphs(tmp_path, face, face, progress=lambda done, total: calls.append((done, total)))
    assert len(calls) == 2 and again.folder == first.folder
    assert sorted(path.name for path in first.folder.iterdir()) == ["index.npy", "info.json", "pictures.npy"]
    assert json.loads((first.folder / "info.json").read_text())["classes"] == [[ord("a")], [ord("b")]]
    assert glyphs(tmp_path, face, face, image_size=32).folder != first.folder
    _ = first[0]
    assert len(pickle.dumps(first)) < 10_000
    assert (pickle.loads(pickle.dumps(first))[3][0] == first[3][0]).all()
    assert len(list(Loader(first, 2, workers=1).epochs(1))) == 2


def test_a_killed_or_failed_drawing_leaves_nothing_half_done(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    face, cache = {"a": SQUARE}, tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        glyphs(tmp_path, face, face, progress=stop)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    left = cache / f"{next(cache.iterdir()).stem}.tmp-abc"
    left.mkdir()
    assert len(glyphs(tmp_path, face, face)) == 2 and not left.exists()


def draw_at_once(fonts: list[Path], cache: Path, results: "multiprocessing.Queue[list[int]]") -> None:
    data = Glyphs(fonts=fonts, split="all", min_faces=2, image_size=24, cache=cache)
    results.put([int(data[i][0].sum()) for i in range(len(data))])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="starts its processes by fork")
def test_processes_that_draw_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    face = {chr(0x4E00 + k): boxes((0, 0, 20 + 40 * (k % 15), 20 + 40 * (k // 15))) for k in range(200)}
    fonts = make_fonts(tmp_path / "fonts", face, face)
    context = multiprocessing.get_context("fork")
    for locks in (True, False):
        if not locks:  # a file system without locks: the first to finish wins
            monkeypatch.setitem(__import__("sys").modules, "fcntl", None)
        results = context.Queue()
        workers = [
            context.Process(target=draw_at_once, args=(fonts, tmp_path / f"cache{locks}", results)) for _ in range(3)
        ]
        for worker in workers:
            worker.start()
        found = [results.get(timeout=60) for _ in workers]
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        assert found[0] == found[1] == found[2]
        names = [path.name for path in (tmp_path / f"cache{locks}").iterdir()]
        assert not [name for name in names if ".tmp-" in name]


@pytest.mark.slow
def test_drawing_in_several_processes_gives_the_same(tmp_path: Path) -> None:
    face = {chr(0x4E00 + k): boxes((0, 0, 20 + 30 * (k % 20), 20 + 30 * (k // 20))) for k in range(300)}
    one = glyphs(tmp_path, face, face, workers=1, cache=tmp_path / "one")
    two = glyphs(tmp_path, face, face, workers=2, cache=tmp_path / "two")
    for name in ("pictures.npy", "index.npy", "info.json"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()


def test_cache_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLSC_CACHE", str(tmp_path / "env"))
    assert glyphs(tmp_path, {"a": SQUARE}, {"a": SQUARE}, cache=None).folder.parent == tmp_path / "env"
    monkeypatch.delenv("PLSC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert glyphs(tmp_path, {"a": SQUARE}, {"a": SQUARE}, cache=None).folder.parent == tmp_path / "home/.cache/plsc"


@pytest.mark.parametrize(
    "kwargs",
    [{"image_size": 4}, {"channels": 2}, {"min_faces": 1}, {"split": "val"}, {"repeats": "x"}, {"test_share": 1.0}],
)
def test_bad_arguments(tmp_path: Path, kwargs: dict) -> None:
    with pytest.raises(ValueError, match="got"):
        glyphs(tmp_path, {"a": SQUARE}, **kwargs)


def test_bad_fonts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such font file or folder"):
        Glyphs(fonts=tmp_path / "nowhere", cache=tmp_path)
    with pytest.raises(ValueError, match="no font files"):
        Glyphs(fonts=tmp_path, cache=tmp_path)
    (tmp_path / "a.ttf").write_bytes(b"no font")
    with pytest.raises(ValueError, match="none of 1 font files has characters"):
        Glyphs(fonts=tmp_path, cache=tmp_path)


def test_real_faces_of_matplotlib(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib's fonts")
    fonts = [path for path in find_fonts("matplotlib") if path.stem in ("DejaVuSansMono", "DejaVuSansMono-Oblique")]
    assert len(fonts) == 2
    data = Glyphs(fonts=fonts, min_faces=2, split="all", image_size=32, cache=tmp_path)
    group = {name[:6]: set(name.split("(and ")[-1].rstrip(")").split()) for name in data.class_names if "(and" in name}
    assert {"U+0391", "U+0410"} <= group["U+0041"]  # Latin A, Greek Alpha, Cyrillic A
    assert "U+0042" not in group["U+0041"] and 2000 < data.num_classes < 2700
    kept = {path.stem for path in find_fonts("matplotlib")}
    faces = {
        Path(face.path).stem for face in list_faces([p for p in find_fonts("matplotlib") if p.stem[:2] in ("cm", "La")])
    }
    assert "cmr10" in kept and not faces
