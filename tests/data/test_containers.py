"""Conversions: the same bytes, labels and order in every container, whatever the names and options."""

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plsc.data import (
    Augment,
    ImageFolder,
    ImageList,
    Loader,
    TarShards,
    convert,
    make_pairs,
    open_images,
    read_pairs,
    split,
    tar,
    write_pairs,
)
from plsc.data.convert import Encoded, content_kind, kind_of
from plsc.data.embeddings import read_embeddings
from plsc.data.tar import TarWriter

from .contents import content, jpeg

TARGETS = ["a.tar", "b.parquet", "c.txt", "d.rec", "e-{}.tar", "f", "g.lmdb"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "faces"
    for k in range(12):
        path = root / f"P{k // 4}" / f"P{k // 4}_{k % 4 + 1:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(k))
    return root


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
