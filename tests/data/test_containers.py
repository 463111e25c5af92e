"""Tar shards, Parquet and conversions: the same bytes, labels and order in every container; what is wrong is named."""

import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from plsc.data import (
    Augment,
    ImageFolder,
    ImageList,
    LMDBImages,
    Loader,
    ParquetImages,
    TarShards,
    convert,
    keyvalue,
    make_pairs,
    open_images,
    parquet_pages,
    read_pairs,
    split,
    tar,
    write_pairs,
)
from plsc.data.convert import Encoded, content_kind, kind_of
from plsc.data.embeddings import read_embeddings
from plsc.data.keyvalue import LMDBWriter
from plsc.data.parquet import ParquetWriter
from plsc.data.tar import TarWriter

TARGETS = ["a.tar", "b.parquet", "c.txt", "d.rec", "e-{}.tar", "f", "g.lmdb"]


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "faces"
    for k in range(12):
        path = root / f"P{k // 4}" / f"P{k // 4}_{k % 4 + 1:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(k))
    return root


def content(data: Encoded) -> list[tuple[bytes, int]]:
    return [(data.encoded(i), int(data.labels[i])) for i in range(len(data))]


def pack(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return path


def there(target: Path) -> str:
    return str(target).replace("{}", "*")


def needs(name: str) -> None:
    if "parquet" in name:
        pytest.importorskip("pyarrow")


@pytest.mark.parametrize("name", TARGETS)
def test_containers_keep_bytes_labels_and_order(folder: Path, tmp_path: Path, name: str) -> None:
    needs(name)
    source = ImageFolder(folder, image_size=8)
    convert(source, tmp_path / name)
    found = open_images(there(tmp_path / name), image_size=8)
    assert content(found) == content(source) and found.num_classes == 3
    assert kind_of(str(tmp_path / name)) == kind_of(there(tmp_path / name))
    if not name.endswith(".rec"):
        assert all(found.name(i).endswith(source.name(i)) for i in range(12))
    convert(found, tmp_path / "back")
    assert content(open_images(tmp_path / "back")) == content(source)
    again = pickle.loads(pickle.dumps(found))
    assert all((again[i][0] == source[i][0]).all() for i in range(12))
    with pytest.raises(ValueError, match="exists already"):
        convert(source, tmp_path / (name if "{}" not in name else "back"))
    leftover = [path for path in tmp_path.iterdir() if ".tmp-" in path.name]
    assert leftover == []


@pytest.mark.parametrize("name", ["a.tar", "b.parquet", "g.lmdb"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_takes_the_same_batches_from_every_container(
    folder: Path, tmp_path: Path, name: str, workers: int
) -> None:
    needs(name)
    source = ImageFolder(folder, image_size=8)
    convert(source, tmp_path / name)
    batches = []
    for data in (source, open_images(tmp_path / name, image_size=8)):
        loader = Loader(data, 4, seed=3, transform=Augment(crop=1), workers=workers)
        batches.append([(images.clone(), labels) for images, labels in loader.epochs(2)])
    for (images, labels), (images2, labels2) in zip(*batches, strict=True):
        assert torch.equal(images, images2) and torch.equal(labels, labels2)


def test_labels_that_folders_cannot_say(folder: Path, tmp_path: Path) -> None:
    lines = [f"P{k // 4}/P{k // 4}_{k % 4 + 1:04d}.jpg {[5, 2, -1][k // 4]}\n" for k in range(12)]
    (folder / "list.txt").write_text("".join(lines))
    source = ImageList(folder / "list.txt")
    with pytest.raises(ValueError, match=r"4 of 6 labels have no image, 4 samples are ignored"):
        convert(source, tmp_path / "x")
    for name in ("x.tar", "x.rec", "y.txt"):
        convert(source, tmp_path / name)
        assert content(open_images(tmp_path / name)) == content(source)


def test_other_orders_and_names_of_classes_keep_their_labels(folder: Path, tmp_path: Path) -> None:
    """A folder numbers classes by name: where that would change labels, it gets other names."""
    lines = [f"P{k // 4}/P{k // 4}_{k % 4 + 1:04d}.jpg {2 - k // 4}\n" for k in range(12)]
    (folder / "list.txt").write_text("".join(lines))
    source = ImageList(folder / "list.txt")
    convert(source, tmp_path / "x")
    found = ImageFolder(tmp_path / "x")
    assert sorted(content(found)) == sorted(content(source)) and found.name(0) == "0/0_0001.jpg"


def test_split_shares_no_class(folder: Path, tmp_path: Path) -> None:
    source = ImageFolder(folder, image_size=8)
    assert split(source, [tmp_path / "a.tar", tmp_path / "b"], share=0.3) == (2, 1)
    train, test = open_images(tmp_path / "a.tar"), open_images(tmp_path / "b")
    assert train.num_classes == 2 and test.num_classes == 1 and len(train) + len(test) == 12
    assert not {data for data, _ in content(train)} & {data for data, _ in content(test)}
    with pytest.raises(ValueError, match="share=1"):
        split(source, [tmp_path / "c", tmp_path / "d"], share=1)


def test_pairs_are_written_as_they_are_read(folder: Path, tmp_path: Path) -> None:
    source = ImageFolder(folder)
    names = [source.name(i) for i in range(12)]
    pairs = make_pairs(source.labels, num_pairs=6, folds=1)
    write_pairs(tmp_path / "pairs.txt", pairs, names)
    again = read_pairs(tmp_path / "pairs.txt", names)
    assert (again.first == pairs.first).all() and (again.second == pairs.second).all() and again.num_folds == 1
    with pytest.raises(ValueError, match=r"named \d+\.jpg, expected NAME_0001"):
        write_pairs(tmp_path / "pairs.txt", pairs, [f"{i}.jpg" for i in range(12)])


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


def test_the_index_of_tars_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    convert(ImageFolder(folder, image_size=8), tmp_path / "x.tar")
    cache, scans = tmp_path / "index.npz", []
    members = tar._members
    monkeypatch.setattr(tar, "_members", lambda path: scans.append(path) or members(path))
    first = TarShards(tmp_path / "x.tar", image_size=8, cache=cache)
    again = TarShards(tmp_path / "x.tar", image_size=8, cache=cache)
    assert len(scans) == 1 and content(again) == content(first)
    assert [again.name(i) for i in range(12)] == [first.name(i) for i in range(12)] and again.num_classes == 3
    assert content(pickle.loads(pickle.dumps(again))) == content(first)
    with TarWriter(tmp_path / "y.tar") as writer:  # another archive under the old name
        writer.write("a/b", ".jpg", 1, jpeg(0))
    os.replace(tmp_path / "y.tar", tmp_path / "x.tar")
    assert TarShards(tmp_path / "x.tar", image_size=8, cache=cache).labels.tolist() == [1] and len(scans) == 2
    for broken in (b"", b"hello", cache.read_bytes()[:200], pickle.dumps({"stamp": 1})):
        cache.write_bytes(broken)
        assert TarShards(tmp_path / "x.tar", image_size=8, cache=cache).encoded(0) == jpeg(0)
        assert TarShards(tmp_path / "x.tar", image_size=8, cache=cache).labels.tolist() == [1]  # made anew
    assert len(scans) == 6
    TarShards(tmp_path / "x.tar", image_size=8, cache=tmp_path / "gone" / "index.npz")
    assert "the next start reads every header again" in caplog.text


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


def test_lmdb_as_others_write_it(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "x"), map_size=2**22) as environment, environment.begin(write=True) as transaction:
        for k in range(3):
            transaction.put(b"image-%09d" % (k + 1), jpeg(k))
            transaction.put(b"label-%09d" % (k + 1), b"%d" % (2 - k))
        transaction.put(b"num-samples", b"3")
    data = open_images(tmp_path / "x", image_size=8)
    assert isinstance(data, LMDBImages) and data.labels.tolist() == [2, 1, 0] and data.encoded(1) == jpeg(1)
    assert data.name(2) == "image-000000003"
    assert pickle.loads(pickle.dumps(data)).encoded(0) == jpeg(0)
    with pytest.raises(IndexError, match="expected 0 to 2"):
        data.encoded(3)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ({}, "num-samples: got nothing, expected a whole number"),
        ({b"num-samples": b"x"}, "num-samples: got b'x'"),
        ({b"num-samples": b"0"}, "got 0 as num-samples"),
        ({b"num-samples": b"999999999999", b"labels": b""}, "as num-samples, but the file holds 2 keys"),
        ({b"num-samples": b"2", b"label-000000001": b"0"}, "label-000000002: got nothing"),
        ({b"num-samples": b"1", b"label-000000001": b"Anna"}, "label-000000001: got b'Anna'"),
        ({b"num-samples": b"1", b"label-000000001": b"-1"}, "got labels from -1 to -1"),
        ({b"num-samples": b"1", b"label-000000001": b"0"}, "got nothing under image-000000001"),
        ({b"num-samples": b"1", b"label-000000001": b"0", b"image-000000001": b"x"}, "image-000000001: broken"),
    ],
)
def test_lmdb_of_another_layout(tmp_path: Path, pairs: dict[bytes, bytes], words: str) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(tmp_path / "x.lmdb"), subdir=False) as environment, environment.begin(write=True) as transaction:
        for key, value in pairs.items():
            transaction.put(key, value)
    with pytest.raises(ValueError) as caught:
        LMDBImages(tmp_path / "x.lmdb")[0]
    assert words in str(caught.value) and "x.lmdb" in str(caught.value)


def test_lmdb_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lmdb")
    (tmp_path / "x.lmdb").write_bytes(b"hello" * 3000)
    with pytest.raises(ValueError, match="cannot be read as LMDB"):
        LMDBImages(tmp_path / "x.lmdb")
    with pytest.raises(ValueError, match="check the path"):
        LMDBImages(tmp_path / "gone.lmdb")
    with pytest.raises(RuntimeError, match="stop"), LMDBWriter(tmp_path / "y.lmdb") as writer:
        writer.write("a", 0, b"x")
        raise RuntimeError("stop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.lmdb"]
    monkeypatch.setitem(__import__("sys").modules, "lmdb", None)
    with pytest.raises(ValueError, match=r"needs lmdb.*plsc-torch\[lmdb\]"):
        LMDBImages(tmp_path / "x.lmdb")


def test_an_lmdb_file_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lmdb")
    monkeypatch.setattr(keyvalue, "_FIRST_SIZE", 2**16)
    monkeypatch.setattr(keyvalue, "_BATCH", 10)
    with LMDBWriter(tmp_path / "x.lmdb") as writer:
        for k in range(300):
            writer.write(f"{k}", k % 7, bytes([k % 251]) * 3000)
    data = LMDBImages(tmp_path / "x.lmdb")
    assert all(data.encoded(k) == bytes([k % 251]) * 3000 and data.name(k) == str(k) for k in range(300))


@pytest.mark.slow
def test_real_faces_through_every_container_and_back(shared: Path, tmp_path: Path) -> None:
    source = ImageFolder(shared / "data/faces/lfw112_val.zip")
    expected = content(source)
    data: Encoded = source
    for name in TARGETS:
        needs(name)
        convert(data, tmp_path / name)
        data = open_images(there(tmp_path / name))
        assert content(data) == expected, name


def test_progress_is_told(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report: Callable[[int, int], None] = lambda done, total: seen.append((done, total))  # noqa: E731
    convert(ImageFolder(folder), tmp_path / "x.rec", progress=report)
    assert seen[-1] == (12, 12)


@pytest.mark.parametrize("name", ["a.tar", "b.parquet", "c.txt", "d", "g.lmdb"])
def test_names_that_are_not_utf8(tmp_path: Path, name: str) -> None:
    needs(name)
    root = os.fsencode(tmp_path / "faces")
    for k, folder in enumerate((b"caf\xe9", "Zo\u00eb".encode())):
        os.makedirs(os.path.join(root, folder))
        with open(os.path.join(root, folder, b"\xff%d.jpg" % k), "wb") as file:
            file.write(jpeg(k))
    source = ImageFolder(tmp_path / "faces", image_size=8)
    convert(source, tmp_path / name)
    found = open_images(tmp_path / name, image_size=8)
    assert content(found) == content(source)
    if name != "b.parquet":  # whose strings are UTF-8: the odd bytes are spelled out there
        assert all(found.name(i).endswith(source.name(i)) for i in range(2))


def test_lists_in_lists_without_end(tmp_path: Path) -> None:
    """JSON that would exhaust the stack is damage like any other."""
    deep = b"[" * 200_000
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in (("1.jpg", jpeg(0)), ("1.json", deep)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    with pytest.raises(ValueError, match=r"a\.tar: got .* as the label in 1\.json"):
        TarShards(tmp_path / "a.tar")
    (tmp_path / "e.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(ValueError, match=r"e\.safetensors: the header is broken"):
        read_embeddings(tmp_path / "e.safetensors")


def test_what_a_file_is_shows_in_its_first_bytes(folder: Path, tmp_path: Path) -> None:
    """A misleading name is told, with what fits; without a suffix the content decides."""
    source = ImageFolder(folder, image_size=8)
    for name in ("a.tar", "b.parquet", "d.rec", "g.lmdb"):
        needs(name)
        convert(source, tmp_path / name)
        (tmp_path / f"plain-{name[0]}").write_bytes((tmp_path / name).read_bytes())
        found = open_images(tmp_path / f"plain-{name[0]}", image_size=8)
        assert sorted(content(found)) == sorted(content(source))
    for real, kind in (("a.tar", "tar"), ("b.parquet", "parquet"), ("d.rec", "rec"), ("g.lmdb", "lmdb")):
        assert content_kind(str(tmp_path / real)) == kind
        for said in {"rec", "tar", "parquet", "lmdb", "bin"} - {kind}:
            (tmp_path / f"x.{said}").write_bytes((tmp_path / real).read_bytes())
            with pytest.raises(ValueError, match=rf"x\.{said}: its name says kind '{said}', its content '{kind}'"):
                open_images(tmp_path / f"x.{said}")
    (tmp_path / "x.idx").unlink(missing_ok=True)


def test_options_of_a_kind(folder: Path, tmp_path: Path) -> None:
    source = ImageFolder(folder, image_size=8)
    convert(source, tmp_path / "a.tar")
    assert content(open_images(tmp_path / "a.tar", cache=tmp_path / "index")) == content(source)
    assert (tmp_path / "index").is_file()
    with pytest.raises(ValueError, match=r"a\.tar: got the option root for data of kind 'tar', .*: cache"):
        open_images(tmp_path / "a.tar", root=folder)


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
