"""Parquet: files of other writers, pages read without pyarrow, damage that is found."""

from pathlib import Path

import numpy as np
import pytest

from plsc.data import (
    ParquetImages,
    parquet_pages,
)
from plsc.data.parquet import ParquetWriter

from .contents import jpeg


def table(path: Path, **columns: object) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path)
    return path


def test_parquet_as_others_write_it(tmp_path: Path) -> None:
    rows = [{"bytes": jpeg(k), "path": None} for k in range(5)]
    data = ParquetImages(table(tmp_path / "x.parquet", image=rows, label=[0, 1, -1, 1, 0]), image_size=8)
    assert data.encoded(3) == jpeg(3) and data.labels.tolist() == [0, 1, -1, 1, 0]
    assert data.name(3).endswith("x.parquet, row 3") and data[2][1] == -1
    other = table(tmp_path / "y.parquet", picture=[jpeg(0)], person=[0])
    assert ParquetImages(other, image="picture", label="person", image_size=8)[0][1] == 0


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"image": [b"x"]}, "expected one named 'label'"),
        ({"jpg": [b"x"], "label": [0]}, "got columns jpg, label, expected one named 'image'"),
        ({"image": ["x"], "label": [0]}, "'image' is of string, expected binary"),
        ({"image": [b"x"], "label": [0.5]}, "'label' is of double, expected whole numbers"),
        ({"image": [b"x"], "label": ["a"]}, "'label' is of string"),
        ({"image": [b"x", b"y"], "label": [0, None]}, "1 rows have no 'label'"),
        ({"image": [b"x"], "label": [-2]}, "got labels from -2 to -2"),
        ({"image": [b"x"], "label": [-1]}, "no label from 0"),
    ],
)
def test_parquet_of_another_schema(tmp_path: Path, columns: dict, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        ParquetImages(table(tmp_path / "x.parquet", **columns))
    assert words in str(caught.value) and "x.parquet" in str(caught.value)


def test_damaged_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "x.parquet", image=[jpeg(0), None], label=[0, 1])
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="sample 1: got no bytes"):
        ParquetImages(path)[1]
    for broken in (b"", b"hello", whole[:-20], whole[: len(whole) // 2]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"x\.parquet: cannot be read as Parquet"):
            ParquetImages(path)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="needs pyarrow"):
        ParquetImages(path)


OTHERS = {
    "plain": {"compression": "none", "use_dictionary": False},
    "second page format": {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"},
    "small pages": {"compression": "none", "use_dictionary": False, "data_page_size": 600, "write_batch_size": 2},
    "dictionary": {"compression": "none"},
    "compressed": {"compression": "snappy", "use_dictionary": False},
    "several groups": {"compression": "none", "use_dictionary": False, "row_group_size": 7},
    "checksums": {"compression": "none", "use_dictionary": False, "write_page_checksum": True},
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("form", ["bytes", "required", "structs"])
def test_images_are_read_by_themselves_where_pages_are_plain(tmp_path: Path, kind: str, form: str) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pictures = [jpeg(k) for k in range(20)]
    rows = [{"path": "x", "bytes": each} for each in pictures] if form == "structs" else pictures
    inner = arrow.struct([("path", arrow.string()), ("bytes", arrow.binary())]) if form == "structs" else arrow.binary()
    schema = arrow.schema([arrow.field("image", inner, nullable=form != "required"), ("label", arrow.int64())])
    made = arrow.table({"image": rows, "label": list(range(20))}, schema=schema)
    parquet.write_table(made, tmp_path / "x.parquet", **OTHERS[kind])
    data = ParquetImages(tmp_path / "x.parquet", image_size=8)
    order = np.random.default_rng(0).permutation(20).tolist()
    assert [data.encoded(i) for i in order] == [pictures[i] for i in order]
    by_itself = kind not in ("dictionary", "compressed")
    assert (data._offsets > 0).all() == by_itself and bool(data._kept) != by_itself


def test_rows_without_an_image_are_left_to_pyarrow(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    made = arrow.table({"image": [jpeg(0), None, jpeg(2)], "label": [0, 1, 2]})
    parquet.write_table(made, tmp_path / "x.parquet", **OTHERS["plain"])
    data = ParquetImages(tmp_path / "x.parquet", image_size=8)
    assert data.encoded(2) == jpeg(2) and data.encoded(0) == jpeg(0)
    with pytest.raises(ValueError, match="sample 1: got no bytes"):
        data.encoded(1)


def test_damaged_pages_are_found(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with ParquetWriter(tmp_path / "x.parquet") as writer:
        for k in range(30):
            writer.write(f"{k}.jpg", k % 3, jpeg(k))
    whole = (tmp_path / "x.parquet").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole)
        at = int(rng.integers(4, len(data) - 700))
        data[at : at + 4] = rng.bytes(4)
        (tmp_path / "y.parquet").write_bytes(bytes(data))
        try:
            found = ParquetImages(tmp_path / "y.parquet", image_size=8)
            for i in range(30):
                assert len(found.encoded(i)) < len(whole)
        except ValueError as error:
            assert "parquet" in str(error)
    for cut in range(0, 400, 7):  # headers of pages alone
        assert parquet_pages.find_values(whole[4 : 4 + cut], 4, levels=1) is None or cut == 0


@pytest.mark.parametrize("kind", ["binary_view", "dictionary", "large_binary", "struct"])
def test_columns_of_bytes_of_any_kind(tmp_path: Path, kind: str) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [jpeg(k % 3) for k in range(6)]
    column = {
        "binary_view": lambda: arrow.array(images, arrow.binary_view()),
        "dictionary": lambda: arrow.chunked_array([images[:3], images[3:]], arrow.binary()).dictionary_encode(),
        "large_binary": lambda: arrow.array(images, arrow.large_binary()),
        "struct": lambda: arrow.array([{"bytes": one} for one in images]),
    }[kind]()
    table = arrow.table({"image": column, "label": [0, 1, 2, 0, 1, 2]})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=4)
    found = ParquetImages(tmp_path / "x.parquet", image_size=8)
    assert [found.encoded(i) for i in range(6)] == images and found[5][1] == 2
    parquet.write_table(arrow.table({"image": [1], "label": [0]}), tmp_path / "y.parquet")
    with pytest.raises(ValueError, match="expected binary: the bytes of an encoded image in each row"):
        ParquetImages(tmp_path / "y.parquet")
