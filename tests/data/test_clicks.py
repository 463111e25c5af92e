"""Click logs: formats, places to go on from, shuffling, malformed lines, several readers."""

import gzip
import hashlib
import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data.click_formats import Hasher, parse_lines, split_lines
from plsc.data.clicks import CRITEO, Clicks, Columns, LibSVM, MultiSlot, Parquet

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


@pytest.mark.parametrize("readers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_place_is_told_again_as_it_was_given(tmp_path: Path, readers: int) -> None:
    write(tmp_path / "a.csv", range(1000), bad=3)
    options = {"format": CSV, "batch_size": 10, "shuffle": 100, "readers": readers}
    clicks = Clicks(tmp_path / "a.csv", **options)
    batches = iter(clicks)
    for _ in range(57 if readers == 1 else 7):
        next(batches)
        state = json.loads(json.dumps(clicks.state_dict()))
        other = Clicks(tmp_path / "a.csv", **options)
        other.load_state_dict(state)
        assert json.loads(json.dumps(other.state_dict())) == state
    batches.close()


def test_lines_count_once_however_often_reading_is_broken_off(tmp_path: Path) -> None:
    clicks = Clicks(write(tmp_path / "a.csv", range(400), bad=2), CSV, batch_size=10, shuffle=50)
    seen = []
    while clicks.epoch == 0:
        seen += [next(iter(clicks))] if len(seen) < 30 else list(clicks)
    assert clicks.counts() == (2, 402) and sorted(numbers(seen)) == list(range(400))
    list(clicks)
    assert clicks.counts() == (2, 402)


def test_a_place_from_another_pass_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", range(40))
    write(tmp_path / "b.csv", range(40))
    options = {"format": CSV, "batch_size": 10, "shuffle": 20}
    state = Clicks(tmp_path / "*.csv", **options).state_dict()
    for name, value in {"seed": 1, "split": "train", "test_share": 0.2, "slots": False}.items():
        with pytest.raises(ValueError, match=f"with {name} .*expected {value}"):
            Clicks(tmp_path / "*.csv", **options, **{name: value}).load_state_dict(state)
    turned = Clicks([tmp_path / "b.csv", tmp_path / "a.csv"], **options)
    with pytest.raises(ValueError, match="with files"):
        turned.load_state_dict(state)
    for place in ([-1, 0], [0, -1], [3, 0]):
        with pytest.raises(ValueError, match=f"file {place[0]}, line {place[1]}"):
            Clicks(tmp_path / "*.csv", **options).load_state_dict({**state, "place": place})
    for name in state:
        with pytest.raises(ValueError, match=f"without {name}"):
            Clicks(tmp_path / "*.csv", **options).load_state_dict({k: v for k, v in state.items() if k != name})


def test_names_of_files_are_not_patterns_and_directories_no_files(tmp_path: Path) -> None:
    write(tmp_path / "day[1].csv", range(3))
    assert numbers(Clicks(tmp_path / "day[1].csv", CSV)) == [0, 1, 2]
    (tmp_path / "day_2").mkdir()
    with pytest.raises(ValueError, match="day_2, which is a directory"):
        Clicks(tmp_path / "day*", CSV)


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
    with pytest.raises(ValueError, match="windows of 4096 lines, expected 16"):
        Clicks(tmp_path / "a.csv", CSV, batch_size=16).load_state_dict(Clicks(tmp_path / "a.csv", CSV).state_dict())
    for wrong in ({"batch_size": 2.5}, {"shuffle": "1"}, {"readers": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Clicks(tmp_path / "a.csv", CSV, **wrong)
    for columns in ((0, [-1], [2]), (0, [1], ["b"]), (0, [1], [2], "||")):
        with pytest.raises(ValueError, match="expected"):
            Columns(*columns)
    with pytest.raises(ValueError, match="split 'val'"):
        Clicks(tmp_path / "a.csv", CSV, split="val")
    with pytest.raises(ValueError, match="label"):
        MultiSlot(["ids", "ids"])


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"1,2,x,y\n" * 9000)
    for name, data in (
        ("cut.gz", whole[:-20]),
        ("flipped.gz", whole[:40] + b"\0" * 9 + whole[49:]),
        ("no.gz", b"1,2,x,y"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            list(Clicks(tmp_path / name, Columns(0, [1], [2])))
    (tmp_path / "a.parquet").write_bytes(b"PAR1xx")
    with pytest.raises(ValueError, match=r"a\.parquet is no Parquet file"):
        list(Clicks(tmp_path / "a.parquet", Parquet("y", [], ["a"])))


def test_a_file_that_became_shorter_is_not_gone_on_with(tmp_path: Path) -> None:
    options = {"format": CSV, "batch_size": 10}
    parquet = {"format": Parquet("click", ["number"], ["a", "b"]), "batch_size": 10}
    for path, how in ((tmp_path / "a.csv", options), (tmp_path / "a.parquet", parquet)):
        for count in (100, 20):
            write(tmp_path / "a.csv", range(count))
            pq.write_table(pa.csv.read_csv(tmp_path / "a.csv"), tmp_path / "a.parquet", row_group_size=7)
            clicks = Clicks(path, **how)
            if count == 100:
                batches = iter(clicks)
                for _ in range(5):
                    next(batches)
                place = clicks.state_dict()
        clicks.load_state_dict(place)
        with pytest.raises(ValueError, match="has 20 records, expected more than the 50"):
            list(clicks)
    with pytest.raises(ValueError, match="a place in file 2"):
        clicks.load_state_dict({**place, "place": [2, 0]})


def columns_by_python(path: Path, format: Columns) -> list[torch.Tensor]:
    lines = split_lines(path.read_bytes())[format.header :]
    parsed = parse_lines(format, [line for line in lines if line.strip()], Hasher(format.num_slots, slots=True))
    return [torch.from_numpy(array) for array in parsed[1:4]]


QUOTED = Columns(0, [2], [1, 3], quote='"')


@pytest.mark.parametrize(
    ("format", "lines"),
    [
        (CSV, ["c,n,a,b", "1,3,x,y", " 0 , 4.5 , x , z ", "1,,,", "", "0,-2,x,y", "1,1e3,ä,x\r"]),
        (CSV, ["c,n,a,b", *["1,1,a,b"] * 200, "0,7,a,b,more", "1,1", *["0,2,c,d"] * 200, "1,x,y,z"]),
        (CSV, ["c,n,a,b", *["1,1,a,b"] * 200, "1,inf,a,b"]),
        (CSV, ["c,n,a,b", *["1,1,a,b"] * 200, "yes,1,a,b"]),
        (CSV, ["c,n,a,b", "1,1", *["1,1,a,b"] * 200]),
        (QUOTED, ['1,"a,b",3,"say ""no"""', '0,a,"4",b', '1,"",,"ü"']),
    ],
)
def test_pyarrow_reads_as_python_does(tmp_path: Path, format: Columns, lines: list[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines) + "\n")
    clicks = Clicks(path, format, batch_size=500)
    ((dense, ids, clicked),) = clicks
    for got, expected in zip((dense, ids, clicked), columns_by_python(path, format), strict=True):
        assert torch.equal(got, expected)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"1,2,\xff\xfe,b\n0,3,\xff\xfd,b\n")
    format = Columns(label=0, dense=[1], sparse=[2, 3])
    ((_, ids, _),) = Clicks(path, format)
    assert torch.equal(ids, columns_by_python(path, format)[1])
    raw = [hashlib.blake2b(b"0\t" + token, digest_size=8).digest() for token in (b"\xff\xfe", b"\xff\xfd")]
    assert ids[:, 0].tolist() == [int.from_bytes(digest, "little", signed=True) for digest in raw]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("header", [False, True])
def test_byte_order_marks_and_line_ends_do_not_count(
    tmp_path: Path, header: bool, end: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    format = Columns(0, [1], [2], header=header)
    lines = [*(["y,x,s"] if header else []), *(f"{i % 2},{i},t{i}" for i in range(50))]
    text = b"\xef\xbb\xbf" + (end.join(lines) + end).encode()
    path = tmp_path / ("a.csv.gz" if packed else "a.csv")
    path.write_bytes(gzip.compress(text) if packed else text)
    # pyarrow takes blocks with either line end whole: none is read line by line.
    monkeypatch.setattr("plsc.data.click_formats.parse_lines", None)
    batches = list(Clicks(path, format, batch_size=20))
    assert numbers(batches) == list(range(50))
    expected = Hasher(1, slots=True).column(0, [f"t{i}" for i in range(50)])
    assert torch.cat([ids for _, ids, _ in batches])[:, 0].tolist() == expected.tolist()


def test_numbers_beyond_float32_are_malformed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"1 {i % 2} 1 {'1e300' if i == 7 else i} 1 5\n" for i in range(200)))
    clicks = Clicks(path, MultiSlot(["label", ("dense", 1), "ids"]))
    ((dense, _, _),) = clicks
    assert dense.isfinite().all() and len(dense) == 199 and "a.txt, line 8 is malformed" in caplog.text


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=100), st.text('01,"\n ax\r', max_size=60).map(str.encode)))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Both readers agree on garbage, too, and neither falls over."""
    kept = b"\n".join(line for line in data.split(b"\n") if line.strip())
    for format in (Columns(0, [1], [2]), Columns(0, [], [1], quote='"'), Columns(0, [1], [2], num_columns=4)):
        if not kept:
            continue
        fast = format.parse_block(kept, Hasher(1, slots=True))
        slow = parse_lines(format, split_lines(kept), Hasher(1, slots=True))
        for a, b in zip(fast[:4], slow[:4], strict=True):
            assert a.tolist() == b.tolist()
        assert [place for place, _ in fast.bad] == [place for place, _ in slow.bad]


def test_parquet(tmp_path: Path) -> None:
    """The same rows as the CSV file, whatever the types of its columns."""
    text = write(tmp_path / "a.csv", range(1000))
    rows = {
        "click": [i % 2 == 1 for i in range(1000)],
        "number": list(range(1000)),
        "a": pa.array([i % 7 for i in range(1000)], pa.int16()),
        "b": pa.array([f"x{i}" for i in range(1000)]).dictionary_encode(),
        "other": [[]] * 1000,
    }
    pq.write_table(pa.table(rows), tmp_path / "a.parquet", row_group_size=300)
    format = Parquet(label="click", dense=["number"], sparse=["a", "b"])
    expected = list(Clicks(text, CSV, batch_size=128, shuffle=256))
    clicks = Clicks(tmp_path / "a.parquet", format, batch_size=128, shuffle=256)
    for got, wanted in zip(clicks, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    batches = iter(clicks)
    seen = numbers([next(batches) for _ in range(4)])
    second = Clicks(tmp_path / "a.parquet", format, batch_size=128, shuffle=256)
    second.load_state_dict(clicks.state_dict())
    assert sorted(seen + numbers(second)) == list(range(1000))
    with pytest.raises(ValueError, match="no column c"):
        next(iter(Clicks(tmp_path / "a.parquet", Parquet("click", [], ["c"]))))


PARQUET_COLUMNS = {
    "truth": ([True, False], pa.bool_(), ["1", "0"]),
    "float": ([1e20, 1e-7, 2.0], pa.float64(), ["100000000000000000000", "1e-07", "2"]),
    "narrow": ([0.1, 3.0], pa.float32(), ["0.1", "3"]),
    "int": ([7, -1], pa.int64(), ["7", "-1"]),
    "text": (["a", " b"], pa.string(), ["a", "b"]),
    "bytes": ([b"a", b"b"], pa.binary(), ["a", "b"]),
    "packed": (["a", "b"], pa.dictionary(pa.int8(), pa.string()), ["a", "b"]),
    "time": ([0, 1_500_000], pa.timestamp("us"), ["1970-01-01 00:00:00.000000", "1970-01-01 00:00:01.500000"]),
    "nano": ([0, 1], pa.timestamp("ns"), ["1970-01-01 00:00:00.000000000", "1970-01-01 00:00:00.000000001"]),
    "long": ([5, 60], pa.duration("s"), ["5", "60"]),
}


@pytest.mark.parametrize("name", PARQUET_COLUMNS)
def test_a_parquet_token_has_one_id_whatever_is_missing_beside_it(tmp_path: Path, name: str) -> None:
    values, kind, words = PARQUET_COLUMNS[name]
    count = 20 // len(values)
    column = pa.array([*values * count, None, *values * count], pa.int64() if "stamp" in str(kind) else kind).cast(kind)
    labels = [i % 2 for i in range(len(column))]
    pq.write_table(pa.table({"y": labels, "s": column}), tmp_path / "a.parquet")
    batches = list(Clicks(tmp_path / "a.parquet", Parquet("y", [], ["s"]), batch_size=count * len(values)))
    expected = Hasher(1, slots=True).column(0, [*words * count, "", *words * count])
    assert torch.cat([ids for _, ids, _ in batches])[:, 0].tolist() == expected.tolist()


def test_parquet_columns_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path, days = tmp_path / "a.parquet", pa.array([0, 1], pa.timestamp("s"))
    table = pa.table({"y": [0, 1], "text": ["a", "b"], "list": [[1], [2]], "day": days})
    pq.write_table(table, path)
    for format, what in (
        (Parquet("y", [], ["list"]), "column list of list"),
        (Parquet("day", [], ["text"]), "column day of timestamp"),
        (Parquet("y", ["day"], ["text"]), "column day of timestamp"),
    ):
        with pytest.raises(ValueError, match=rf"a\.parquet: got {what}"):
            list(Clicks(path, format))
    with pytest.raises(ValueError, match="2 of 2 lines are malformed"):
        list(Clicks(path, Parquet("text", [], ["text"])))
    pq.write_table(pa.table([[0, 1], [1, 2], [3, 4]], ["y", "s", "s"]), path)
    with pytest.raises(ValueError, match=r"a\.parquet: got two columns s"):
        list(Clicks(path, Parquet("y", [], ["s"])))


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"y": [0, 1] * 3000, "s": [f"{i}" for i in range(6000)]}), path)
    whole, refused = path.read_bytes(), 0
    for at in range(4, len(whole), len(whole) // 40):
        path.write_bytes(whole[:at] + bytes(64) + whole[at + 64 :])
        try:
            list(Clicks(path, Parquet("y", [], ["s"])))
        except ValueError as error:
            refused += 1
            assert "a.parquet" in str(error) or "malformed" in str(error)
    assert refused


def test_parquet_with_missing_and_bad_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = {"y": [1.0, None, 0.0, *[0.0] * 300, 2.0], "x": [None, 1.0, float("nan"), *[3.0] * 301]}
    pq.write_table(pa.table({**rows, "s": [None, *["b"] * 303]}), tmp_path / "a.parquet")
    clicks = Clicks(tmp_path / "a.parquet", Parquet("y", ["x"], ["s"]))
    batches = iter(clicks)
    dense, ids, clicked = next(batches)
    assert len(clicked) == 301 and dense[0] == 0 and clicked.sum() == 1 and ids.unique().numel() == 2
    assert "line 3 is malformed: got a number that is not finite" in caplog.text and clicks.malformed == 3


def test_multi_slot_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("1 1 2 0.5 1.5 3 7 8 9 0\n1 0 2 0 0 1 7 1 7\n")
    format = MultiSlot(["label", ("dense", 2), "ids", "ids"], num_ids=2)
    ((dense, ids, clicked),) = Clicks(path, format)
    assert dense.tolist() == [[0.5, 1.5], [0, 0]] and clicked.tolist() == [1, 0] and ids.shape == (2, 2, 2)
    assert (ids == 0).tolist() == [[[False, False], [True, True]], [[False, True], [False, True]]]
    assert ids[0, 0, 0] == ids[1, 0, 0] != ids[1, 1, 0]
    ((_, flat, _),) = Clicks(path, MultiSlot(["label", ("dense", 2), "ids", "ids"]))
    assert torch.equal(flat[:, 0], ids[:, 0, 0]) and flat.shape == (2, 2)
    for line in (
        "1 1 2 1",
        "1 2 2 0 0 1 7 1 7",
        "x",
        "1 1 1 0.5 1 7 1 7",
        "1 1 2 0 nan 1 7 1 7",
        "1 1 2 0 0 1 7 1 7 1 7",
    ):
        with pytest.raises(ValueError, match="got"):
            format.parse(line)


def test_train_and_test_are_parts_of_the_lines(tmp_path: Path) -> None:
    for i in range(2):
        write(tmp_path / f"{i}.csv", range(2000 * i, 2000 * i + 2000))
    train, test = (
        numbers(Clicks(tmp_path / "*.csv", CSV, batch_size=100, split=split, test_share=0.2, shuffle=shuffle))
        for split, shuffle in (("train", 0), ("test", 500))
    )
    assert sorted(train + test) == list(range(4000)) and 700 < len(test) < 900
    sizes = [len(clicked) for _, _, clicked in Clicks(tmp_path / "*.csv", CSV, batch_size=100, split="train")]
    assert set(sizes[:-1]) == {100}


def test_rows_of_a_format_of_your_own(tmp_path: Path) -> None:
    class Words:
        num_dense, num_slots, header = 0, 2, False

        def parse(self, line: str) -> tuple[bool, list[float], list[str]]:
            label, a, b = line.split("|")
            return label == "y", [], [a, b]

    (tmp_path / "w").write_text("y|a|b\nn|a|c")
    ((_, ids, clicked),) = Clicks(tmp_path / "w", Words())
    assert clicked.tolist() == [1, 0] and ids[0, 0] == ids[1, 0] and ids[0, 1] != ids[1, 1]


@pytest.mark.slow
def test_several_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plsc.data.clicks.LEAST_WINDOW", 48)
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
    ordered = [Clicks(tmp_path / "*.csv", **options, shuffle=48, ordered=True) for _ in range(2)]
    ordered[1].readers = 1
    assert [x.tolist() for batch in ordered[0] for x in batch] == [x.tolist() for batch in ordered[1] for x in batch]
    write(tmp_path / "2.csv", range(10), bad=50)
    with pytest.raises(ValueError, match="malformed"):
        list(Clicks(tmp_path / "*.csv", **options))


def test_resuming_out_of_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows come as a shuffled deck would have it; wherever reading stops, nothing is lost or seen twice."""
    write(tmp_path / "a.csv", range(500), bad=2)
    options = {"format": CSV, "batch_size": 16, "shuffle": 32}

    class Scrambled(Clicks):
        def _alone(self) -> object:
            reads = list(super()._alone())
            for i in np.random.default_rng(self._next).permutation(len(reads)):
                yield reads[i]

    total = sum(1 for _ in Scrambled(tmp_path / "*.csv", **options))
    for stop in range(total + 1):
        first = Scrambled(tmp_path / "*.csv", **options)
        batches = iter(first)
        seen = [next(batches) for _ in range(stop)]
        second = Scrambled(tmp_path / "*.csv", **options)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = list(second._batches())
        assert sorted(numbers(seen) + numbers(rest)) == list(range(500)) and second.counts() == (2, 502)


def test_real_criteo_rows(shared: Path) -> None:
    rows = 0
    for dense, ids, clicked in Clicks(shared / "data" / "ctr" / "criteo_train.tsv.gz", batch_size=1000):
        assert torch.isfinite(dense).all() and ids.shape[1] == 26 and 0 < clicked.mean() < 1
        rows += len(clicked)
    assert rows == 6400
