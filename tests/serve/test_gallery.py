"""The gallery keeps what it acknowledged: as a dict, cut at every byte, damaged, locked, killed, on a full disk."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import plsc.serve.gallery as gallery_module
from plsc.serve.gallery import (
    Entry,
    FileGallery,
    FolderGallery,
    NewEntry,
    ReadOnly,
    Taken,
    UnknownEntry,
    check_name,
    open_gallery,
)
from plsc.serve.journal import Journal, Locked
from plsc.train.export import export_centres, export_embeddings

DIM, DIGEST = 8, "0" * 64


def unit(seed: int) -> np.ndarray:
    row = np.random.default_rng(seed).standard_normal(DIM)
    return (row / np.linalg.norm(row)).astype(np.float32)


def opened(folder: Path) -> FolderGallery:
    found = open_gallery(folder, dim=DIM, digest=DIGEST)
    assert isinstance(found, FolderGallery)
    return found


def content(gallery: FolderGallery) -> dict[str, tuple[str, bytes, bytes | None]]:
    """All there is: by id its name, its embedding as the search sees it, its thumbnail."""
    _, entries = gallery.entries(limit=10**6)
    rows = {entry.id: gallery._index.row(gallery._rows[entry.id]).tobytes() for entry in entries}
    return {entry.id: (entry.name, rows[entry.id], gallery.thumbnail(entry.id)) for entry in entries}


def test_random_changes_as_a_dict_and_after_opening_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery_module, "COMPACT_BYTES", 500)
    rng, gallery, wanted = np.random.default_rng(0), opened(tmp_path / "g"), {}
    sizes = []
    for step in range(150):
        if wanted and rng.random() < 0.45:
            id = sorted(wanted)[int(rng.integers(len(wanted)))]
            gallery.remove([id])
            del wanted[id]
        else:
            new = [NewEntry(f"name {step}", unit(step), thumbnail=b"jpg" * int(rng.integers(3)))]
            (entry,) = gallery.add(new)
            wanted[entry.id] = (entry.name, new[0].embedding.tobytes(), new[0].thumbnail or None)
        sizes.append(gallery._journal.size)
        if step % 30 == 0:
            gallery.close()
            gallery = opened(tmp_path / "g")
        assert content(gallery) == wanted and len(gallery) == len(wanted)
    assert any(after < before for before, after in pairwise(sizes))  # written anew, smaller
    scores, _, found = gallery.search(unit(3)[None], 5)
    best = sorted(wanted, key=lambda id: -float(np.frombuffer(wanted[id][1], np.float32) @ unit(3)))[:5]
    assert [entry.id for entry in found[0]] == best and scores.shape == (1, 5)
    gallery.close()


def test_a_file_cut_anywhere_reads_as_the_whole_records_before(tmp_path: Path) -> None:
    gallery = opened(tmp_path / "g")
    journal, states = tmp_path / "g" / "journal", [(0, {})]
    states.append((journal.stat().st_size, content(gallery)))
    for change in range(4):
        if change == 2:
            gallery.remove(["id1"])
        else:
            gallery.add([NewEntry("a", unit(change), id=f"id{change}", thumbnail=b"x" * 5), NewEntry("b", unit(9))])
        states.append((journal.stat().st_size, content(gallery)))
    gallery.close()
    data = journal.read_bytes()
    first = states[1][0]
    for cut in range(first, len(data) + 1):
        copy = tmp_path / "copy"
        copy.mkdir(exist_ok=True)
        (copy / "journal").write_bytes(data[:cut] + (b"\0" * 40 if cut % 3 == 0 else b""))
        again = opened(copy)
        assert content(again) == [state for size, state in states if size <= cut][-1]
        again.add([NewEntry("after", unit(1), id="after")])  # and it goes on from there
        again.close()
        again = opened(copy)
        assert "after" in content(again)
        again.close()


def test_damage_before_whole_records_is_no_crash(tmp_path: Path) -> None:
    gallery = opened(tmp_path / "g")
    for change in range(3):
        gallery.add([NewEntry("a", unit(change))])
    gallery.close()
    path = tmp_path / "g" / "journal"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged, and whole ones follow"):
        opened(tmp_path / "g")
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="no journal of plsc"):
        opened(tmp_path / "g")


def test_a_last_record_that_is_all_there_and_wrong_is_left_out_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any byte of a removal that is flipped: all before it is read, it is told, and its bytes are in a file beside."""
    gallery = opened(tmp_path / "g")
    gallery.add([NewEntry("a", unit(0), id="one"), NewEntry("b", unit(1), id="two")])
    path = tmp_path / "g" / "journal"
    before = path.stat().st_size
    gallery.remove(["one"])
    gallery.close()
    data = path.read_bytes()
    for at in range(before, len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        caplog.clear()
        again = opened(tmp_path / "g")
        assert list(content(again)) == ["one", "two"] and path.read_bytes() == data[:before]
        again.close()
        (kept,) = path.parent.glob("journal.cut-*")
        assert kept.read_bytes() == damaged[before:] and kept.stat().st_mode & 0o777 == 0o600
        assert f"at byte {before}, is all there" in caplog.text and kept.name in caplog.text
        kept.unlink()
    path.write_bytes(data)
    again = opened(tmp_path / "g")
    assert list(content(again)) == ["two"]
    again.close()


def test_pages_that_reach_the_disk_in_any_order(tmp_path: Path) -> None:
    """A loss of power before fsync returned: any of the last record's pages may be zeros, and it is never there."""
    gallery = opened(tmp_path / "g")
    gallery.add([NewEntry("a", unit(0), id="one")])
    path = tmp_path / "g" / "journal"
    before = path.stat().st_size
    gallery.add([NewEntry("b", unit(1), id="two", thumbnail=np.random.default_rng(0).bytes(20_000))])
    gallery.close()
    data = path.read_bytes()
    pages = range(before - before % 4096, len(data), 4096)
    assert len(pages) == 5
    for lost in range(1, 2 ** len(pages)):
        torn = bytearray(data)
        for number, start in enumerate(pages):
            if lost >> number & 1:
                first, last = max(start, before), min(start + 4096, len(data))
                torn[first:last] = bytes(last - first)
        path.write_bytes(torn)
        again = opened(tmp_path / "g")
        assert list(content(again)) == ["one"]
        again.add([NewEntry("c", unit(2), id="three")])
        again.close()
        again = opened(tmp_path / "g")
        assert list(content(again)) == ["one", "three"]
        again.close()


@pytest.mark.parametrize("name", ["journal", "journal.lock"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_lost_its_name_takes_nothing(tmp_path: Path, name: str, replaced: bool) -> None:
    gallery = opened(tmp_path / "g")
    gallery.add([NewEntry("a", unit(0), id="first")])
    (tmp_path / "g" / name).rename(tmp_path / "aside")
    if replaced:
        (tmp_path / "g" / name).write_bytes((tmp_path / "aside").read_bytes())
    for change in (lambda: gallery.add([NewEntry("b", unit(1), id="second")]), lambda: gallery.remove(["first"])):
        with pytest.raises(OSError, match="was deleted or replaced"):
            change()
        assert list(content(gallery)) == ["first"]
    (tmp_path / "aside").rename(tmp_path / "g" / name)  # and it goes on once the file is back
    gallery.add([NewEntry("c", unit(2), id="third")])
    gallery.close()
    again = opened(tmp_path / "g")
    assert list(content(again)) == ["first", "third"]
    again.close()


@pytest.mark.parametrize(
    "name",
    [
        "\u0645\u06cc\u200c\u0631\u0648\u0645",  # a Persian word
        "\u0d28\u0d4d\u200d",  # a Malayalam letter
        "Ada \U0001f469\u200d\U0001f52c",
        "\u2764\ufe0f\u200d\U0001f525",
        "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",  # England
        "\u674e \u96f7",
        " Ada ",
    ],
)
def test_names_of_all_scripts(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["   ", "\u3000", "\u2028", "a\u2028b", "\u3164", "\u2800\u115f", "\u0301", "\u200d", "a\u200d", "\u200ca",
     "a\u200d\u200db", "a\u200bb", "a \u200d b", "a\U000e0067", "\ufeffa", "a\x7f", "\ud800"],
)  # fmt: skip
def test_names_that_hide_something(name: str) -> None:
    with pytest.raises(ValueError, match="seen"):
        check_name(name)


def test_a_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused is not there, neither now nor after opening again; what comes later is."""
    gallery = opened(tmp_path / "g")
    gallery.add([NewEntry("a", unit(0), id="first")])

    def full(number: int) -> None:
        monkeypatch.undo()  # the disk has room again when it comes to cutting back
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plsc.serve.journal.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        gallery.add([NewEntry("b", unit(1), id="second")])
    assert list(content(gallery)) == ["first"]
    gallery.add([NewEntry("c", unit(2), id="third")])
    gallery.close()
    again = opened(tmp_path / "g")
    assert list(content(again)) == ["first", "third"]
    again.close()


def test_one_at_a_time(tmp_path: Path) -> None:
    gallery = opened(tmp_path / "g")
    with pytest.raises(Locked, match="in use by another server"):
        opened(tmp_path / "g")
    gallery.close()
    opened(tmp_path / "g").close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_its_files_are_their_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    """Faces are personal data: made, grown and written anew under any umask, and what a killed rewrite left goes."""
    monkeypatch.setattr(gallery_module, "COMPACT_BYTES", 100)
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / ".journal.0123abcd.tmp").write_bytes(b"Ada")
    before = os.umask(umask)
    try:
        gallery = opened(tmp_path / "g")
        gallery.add([NewEntry("a", unit(0), id="a", thumbnail=b"jpg" * 50)])
        size = gallery._journal.size
        gallery.remove(["a"])
        assert gallery._journal.size < size  # it was written anew
        gallery.close()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "g").iterdir()}
    assert modes.pop("journal") == 0o600 and modes.keys() == {"journal.lock"} and not modes["journal.lock"] & 0o077
    (tmp_path / "g" / "journal.lock").chmod(0o600)
    opened(tmp_path / "g").close()


def test_files_that_others_can_read_are_narrowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path / "g").close()
    path = tmp_path / "g" / "journal"
    assert not caplog.text
    for mode in (0o644, 0o660, 0o604):
        path.chmod(mode)
        opened(tmp_path / "g").close()
        assert path.stat().st_mode & 0o777 == 0o600 and f"others could read it (mode {mode:o})" in caplog.text


def test_another_model_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "g").close()
    with pytest.raises(ValueError, match="holds embeddings of the model 000000000000"):
        open_gallery(tmp_path / "g", dim=DIM, digest="1" * 64)
    with pytest.raises(ValueError, match="holds embeddings of size 8, expected 9"):
        open_gallery(tmp_path / "g", dim=9, digest=DIGEST)
    opened(tmp_path / "g").close()  # the lock of the refused one is gone


@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        (NewEntry("", unit(0)), ValueError, "name: got ''"),
        (NewEntry("x" * 257, unit(0)), ValueError, "1 to 256 characters"),
        (NewEntry("a\nb", unit(0)), ValueError, "cannot be seen"),
        (NewEntry("a\u202eb", unit(0)), ValueError, "cannot be seen"),
        (NewEntry("a", unit(0) * 2), ValueError, "length off 1"),
        (NewEntry("a", np.full(DIM, np.nan, np.float32)), ValueError, "nan or infinite"),
        (NewEntry("a", np.ones(3, np.float32)), ValueError, "expected \\[at least 1, 8\\]"),
        (NewEntry("a", unit(0), id="there"), Taken, "'there' is taken"),
    ],
)
def test_entries_that_are_refused_leave_nothing(
    tmp_path: Path, entry: NewEntry, error: type[Exception], words: str
) -> None:
    gallery = opened(tmp_path / "g")
    gallery.add([NewEntry("a", unit(0), id="there")])
    with pytest.raises(error, match=words):
        gallery.add([NewEntry("fine", unit(1)), entry] if len(entry.embedding) == DIM else [entry])
    with pytest.raises(UnknownEntry):
        gallery.remove(["there", "not there"])
    with pytest.raises(Taken):
        gallery.add([NewEntry("a", unit(1), id="twice"), NewEntry("a", unit(1), id="twice")])
    assert list(content(gallery)) == ["there"]
    gallery.close()


def test_names_are_never_paths(tmp_path: Path) -> None:
    gallery = opened(tmp_path / "g")
    gallery.add([NewEntry("../../escape", unit(0)), NewEntry("/etc/passwd", unit(1))])
    gallery.close()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["g", "journal", "journal.lock"]
    again = opened(tmp_path / "g")
    assert again.entries(text="ESCAPE") == (1, again.entries(limit=1)[1])
    again.close()


def test_a_file_of_embeddings_is_a_gallery(tmp_path: Path) -> None:
    rows = np.stack([unit(i) for i in range(20)]) * 7
    path = export_embeddings(
        tmp_path / "e.safetensors", rows, labels=range(20), names=[f"n{i}/img.jpg" for i in range(20)], digest=DIGEST
    )
    gallery = open_gallery(path, dim=DIM, digest=DIGEST)
    assert isinstance(gallery, FileGallery) and len(gallery) == 20 and not gallery.writable
    _, _, found = gallery.search(unit(7)[None], 50)
    assert found[0][0] == Entry("7", "n7/img.jpg") and len(found[0]) == 20
    assert gallery.entries(offset=18, limit=5) == (20, [Entry("18", "n18/img.jpg"), Entry("19", "n19/img.jpg")])
    assert gallery.entries(text="N12")[1] == [Entry("12", "n12/img.jpg")]
    with pytest.raises(ReadOnly):
        gallery.add([NewEntry("a", unit(0))])
    with pytest.raises(ReadOnly):
        gallery.remove(["1"])
    assert gallery.thumbnail("1") is None
    for id in ("20", "-1", "x", "\u0663"):
        with pytest.raises(UnknownEntry):
            gallery.thumbnail(id)
    with pytest.raises(ValueError, match="was made by the model 000000000000"):
        open_gallery(path, dim=DIM, digest="1" * 64)


WRITER = """
import sys, numpy as np
from plsc.serve.gallery import NewEntry, open_gallery
g = open_gallery(sys.argv[1], dim=8, digest="0" * 64)
row = np.zeros(8, np.float32); row[0] = 1
for i in range(10**6):
    g.add([NewEntry("a", row, id=f"{i}-{j}", thumbnail=b"t" * 3000) for j in range(3)])
    print(i, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 7, 40])
def test_killed_while_it_adds(tmp_path: Path, lines: int) -> None:
    """All that was acknowledged is there after kill -9; of what was not, all three entries or none."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WRITER, str(tmp_path / "g")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(lines)]
        os.kill(child.pid, signal.SIGKILL)
        said += [int(line) for line in child.stdout if line.strip().isdigit()]
    gallery = opened(tmp_path / "g")
    ids = set(content(gallery))
    kept = {int(id.split("-")[0]) for id in ids}
    assert set(said) <= kept and ids == {f"{i}-{j}" for i in kept for j in range(3)}
    assert max(kept) <= max(said) + 1
    gallery.close()


def test_journal_keeps_what_a_failed_rewrite_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.read()
    journal.append(b"one")

    def failing() -> object:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        journal.rewrite(failing())  # type: ignore[arg-type]
    journal.append(b"two")
    journal.close()
    again = Journal(tmp_path)
    assert again.read() == [b"one", b"two"]
    again.rewrite([json.dumps(1).encode()])
    again.append(b"three")
    again.close()
    last = Journal(tmp_path)
    assert last.read() == [b"1", b"three"]
    last.close()


def test_folders_of_other_files_are_no_gallery(tmp_path: Path) -> None:
    for name in ("centres.safetensors", "model.onnx", "notes.txt"):
        (tmp_path / "export").mkdir(exist_ok=True)
        (tmp_path / "export" / name).touch()
        with pytest.raises(ValueError, match=f"got a folder of .*{name}.* such as .*export/gallery"):
            opened(tmp_path / "export")
        assert not (tmp_path / "export" / "journal.lock").exists()
        (tmp_path / "export" / name).unlink()
    (tmp_path / "export" / "journal.lock").touch()  # killed at its very start
    opened(tmp_path / "export").close()
    (tmp_path / "export" / "notes.txt").touch()  # beside a gallery nothing is anybody's business
    opened(tmp_path / "export").close()


def test_class_centres_and_broken_names_are_no_gallery(tmp_path: Path) -> None:
    centres = export_centres(tmp_path / "c.safetensors", np.eye(DIM), digest=DIGEST)
    with pytest.raises(ValueError, match=r"got plsc-centres, expected plsc-embeddings; write one with plsc-embed"):
        open_gallery(centres, dim=DIM, digest=DIGEST)
    path = export_embeddings(
        tmp_path / "e.safetensors", np.eye(DIM), labels=range(DIM), names=["\u00e9"] * DIM, digest=DIGEST
    )
    data = path.read_bytes()
    assert len(open_gallery(path, dim=DIM, digest=DIGEST)) == DIM
    path.write_bytes(data.replace("\u00e9".encode(), b"e\xff"))
    with pytest.raises(ValueError, match="a name that is no UTF-8"):
        open_gallery(path, dim=DIM, digest=DIGEST)
