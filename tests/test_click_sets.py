"""datasets/*/prepare.py of click logs: small files made here and the real ones, each read again and trained on."""

import gzip
import json
import runpy
import tomllib
from pathlib import Path

import pytest

from plsc import cli
from plsc.data import Clicks
from plsc.data.click_sets import bucket, log_bucket, write_click_set
from plsc.train.config import from_dict
from plsc.train.ctr_config import CtrConfig, open_clicks

ROOT = Path(__file__).resolve().parents[1] / "datasets"
REAL = {
    "frappe": "frappe_train.libfm",
    "adult": "adult_train.csv",
    "criteo": "criteo_train.tsv",
    "avazu": "avazu_train.csv",
}


AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"
)


def prepare(name: str, *args: object, monkeypatch: pytest.MonkeyPatch) -> CtrConfig:
    monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, args)])
    runpy.run_path(str(ROOT / name / "prepare.py"), run_name="__main__")
    recipe = Path(str(args[1])) / "ctr.toml"
    return from_dict(CtrConfig, tomllib.loads(recipe.read_text()), where=str(recipe))


def rows_of(config: CtrConfig) -> tuple[int, int]:
    train, test = open_clicks(config)
    counts = [sum(len(clicked) for _, _, clicked in part) for part in (train, test)]
    assert train.malformed == test.malformed == 0
    return counts[0], counts[1]


@pytest.mark.parametrize(
    ("name", "lines", "dense", "slots"),
    [
        ("frappe", "1 3:1 5:1 9:1\n-1 3:1 6:1 8:1\n" * 20, 0, 3),
        ("adult", "39, State-gov, 77516, B, 13, N, A, N, W, Male, 2174, 0, 40, US, <=50K\n" * 30 + "\n", 6, 13),
        ("criteo", "\t".join(["1", *["7"] * 13, *["ab"] * 25, ""]) + "\n", 0, 39),
        ("avazu", AVAZU + "1,1,14102123" + ",a" * 21 + "\n" + ("2,0,14102101" + ",b" * 21 + "\n") * 17, 0, 28),
    ],
)
def test_prepared(
    name: str, lines: str, dense: int, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").write_text(lines)
    config = prepare(name, tmp_path / "in", tmp_path / "out", monkeypatch=monkeypatch)
    train, _ = open_clicks(config)
    assert (train.format.num_dense, train.format.num_slots) == (dense, slots)
    assert sum(rows_of(config)) == sum(1 for line in (tmp_path / "out" / "clicks.tsv").open())


def test_avazu_counts_devices_and_pairs_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "1,1,14102123,C1,pos,{site},s,sc,{app},a,ac,{id},{ip},{model},2,3,14,15,16,17,18,19,20,21\n"
    places = {"site": "85f751fd", "app": "game"}, {"site": "news", "app": "none"}
    devices = (
        {"id": "i", "ip": "x", "model": "m"},
        {"id": "i", "ip": "x", "model": "n"},
        {"id": "x", "ip": "y", "model": "m"},
    )
    (tmp_path / "in").write_text(AVAZU + "".join(line.format(**places[i == 2], **devices[i]) for i in range(3)))
    prepare("avazu", tmp_path / "in", tmp_path / "out", monkeypatch=monkeypatch)
    found = [line.split("\t")[-6:] for line in (tmp_path / "out" / "clicks.tsv").read_text().splitlines()]
    assert found == [
        ["game 17", "game pos", "ac 21", "2", "2", "1"],
        ["game 17", "game pos", "ac 21", "2", "2", "1"],
        ["news 17", "news pos", "sc 21", "1", "1", "1"],
    ]


def test_movielens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ml-100k.user").write_text("h\n1\t24\tM\twriter\t85711\n")
    (tmp_path / "ml-100k.item").write_text("h\n7\tToy Story\t1995\tAnimation Comedy\n8\tNothing\t\t\n")
    (tmp_path / "ml-100k.inter").write_text("h\n1\t7\t4\t0\n1\t8\t3\t0\n")
    prepare("movielens", tmp_path, tmp_path / "out", monkeypatch=monkeypatch)
    lines = (tmp_path / "out" / "clicks.tsv").read_text().splitlines()
    assert [line.split("\t") for line in lines] == [
        ["1", "1", "7", "4", "M", "writer", "85", "399", "Animation", "Animation Comedy"],
        ["0", "1", "8", "4", "M", "writer", "85", "", "", ""],
    ]


def test_buckets() -> None:
    assert [bucket(word, 5) for word in ("24", "25", "", "x")] == ["4", "5", "", "x"]
    assert [log_bucket(word) for word in ("-1", "2", "3", "1382", "")] == ["-1", "2", "l1", "l52", ""]


def test_bad_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 2: got 0 numbers and 1 tokens"):
        write_click_set(tmp_path, [(True, [], ["a", "b"]), (True, [], ["a"])], title="X", settings={})
    with pytest.raises(ValueError, match="no rows"):
        write_click_set(tmp_path, [], title="X", settings={})
    assert not (tmp_path / "clicks.tsv").exists()


@pytest.mark.parametrize("name", REAL)
def test_real_rows(name: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shared / "data" / "ctr" / f"{REAL[name]}.gz"
    config = prepare(name, source, tmp_path / "out", monkeypatch=monkeypatch)
    with gzip.open(source, "rt") as file:
        lines = sum(1 for _ in file) - (name == "avazu")
    train, test = rows_of(config)
    assert train + test == lines and 0.17 < test / lines < 0.23


@pytest.mark.slow
@pytest.mark.parametrize(("name", "floor"), [("frappe", 0.941), ("adult", 0.912)])
def test_quality_on_real_rows(
    name: str, floor: float, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above hashed logistic regression: what comes with the data is 0.931 for Frappe and 0.912 for Adult."""
    monkeypatch.chdir(tmp_path)
    prepare(name, shared / "data" / "ctr" / f"{REAL[name]}.gz", tmp_path / "out", monkeypatch=monkeypatch)
    assert cli.ps(["train", "out/ctr.toml", "--no-export"]) == 0
    assert json.loads((tmp_path / "runs" / name / "result.json").read_text())["auc"] >= floor


def test_reader_of_the_set(tmp_path: Path) -> None:
    rows = [(i % 2 == 0, [str(i)], ["a\tb", "?"]) for i in range(10)]
    count, format = write_click_set(
        tmp_path, rows, title='A "title"', settings={"": {"seed": 3}, "data": {"shuffle": 5}}
    )
    ((dense, ids, clicked),) = Clicks(tmp_path / "clicks.tsv", format)
    assert count == len(clicked) == 10 and dense.shape == (10, 1) and ids.shape == (10, 2)
    assert tomllib.loads((tmp_path / "ctr.toml").read_text())["data"]["shuffle"] == 5
