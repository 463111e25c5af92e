"""Plots are PNG files of the asked-for curves, made without touching the user's matplotlib."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from plsc.train import metrics, plots


def ink(path: Path) -> int:
    """Pixels that are not white."""
    with Image.open(path) as image:
        assert image.format == "PNG" and min(image.size) > 400
        return int((np.asarray(image.convert("L")) < 250).sum())


@pytest.mark.parametrize("count", [1, 15, 300, 9000])
def test_loss_curve(tmp_path: Path, count: int) -> None:
    records = [{"step": step, "loss": 30 * math.exp(-step / count) + step % 3, "lr": 0.1} for step in range(count)]
    records.insert(0, {"step": 0, "accuracy": 0.9})  # another kind of line
    path = plots.plot_loss(records, tmp_path / "new" / "loss.png")
    assert ink(path) > 5000
    assert [entry.name for entry in path.parent.iterdir()] == ["loss.png"]  # nothing half-written stays


def test_curves_of_several_columns(tmp_path: Path) -> None:
    records = [{"epoch": epoch, "a": epoch + 1.0, "b": None if epoch == 2 else 2.0} for epoch in range(5)]
    path = plots.plot_curves(records, tmp_path / "c.png", keys=("a", "b"), x="epoch", xlabel="epoch", log=True)
    assert ink(path) > 5000
    with pytest.raises(ValueError, match=r"no finite number under 'c' beside 'epoch' in 5 records"):
        plots.plot_curves(records, tmp_path / "d.png", keys=("c",), x="epoch")


def test_roc_curves(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    issame = np.arange(20_000) % 2 == 0
    curves = {
        name: metrics.roc(rng.normal(np.where(issame, gap, 0.0)), issame) for name, gap in [("good", 4.0), ("bad", 1.0)]
    }
    assert ink(plots.plot_roc(curves, tmp_path / "roc.png")) > 5000
    perfect = {"perfect": metrics.roc([0.9, 0.1], [True, False])}
    assert ink(plots.plot_roc(perfect, tmp_path / "perfect.png")) > 3000
    with pytest.raises(ValueError, match="got none"):
        plots.plot_roc({}, tmp_path / "none.png")


def test_thinning_a_roc_keeps_what_it_says() -> None:
    rng = np.random.default_rng(1)
    issame = np.arange(60_000) % 2 == 0
    curve = metrics.roc(rng.normal(np.where(issame, 2.0, 0.0)), issame)
    far, tar = plots._upper_steps(curve)
    assert len(far) <= plots.MAX_POINTS + 1 and far[-1] == tar[-1] == 1
    for rate in (1 / 30_000, 1e-3, 0.1):
        kept = tar[np.searchsorted(far, rate, side="right") - 1]
        assert kept == pytest.approx(curve.tar[np.searchsorted(curve.far, rate, side="right") - 1], abs=2e-3)


def test_records_are_read_but_for_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(3)]
    path.write_text("\n".join(lines) + "\n\n" + '{"step": 3, "lo')
    assert [record["step"] for record in plots.read_records(path)] == [0, 1, 2]
    path.write_text('{"step": 0}\n{"step": 3, "lo\n{"step": 4}\n')
    with pytest.raises(ValueError, match="line 2: got no JSON"):
        plots.read_records(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: got list"):
        plots.read_records(path)


def test_the_users_backend_is_left_alone(tmp_path: Path) -> None:
    """In a fresh interpreter: pyplot is not even imported."""
    code = (
        "import sys; from plsc.train import plots; assert 'matplotlib' not in sys.modules; "
        f"plots.plot_loss([{{'step': 1, 'loss': 2.0}}], {str(tmp_path / 'p.png')!r}); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2], timeout=120)
