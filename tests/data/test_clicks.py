"""Click logs: formats, places to go on from, shuffling, malformed lines, several readers."""

import gzip
import logging
from pathlib import Path

import pytest
import torch

from plsc.data.clicks import CRITEO, Clicks, Columns, LibSVM

CSV = Columns(label=0, dense=[1], sparse=[2, 3], header=True)


def write(path: Path, rows: range, bad: int = 0) -> Path:
    lines = ["click,number,a,b", *(f"{i % 2},{i},{i % 7},x{i}" for i in rows), *(["nonsense"] * bad)]
    path.write_text("\n".join(lines) + "\n")
    return path


def numbers(batches: object) -> list[int]:
    """The number column of all rows, which tells them apart."""
    return [round(x) for dense, _, _ in batches for x in torch.expm1(dense[:, 0]).tolist()]


def test_criteo_with_missing_fields(tmp_path: Path) -> None:
    line = "\t".join(["1", "3", "", "-1", *["0"] * 10, *[f"{i:08x}" for i in range(25)], ""])
    other = "\t".join(["0", *[""] * 13, *[f"{i:08x}" for i in range(26)]])
    with gzip.open(tmp_path / "day.gz", "wt") as file:
        file.write(f"{line}\n{other}\n")
    ((dense, ids, clicked),) = Clicks(tmp_path / "day.gz", CRITEO)
    assert dense.shape == (2, 13) and ids.shape == (2, 26) and clicked.tolist() == [1, 0]
    torch.testing.assert_close(dense[0, :3], torch.tensor([4.0, 1.0, 1.0]).log())
    assert (ids[0, :25] == ids[1, :25]).all() and ids[0, 25] != ids[1, 25]
    assert dense.dtype == torch.float32 and ids.dtype == torch.int64 and ids.unique().numel() == 27


def test_libsvm(tmp_path: Path) -> None:
    path = tmp_path / "f.libsvm"
    path.write_text("1 3:1 5:1 9:1\n-1 5:1 3:1\n")
    ((dense, ids, clicked),) = Clicks(path, LibSVM(3), slots=False)
    assert dense.shape == (2, 0) and clicked.tolist() == [1, 0]
    assert ids[0, 0] == ids[1, 1] and ids[0, 1] == ids[1, 0] and ids[1, 2] not in ids[0]


def test_order_and_batches(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", range(10))
    write(tmp_path / "b.csv", range(10, 25))
    clicks = Clicks(tmp_path / "*.csv", CSV, batch_size=8)
    assert [len(batch[2]) for batch in clicks] == [8, 8, 8, 1]
    assert numbers(clicks) == list(range(25)) and clicks.epoch == 2


@pytest.mark.parametrize("shuffle", [0, 20])
def test_goes_on_where_it_stopped(tmp_path: Path, shuffle: int) -> None:
    write(tmp_path / "a.csv", range(33), bad=0)
    write(tmp_path / "ab.csv", range(0), bad=1)
    write(tmp_path / "b.csv", range(33, 100))
    options = {"format": CSV, "batch_size": 6, "shuffle": shuffle, "seed": 4}
    whole = list(Clicks(tmp_path / "*.csv", **options))
    assert sorted(numbers(whole)) == list(range(100))
    assert (numbers(whole) == list(range(100))) == (shuffle == 0)
    for stop in range(len(whole)):
        first = Clicks(tmp_path / "*.csv", **options)
        batches = iter(first)
        for _ in range(stop):
            next(batches)
        second = Clicks(tmp_path / "*.csv", **options)
        second.load_state_dict(first.state_dict())
        assert numbers(second) == numbers(whole[stop:])


def test_shuffling_differs_between_epochs(tmp_path: Path) -> None:
    clicks = Clicks(write(tmp_path / "a.csv", range(50)), CSV, batch_size=5, shuffle=50)
    first, second = numbers(clicks), numbers(clicks)
    assert sorted(first) == sorted(second) == list(range(50)) and first != second
    assert numbers(Clicks(tmp_path / "a.csv", CSV, batch_size=5, shuffle=50)) == first


def test_malformed_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = write(tmp_path / "few.csv", range(300), bad=2)
    clicks = Clicks(few, CSV, batch_size=100)
    with caplog.at_level(logging.WARNING):
        seen = [clicks.malformed for _ in clicks]
    assert seen == [0, 0, 0] and "line 302" in caplog.text
    assert "few.csv, line 303 is malformed: got 1 columns, expected 4" in caplog.text
    with pytest.raises(ValueError, match="20 of 320 lines"):
        list(Clicks(write(tmp_path / "many.csv", range(300), bad=20), CSV))
    for line in ("2,1,a,b", "1,nan,a,b", "1,x,a,b", "1,1"):
        with pytest.raises(ValueError):
            CSV.parse(line)
    for line in ("1 a:1", "1 3:2", "7 3:1", "1 1:1 2:1 3:1 4:1"):
        with pytest.raises(ValueError, match="expected"):
            LibSVM(3).parse(line)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no file"):
        Clicks(tmp_path / "missing*")
    with pytest.raises(ValueError, match="batch_size"):
        Clicks(write(tmp_path / "a.csv", range(3)), CSV, batch_size=0)
    with pytest.raises(ValueError, match="2 readers"):
        Clicks(tmp_path / "a.csv", CSV).load_state_dict({"readers": 2})


@pytest.mark.slow
def test_several_readers(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / f"{i}.csv", range(100 * i, 100 * i + 100), bad=i == 1)
    options = {"format": CSV, "batch_size": 16, "readers": 2}
    whole = Clicks(tmp_path / "*.csv", **options)
    assert sorted(numbers(whole)) == list(range(300)) and whole.epoch == 1
    first = Clicks(tmp_path / "*.csv", **options)
    batches = iter(first)
    seen = numbers([next(batches) for _ in range(5)])
    second = Clicks(tmp_path / "*.csv", **options)
    second.load_state_dict(first.state_dict())
    batches.close()
    assert sorted(seen + numbers(second)) == list(range(300))
    write(tmp_path / "2.csv", range(10), bad=50)
    with pytest.raises(ValueError, match="malformed"):
        list(Clicks(tmp_path / "*.csv", **options))


def test_real_criteo_rows(shared: Path) -> None:
    rows = 0
    for dense, ids, clicked in Clicks(shared / "data" / "ctr" / "criteo_train.tsv.gz", batch_size=1000):
        assert torch.isfinite(dense).all() and ids.shape[1] == 26 and 0 < clicked.mean() < 1
        rows += len(clicked)
    assert rows == 6400
