"""Click prediction: quality against the best possible, going on after a stop, threads, export, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from plsc import cli, cli_ps
from plsc.data.synthetic_clicks import ClickWorld, write_clicks
from plsc.models import LogisticRegression
from plsc.ps import Table
from plsc.train import ctr
from plsc.train.click_metrics import GroupAuc
from plsc.train.config import from_dict, list_recipes, read_recipe
from plsc.train.ctr_config import CtrConfig, CtrData, CtrDense, CtrModel, CtrTable, click_format, open_clicks


def config(out: Path, **options: object) -> CtrConfig:
    data = CtrData(kind="synthetic", num_train=24_000, num_test=6_000, shuffle=2048)
    base = CtrConfig(
        out=str(out),
        batch_size=256,
        data=data,
        model=CtrModel(factors=4, hidden=(16,)),
        table=CtrTable(lr=0.1),
        dense=CtrDense(lr=3e-3),
        log_every=20,
        export_dtype="fp32",
    )
    return replace(base, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A run of one thread, two epochs."""
    out = tmp_path_factory.mktemp("ctr") / "run"
    return out, ctr.train(config(out, epochs=2))


def test_learns_towards_the_best_auc(whole: tuple[Path, dict[str, float]]) -> None:
    out, result = whole
    assert 0.7 < result["auc"] < result["best_auc"] < 0.95
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r][-1] == 2 * 94 and records[-1]["test_auc"] == result["auc"]
    assert 0.8 < result["calibration"] < 1.25
    assert json.loads((out / "result.json").read_text())["auc"] == result["auc"]
    assert (out / "loss.png").is_file() and list((out / "tensorboard").iterdir())


def test_stops_and_goes_on_as_if_it_had_not(tmp_path: Path, whole: tuple[Path, dict[str, float]]) -> None:
    """One thread: the same bits, wherever it stopped."""
    for stop in (37, 94, 131):
        ctr.train(config(tmp_path, epochs=2, max_steps=stop, save_every=50, export=False))
    assert ctr.train(config(tmp_path, epochs=2)) == whole[1]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    with pytest.raises(ValueError, match="another model"):
        ctr.train(config(tmp_path, epochs=2, model=CtrModel(factors=4, hidden=(17,))))


def test_threads_share_one_model(tmp_path: Path) -> None:
    trainer = ctr.CtrTrainer(config(tmp_path, threads=3, epochs=2))
    result = trainer.fit()
    assert result["auc"] > 0.7 and trainer.step == 2 * 94
    first = trainer.models[0]
    for model, optimizer in zip(trainer.models[1:], trainer.optimizers[1:], strict=True):
        for mine, shared in zip(model.parameters(), first.parameters(), strict=True):
            assert mine.data_ptr() == shared.data_ptr()
            assert optimizer.state[mine] is trainer.optimizers[0].state[shared]
    assert not torch.equal(first.bias, ctr.build_model(trainer.config, trainer.table, trainer.train_data).bias)


def test_exported_model_answers_alike(whole: tuple[Path, dict[str, float]]) -> None:
    out, result = whole
    trainer = ctr.CtrTrainer(config(out, epochs=2))
    model, served = trainer.models[0].eval(), ctr.load_model(out / "export")
    rows = len(trainer.table)
    with torch.no_grad():
        for dense, ids, _ in trainer.test_data:
            torch.testing.assert_close(served(dense, ids), model(dense, ids), rtol=0, atol=1e-6)
    assert len(trainer.table) == rows and trainer.evaluate()["auc"] == result["auc"]


def test_a_failing_thread_ends_the_run(tmp_path: Path) -> None:
    trainer = ctr.CtrTrainer(config(tmp_path, threads=2))
    with torch.no_grad():
        trainer.models[0].bias.fill_(float("inf"))
    with pytest.raises(ctr.NonFiniteLoss, match="at step 1"):
        trainer.fit()


def test_columns_groups_and_a_held_out_share(tmp_path: Path) -> None:
    """The synthetic files read as columns, without a test file, with readers apart; groups by the first slot."""
    folder = write_clicks(tmp_path / "data", num_train=6000, num_test=10, files=2)
    data = CtrData(
        kind="columns",
        train=(str(folder / "train-*.tsv"),),
        test_share=0.3,
        delimiter="\t",
        dense=("1-2",),
        sparse=("3-9", "10"),
        group=0,
    )
    run = config(tmp_path / "run", data=data, export=False, threads=2)
    train, test = open_clicks(run)
    sizes = [sum(len(clicked) for _, _, clicked in part) for part in (train, test)]
    assert sum(sizes) == 6000 and 1600 < sizes[1] < 2000
    result = ctr.train(run)
    assert 0.5 < result["group_auc"] < 1.0 and "best_auc" not in result


def test_other_formats(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"1 {i % 2} 2 0.5 {i} 2 {i % 5} {i % 7}\n" for i in range(2000)))
    data = CtrData(kind="multislot", train=(str(tmp_path / "a.txt"),), slots=("label", "dense:2", "ids"), num_ids=2)
    assert ctr.train(config(tmp_path / "run", data=data, model=CtrModel(name="logistic"))) is not None
    assert ctr.load_model(tmp_path / "run" / "export")(torch.zeros(1, 2), torch.zeros(1, 1, 2, dtype=torch.int64)).shape
    assert click_format(CtrData(kind="libsvm", num_slots=4)).num_slots == 4
    assert click_format(CtrData(kind="plsc.data:CRITEO")).num_slots == 26
    parquet = click_format(CtrData(kind="parquet", label="y", dense=("a",), sparse=("b", "c")))
    assert parquet.num_dense == 1 and parquet.num_slots == 2


def test_groups_are_of_their_slot_where_slots_hold_several_ids(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    users = random.integers(0, 9, 3000)
    lines = [f"1 {random.random() < u / 9:d} 3 {' '.join(map(str, random.integers(0, 40, 3)))} 1 u{u}\n" for u in users]
    (tmp_path / "a").write_text("".join(lines[:2000]))
    (tmp_path / "b").write_text("".join(lines[2000:]))
    files = {"train": (str(tmp_path / "a"),), "test": (str(tmp_path / "b"),)}
    data = CtrData(kind="multislot", slots=("label", "ids", "ids"), num_ids=3, group=1, **files)
    trainer = ctr.CtrTrainer(config(tmp_path / "run", data=data))
    result = trainer.fit()
    parts = [(trainer.models[0].eval()(dense, ids), clicked) for dense, ids, clicked in trainer.test_data]
    logits, clicked = (torch.cat(part).detach().numpy() for part in zip(*parts, strict=True))
    right = GroupAuc()
    right.update(logits, clicked, users[2000:])
    assert result["group_auc"] == pytest.approx(right.value(), abs=1e-6) and result["auc"] > 0.6


def test_what_goes_on_is_what_was_asked_for(tmp_path: Path) -> None:
    """Another rate holds from then on; what a table cannot change is refused, and config.toml stays that of the run."""
    ctr.train(config(tmp_path, max_steps=4, export=False))
    ctr.train(config(tmp_path, max_steps=6, export=False, table=CtrTable(lr=0.4)))
    newest = max((tmp_path / "checkpoints").iterdir())
    assert Table.load(newest / "table").lr == 0.4
    before = (tmp_path / "config.toml").read_text()
    assert "lr = 0.4" in before
    for changes, word in (
        ({"table": CtrTable(rule="adam")}, "rule Adagrad.*got Adam"),
        ({"table": CtrTable(dtype="fp16")}, "dtype 'fp32', got 'fp16'"),
        ({"table": CtrTable(init_scale=0.5)}, "init_scale 0.01, got 0.5"),
        ({"model": CtrModel(factors=5, hidden=(16,))}, "dim 5, got 6"),
        ({"model": CtrModel(factors=4, hidden=(17,))}, "another model"),
    ):
        with pytest.raises(ValueError, match=word):
            ctr.train(config(tmp_path, max_steps=8, export=False, **changes))
        assert (tmp_path / "config.toml").read_text() == before


class Normed(LogisticRegression):
    """A model of one's own with a buffer, and a weight under two names."""

    def __init__(self, sparse: torch.nn.Module, *, num_slots: int, num_dense: int) -> None:
        super().__init__(sparse, num_slots=num_slots, num_dense=num_dense)
        self.norm = torch.nn.BatchNorm1d(num_dense)
        self.again = self.dense_weight

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(dense), ids)


def test_buffers_of_a_model_of_ones_own_are_kept(tmp_path: Path) -> None:
    options = {"model": CtrModel(f"{__name__}:Normed", factors=4), "threads": 2}
    result = ctr.train(config(tmp_path, max_steps=30, **options))
    trainer = ctr.CtrTrainer(config(tmp_path, max_steps=30, **options))
    served = ctr.load_model(tmp_path / "export")
    assert 20 < int(trainer.models[0].norm.num_batches_tracked) <= 30  # threads may overwrite each other's
    assert trainer.evaluate() == {name: result[name] for name in ("auc", "log_loss", "calibration")}
    torch.testing.assert_close(served.norm.running_var, trainer.models[0].norm.running_var)
    dense, ids, _ = next(iter(trainer.test_data))
    torch.testing.assert_close(served(dense, ids), trainer.models[0].eval()(dense, ids), rtol=0, atol=1e-6)


def test_files_without_rows_or_with_clicks_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "none").write_text("")
    (tmp_path / "all").write_text("1,a\n" * 300)
    none, all_ = (CtrData(kind="columns", train=(str(tmp_path / x),), sparse=("1",)) for x in ("none", "all"))
    with pytest.raises(ValueError, match=r"no rows to train on in .*none"):
        ctr.train(config(tmp_path / "a", data=none))
    result = ctr.train(config(tmp_path / "b", data=all_, export=False))
    assert np.isnan(result["auc"]) and "rows, all of one kind" in caplog.text
    told = (tmp_path / "b" / "result.json").read_text() + (tmp_path / "b" / "metrics.jsonl").read_text()
    assert "NaN" not in told and json.loads((tmp_path / "b" / "result.json").read_text())["auc"] is None
    for changes, word in (({"group": 1}, "data.group is 1, expected a slot"), ({"sparse": ()}, "got 0 slots")):
        with pytest.raises(ValueError, match=word):
            open_clicks(config(tmp_path / "c", data=replace(all_, **changes)))


def test_synthetic_clicks(tmp_path: Path) -> None:
    first = write_clicks(tmp_path / "a", num_train=300, num_test=200, files=2)
    stamp = (first / "test.tsv").stat().st_mtime_ns
    write_clicks(tmp_path / "a", num_train=300, num_test=200, files=2)
    assert (first / "test.tsv").stat().st_mtime_ns == stamp
    again = write_clicks(tmp_path / "b", num_train=300, num_test=200, files=2)
    assert all((again / p.name).read_bytes() == p.read_bytes() for p in first.iterdir())
    _, _, chances, clicked = ClickWorld().impressions(20_000, 0)
    assert abs(chances.mean() - clicked.mean()) < 0.02
    write_clicks(tmp_path / "a", num_train=301, num_test=200, files=2)
    assert (first / "test.tsv").stat().st_mtime_ns != stamp


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"model": {"name": "depfm"}}, "did you mean 'deepfm'"),
        ({"table": {"rule": "adagard"}}, "did you mean 'adagrad'"),
        ({"data": {"kind": "criteo"}}, "data.train is empty"),
        ({"data": {"kind": "csv", "train": ["x"]}}, "expected one of"),
        ({"threads": 0}, "threads is 0"),
        ({"task": "glyphs"}, "expected 'ctr'"),
        ({"table": {"lrr": 1.0}}, "unknown key 'lrr'"),
        ({"data": {"kind": "synthetic", "train": ["x"]}}, "got files to read as well"),
        ({"model": {"hidden": [8, 0]}}, r"model.hidden is \[8, 0\]"),
        ({"model": {"dropout": 1.0}}, "model.dropout is 1.0"),
        ({"dense": {"lr": float("nan")}}, "dense.lr is nan"),
        ({"export_dtype": "fp8"}, "expected one of fp32, fp16, int8"),
    ],
)
def test_bad_recipes(values: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        from_dict(CtrConfig, {"data": {"kind": "synthetic"}, **values}, where="recipe")


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rule_args"):
        ctr.CtrTrainer(config(tmp_path, table=CtrTable(rule_args={"momentum": 0.9})))
    for data, word in [
        (CtrData(kind="columns", train=("x",), sparse=("a",)), "a column's number"),
        (CtrData(kind="multislot", train=("x",), slots=("dense:x",)), "dense:13"),
        (CtrData(kind="no.such:thing", train=("x",)), "cannot be imported"),
    ]:
        with pytest.raises(ValueError, match=word):
            click_format(data)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "ctr" in list_recipes(cli_ps.PS_TASKS) and "ctr" not in list_recipes()
    small = ["--data.num-train", "6000", "--data.num-test", "1000", "--epochs", "1", "--max-steps", "4"]
    assert cli.ps(["train", "ctr", *small]) == 0
    out = capsys.readouterr().out
    assert "training: 4/4" in out and "best_auc" in out and "runs/ctr/export/table.safetensors" in out
    assert cli.ps(["train", "crt"]) == cli.EXIT_USAGE
    assert "did you mean 'ctr'" in capsys.readouterr().err
    assert cli.ps([]) == cli.EXIT_USAGE and "plsc-ps train RECIPE" in capsys.readouterr().out
    assert cli.ps(["--help"]) == 0 and cli.ps(["train", "--help"]) == 0
    assert cli.ps(["train", "glyphs"]) == cli.EXIT_USAGE
    values = read_recipe("ctr", cli_ps.PS_TASKS)
    assert from_dict(CtrConfig, values, where="ctr").threads == 2


def test_shuffle_and_seed_change_the_run(tmp_path: Path) -> None:
    results = [ctr.CtrTrainer(config(tmp_path / str(seed), seed=seed, max_steps=20)).fit() for seed in (0, 0, 1)]
    assert results[0] != results[2] and np.isfinite(list(results[0].values())).all()
