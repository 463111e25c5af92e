"""Lists of images: the samples of the folder, tables of other writers, the line that is wrong."""

import pickle
from pathlib import Path

import pytest

from plsc.data import ImageFolder, ImageList, Loader

from .pictures import samples


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


def test_index_takes_few_bytes_an_image(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("".join(f"{i // 10:08d}/{i:08d}.jpg {i // 10}\n" for i in range(5000)))
    assert len(pickle.dumps(ImageList(path))) < 5000 * (21 + 16 + 2) + 2000
