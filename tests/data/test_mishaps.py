"""Mishaps of users: full disks, names that are taken, labels far apart, names that mislead, archives cut or joined."""

import errno
import io
import itertools
import logging
import os
import resource
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc import cli
from plsc.data import (
    ImageFolder,
    ImageList,
    LMDBImages,
    Loader,
    RecordIO,
    TarShards,
    convert,
    make_pairs,
    open_images,
    read_pairs,
    split,
    write_pairs,
)
from plsc.data.convert import Encoded
from plsc.data.parquet import ParquetImages

TARGETS = ["a.tar", "b.parquet", "c.txt", "d.rec", "e-{}.tar", "f", "g.lmdb"]


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k in range(12):
        path = tmp_path / "faces" / f"P{k // 4}" / f"P{k // 4}_{k % 4 + 1:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(k))
    return tmp_path / "faces"


class Given:
    """Samples of these labels, all named alike unless told."""

    def __init__(self, labels: list[int], names: list[str] | None = None) -> None:
        self.labels = np.array(labels, np.int64)
        self.num_classes = int(self.labels.max()) + 1
        self._names = names

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        raise NotImplementedError

    def name(self, i: int) -> str:
        return "x" if self._names is None else self._names[i]

    def encoded(self, i: int) -> bytes:
        return jpeg(i)


def content(data: Encoded) -> list[tuple[bytes, int]]:
    return [(data.encoded(i), int(data.labels[i])) for i in range(len(data))]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 4 KiB, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("target", ["a.tar", "b.parquet", "d.rec", "e-{}.tar", "g.lmdb"])
def test_a_full_disk_leaves_nothing_and_is_named(folder: Path, tmp_path: Path, target: str) -> None:
    """Also where it shows only when the last bytes are flushed, as for all of these few images."""
    with pytest.raises((OSError, ValueError), match=target.split("-")[0].split(".")[0]) as caught:
        convert(open_images(folder), tmp_path / "made" / target)
    assert os.listdir(tmp_path / "made") == []
    if isinstance(caught.value, OSError):
        assert str(caught.value.filename).endswith(target)


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_is_named_for_pairs(tmp_path: Path) -> None:
    pairs = make_pairs(np.repeat(np.arange(200), 2), num_pairs=400, folds=1)
    with pytest.raises(OSError, match=r"made/pairs\.txt"):
        write_pairs(tmp_path / "made/pairs.txt", pairs, [f"P{k // 2:09d}_{k % 2 + 1:04d}.jpg" for k in range(400)])
    assert os.listdir(tmp_path / "made") == []


@pytest.mark.parametrize("command", ["pairs", "align"])
def test_a_name_that_is_taken_is_left_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    taken = tmp_path / "taken.txt"
    taken.write_text("another's")
    args = {"pairs": [str(taken), "--num-pairs", "4", "--folds", "1"], "align": ["x", "--save-landmarks", str(taken)]}
    assert cli.data([command, str(folder), *args[command]]) == 2
    assert f"{taken} exists already" in capsys.readouterr().err and taken.read_text() == "another's"


@pytest.mark.parametrize("target", TARGETS)
def test_a_name_taken_meanwhile_is_left_alone(folder: Path, tmp_path: Path, target: str) -> None:
    taken = tmp_path / "made" / target.replace("{}", "000000")

    def take(done: int, total: int) -> None:
        if done == total and not taken.exists():
            taken.write_bytes(b"another's")

    with pytest.raises(ValueError, match="exists already"):
        convert(open_images(folder), tmp_path / "made" / target, progress=take)
    assert taken.read_bytes() == b"another's" and os.listdir(taken.parent) == [taken.name]


def run_and_stop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], *numbers: signal.Signals
) -> tuple[int, str]:
    """Exit status and message of plsc-data, to which signals come at the 9th image, or as a small file is whole."""
    read, sync, count = ImageFolder.encoded, os.fsync, itertools.count()

    def stop() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            for number in numbers:
                os.kill(os.getpid(), number)
        finally:  # of a library's other threads, one may take the first before
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # all come at once

    def encoded(self: ImageFolder, i: int) -> bytes:
        if next(count) == 8:
            stop()
        return read(self, i)

    monkeypatch.setattr(ImageFolder, "encoded", encoded)
    monkeypatch.setattr(os, "fsync", lambda file: stop() if args[0] in ("pairs", "align") else sync(file))
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    code = cli.data(args)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
    return code, capsys.readouterr().err


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGTERM,), 143),
        ((signal.SIGHUP,), 129),
        ((signal.SIGTERM, signal.SIGTERM, signal.SIGHUP), 143),
        ((signal.SIGINT,), 130),
    ],
)
def test_a_signal_leaves_nothing(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    numbers: tuple[signal.Signals, ...],
    code: int,
) -> None:
    args = ["convert", str(folder), str(tmp_path / "made" / target)]
    ended, err = run_and_stop(monkeypatch, capsys, args, *numbers)
    assert ended in (code, 129 if len(numbers) > 1 else code)  # of several, the system chooses the first
    assert os.listdir(tmp_path / "made") == [] and err.count("\n") == 1 and "Traceback" not in err
    assert err.startswith("interrupted" if code == 130 else "stopped by SIG")


@pytest.mark.parametrize("command", ["split", "pairs", "align"])
def test_a_signal_leaves_nothing_of_other_commands(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    made, marks = tmp_path / "made", tmp_path / "marks.txt"
    made.mkdir()
    args = {
        "split": ["split", str(folder), str(made / "a"), str(made / "b.rec"), "--share", "0.34"],
        "pairs": ["pairs", str(folder), str(made / "pairs.txt"), "--num-pairs", "4", "--folds", "1"],
        "align": ["align", str(folder), str(made / "a.tar"), "--landmarks", str(marks)],
    }[command]
    marks.write_text("P0/P0_0001.jpg 2 2 5 2 4 4 2 6 5 6\n")
    args += ["--save-landmarks", str(made / "found.txt")] if command == "align" else []
    ended, err = run_and_stop(monkeypatch, capsys, args, signal.SIGTERM)
    assert ended == 143 and err == "stopped by SIGTERM: what was not whole is removed\n"
    assert os.listdir(made) == (["a"] if command == "split" else [])  # of a split, the first is whole


@pytest.mark.parametrize("kind", ["rec", "tar"])
def test_a_signal_leaves_no_draft_of_a_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nor does a full disk."""
    path = tmp_path / "made" / f"a.{kind}"
    convert(open_images(folder), path)
    (tmp_path / "made/a.idx").unlink(missing_ok=True)  # made anew: by a draft, too
    opened = {"rec": RecordIO, "tar": TarShards}[kind]
    before = sorted(os.listdir(path.parent))

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            opened(path, cache=path.parent / "cache")
    assert sorted(os.listdir(path.parent)) == before
    opened(path)
    before = sorted(os.listdir(path.parent))
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            opened(path, cache=path.parent / "cache")
    assert sorted(os.listdir(path.parent)) == before


def test_archives_of_an_earlier_conversion_are_not_mixed_in(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "e-000007.tar").write_bytes(b"old")
    with pytest.raises(ValueError, match=r"e-000007\.tar exists already"):
        convert(open_images(folder), tmp_path / "e-{}.tar")


def test_split_looks_at_both_names_first(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "b.rec").touch()
    with pytest.raises(ValueError, match=r"b\.rec exists already"):
        split(open_images(folder), [tmp_path / "a.rec", tmp_path / "b.rec"])
    assert not (tmp_path / "a.rec").exists()


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.csv"])
def test_names_of_files_make_no_folders(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no folder's name"):
        convert(open_images(folder), tmp_path / name)


def test_labels_far_apart_take_no_memory(tmp_path: Path) -> None:
    data = Given([0, 2**40, 0, 2**40, 5])
    convert(data, tmp_path / "a.parquet")
    assert content(open_images(tmp_path / "a.parquet")) == content(data)
    assert split(data, [tmp_path / "b.rec", tmp_path / "c.rec"], share=0.4) == (2, 1)
    parts = [content(open_images(tmp_path / name)) for name in ("b.rec", "c.rec")]
    assert sorted(image for part in parts for image, _ in part) == sorted(image for image, _ in content(data))


@pytest.mark.parametrize("target", ["a.txt", "a.lst", "a.tsv"])
def test_names_that_lists_would_misread(tmp_path: Path, target: str) -> None:
    """A tab in a name is a column of a .lst; a carriage return may end a line."""
    data = Given([1, 0, 1], ["1\t2\tp/x.jpg", "p\r/\t7\ty.jpg", "q/\ufeffz.jpg"])
    convert(data, tmp_path / target)
    assert content(open_images(tmp_path / target)) == content(data)


@pytest.mark.parametrize("target", ["a.txt", "a.tar", "a.parquet", "a.lmdb", "a"])
def test_only_unsafe_names_change_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str) -> None:
    """In their folder where its name is safe; none takes the name of another."""
    names = ["P/P_0001.jpg", "P/.x.jpg", "P/b c.jpg", "P/P_0002.jpg", "Q\n/1.jpg", "Q\n/2.jpg", "R/1.jpg", "R/1.jpg"]
    wanted = ["P/P_0001.jpg", "P/P_0003.jpg", "P/b c.jpg", "P/P_0002.jpg", "1/1_0001.jpg", "1/1_0002.jpg"]
    wanted += ["R/R_0001.jpg", "R/R_0002.jpg"]
    data = Given([0, 0, 0, 0, 1, 1, 2, 2], names)
    convert(data, tmp_path / target)
    found = open_images(tmp_path / target)
    assert sorted(content(found)) == sorted(content(data))
    if target == "a":  # where folder 1 would come before P
        assert found.name(1) == "0/0_0002.jpg" and "named by their class" in caplog.text
    else:
        assert [found.name(i).removeprefix("a/") for i in range(8)] == wanted
        assert "5 of 8 samples get other names, such as P/P_0003.jpg for 'P/.x.jpg'" in caplog.text


def test_old_line_ends_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a.jpg 0\rb.jpg 1\r")
    with pytest.raises(ValueError, match="line 1: got a carriage return"):
        ImageList(tmp_path / "a.txt")


def test_names_of_any_kind_in_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [jpeg(k) for k in range(3)]
    for names, expected in (
        (["a/1.jpg", None, "b/2.jpg"], ["a/1.jpg", f"{tmp_path}/n.parquet, row 1", "b/2.jpg"]),
        ([7, 8, 9], ["7", "8", "9"]),
        ([b"a", b"\xff", b"c"], ["a", "\udcff", "c"]),
    ):
        parquet.write_table(arrow.table({"image": images, "label": [0, 1, 0], "name": names}), tmp_path / "n.parquet")
        data = ParquetImages(tmp_path / "n.parquet")
        assert [data.name(i) for i in range(3)] == expected
        convert(data, tmp_path / f"{names[0]!s:.1}.tar")


def test_pairs_that_could_mean_two_images(tmp_path: Path) -> None:
    names = ["A/A_0001.jpg", "A/A_0002.jpg", "B/B_0001.jpg", "B/B_0002.jpg", "C/A_0001.jpg"]
    (tmp_path / "p.txt").write_text("1 1\nA 1 2\nA 2 B 1\n")
    with pytest.raises(ValueError, match=r"1 of its images are named alike in several folders.*A_0001"):
        read_pairs(tmp_path / "p.txt", names)
    (tmp_path / "p.txt").write_text("1 1\nB 1 2\nA 2 B 1\n")
    pairs = read_pairs(tmp_path / "p.txt", names)  # the one named alike is not asked for
    assert pairs.first.tolist() == [2, 1] and pairs.second.tolist() == [3, 2]
    (tmp_path / "p.txt").write_text("1 1\nA \u00b2 2\nA 2 B 1\n")
    with pytest.raises(ValueError, match="line 2"):
        read_pairs(tmp_path / "p.txt", names)


def shards(root: Path, count: int) -> list[bytes]:
    """Archives s-000.tar and so on of one image each."""
    images = [jpeg(k) for k in range(count)]
    for k, image in enumerate(images):
        with tarfile.open(root / f"s-{k:03d}.tar", "w") as archive:
            for name, data in ((f"k{k}.jpg", image), (f"k{k}.cls", b"0")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return images


def test_ranges_of_archives(tmp_path: Path) -> None:
    images = shards(tmp_path, 12)
    for pattern, rows in (("s-{000..011}.tar", range(12)), ("s-{009..010}.tar", (9, 10)), ("s-{}.tar", range(12))):
        data = TarShards(tmp_path / pattern)
        assert [data.encoded(i) for i in range(len(data))] == [images[k] for k in rows]
    with pytest.raises(ValueError, match=r"s-012\.tar is missing"):
        TarShards(tmp_path / "s-{000..012}.tar")
    with pytest.raises(ValueError, match="rising"):
        TarShards(tmp_path / "s-{3..1}.tar")


def test_archives_joined_or_cut_between_members(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards(tmp_path, 2)
    first, second = ((tmp_path / f"s-00{k}.tar").read_bytes() for k in (0, 1))
    with caplog.at_level(logging.WARNING):
        TarShards(tmp_path / "s-000.tar")
        assert "archive's end" not in caplog.text and "end mark" not in caplog.text
        (tmp_path / "joined.tar").write_bytes(first + second)
        assert len(TarShards(tmp_path / "joined.tar")) == 1
        assert "behind the archive's end" in caplog.text and "no end mark" not in caplog.text
        (tmp_path / "cut.tar").write_bytes(first.rstrip(b"\0").ljust(-(-len(first.rstrip(b"\0")) // 512) * 512, b"\0"))
        assert len(TarShards(tmp_path / "cut.tar")) == 1
        assert "cut.tar: the archive has no end mark" in caplog.text


def test_what_a_folder_leaves_out_is_told(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ImageFolder(folder)
        assert "left out" not in caplog.text
        (folder / "P0" / "z.gif").write_bytes(b"GIF89a")
        (folder / "P1" / "z.jpg").symlink_to("nowhere.jpg")
        (folder / "P2" / "deep").mkdir()
        (folder / "top.jpg").write_bytes(jpeg(0))
        (folder / "P2" / ".hidden").touch()
        assert len(ImageFolder(folder)) == 12
    assert "4 entries are left out, such as P0/z.gif" in caplog.text


def test_damage_in_a_packed_archive_is_a_bad_image(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for k in range(2):
            archive.writestr(f"P/{k}.jpg", jpeg(k))
        start = archive.infolist()[1].header_offset
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[start + 40 : start + 80] = b"\xff" * 40
    (tmp_path / "a.zip").write_bytes(data)
    images = ImageFolder(tmp_path / "a.zip")
    assert images.encoded(0) == jpeg(0)
    with pytest.raises(ValueError, match=rf"a\.zip: the member at byte {start} is damaged"):
        images.encoded(1)


def test_lmdb_cut_short_is_refused(folder: Path, tmp_path: Path) -> None:
    """Reading what is mapped beyond the end would end the process with a bus error."""
    pytest.importorskip("lmdb")
    convert(open_images(folder), tmp_path / "a.lmdb")
    whole = (tmp_path / "a.lmdb").read_bytes()
    (tmp_path / "b.lmdb").write_bytes(whole[:-4096])
    with pytest.raises(ValueError, match=f"ends at byte {len(whole) - 4096} of {len(whole)}"):
        LMDBImages(tmp_path / "b.lmdb")


def test_rows_upside_down_or_all_one_at_the_end_of_memory() -> None:
    """Mirroring reads sixteen bytes at a time: none behind the last row in memory, whatever the order of rows."""
    program = """
import ctypes, mmap
import numpy as np
from plsc.data import pixels
memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
page = np.frombuffer(memory, np.uint8, mmap.PAGESIZE)
page[:] = np.arange(mmap.PAGESIZE) % 251
assert libc.mprotect(address + mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
image = page[-240:].reshape(4, 20, 3)
for rows in (image, image[::-1], np.broadcast_to(image[3:], (4, 20, 3))):
    out = np.empty(rows.shape, np.uint8)
    pixels.mirror(rows, out)
    assert np.array_equal(out, rows[:, ::-1])
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# Files that change or fail while they are read


@pytest.mark.parametrize("kind", ["rec", "tar", "parquet"])
@pytest.mark.parametrize("mishap", ["cut", "eio"])
def test_a_file_that_fails_while_it_is_read_is_a_bad_image(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mishap: str
) -> None:
    """A memory map would end the process. Of the 12 images the last is lost, so 3 epochs replace it 3 times."""
    path = tmp_path / f"a.{kind}"
    convert(open_images(folder), path)
    data = open_images(path, image_size=8)
    loader = Loader(data, 4, on_bad_image="redraw")
    whole, last = [data.encoded(i) for i in range(12)], path.read_bytes().rindex(data.encoded(11))
    if mishap == "cut":
        os.truncate(path, last + 1)
        said = "cut short"
    else:
        pread = os.pread

        def fail(number: int, size: int, offset: int) -> bytes:
            if offset + size > last:
                raise OSError(errno.EIO, "Input/output error")
            return pread(number, size, offset)

        monkeypatch.setattr(os, "pread", fail)
        said = "Input/output error"
    assert [data.encoded(i) for i in range(11)] == whole[:11]
    with pytest.raises((OSError, ValueError), match=said) as caught:
        data.encoded(11)
    assert str(path) in str(caught.value)
    assert len(list(loader.epochs(3))) == 9 and loader.num_bad == 3
