"""Pictures as PNG files: losses, ROC, scores, neighbours; on their own canvases, the user's backend is left alone."""

import io
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plsc.train.export import atomic_file
from plsc.train.metrics import Roc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

# Okabe and Ito's colours: told apart by colour-blind readers and in grey print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK = "#404040"
MAX_POINTS = 4000  # more than the pixels of an axis: a curve is thinned to this many


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl file, one a line; a last line cut short by a crash is left out.

    Raises ValueError with the line's number for any other line that is no JSON object.
    """
    text = Path(path).read_text(encoding="utf-8")
    lines = text.splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not text.endswith("\n"):
                logger.warning("%s: the last line is incomplete and left out", path)
                break
            raise ValueError(f"{path}, line {number}: got no JSON ({error.msg}), expected one object a line") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: got {type(record).__name__}, expected a JSON object")
        records.append(record)
    return records


def plot_loss(records: Iterable[Mapping[str, Any]], path: str | Path, *, title: str = "Training loss") -> Path:
    """Writes the loss over optimizer steps as a PNG; from records with `step` and `loss`. Returns the path."""
    return plot_curves(records, path, keys=("loss",), ylabel="loss (nats a sample)", title=title)


def plot_curves(
    records: Iterable[Mapping[str, Any]],
    path: str | Path,
    *,
    keys: tuple[str, ...],
    x: str = "step",
    xlabel: str = "optimizer step",
    ylabel: str = "",
    title: str = "",
    log: bool = False,
) -> Path:
    """Writes the columns `keys` of the records over the column `x` as a PNG; records without both are passed over.

    A long curve is drawn twice: pale as it is, and its running mean. Raises ValueError where a key has no finite point.
    """
    rows = list(records)
    figure = _figure(title)
    axes = figure.add_subplot()
    for number, key in enumerate(keys):
        points = np.array([(r[x], r[key]) for r in rows if _is_number(r.get(x)) and _is_number(r.get(key))])
        if len(points) == 0:
            raise ValueError(f"records: got no finite number under {key!r} beside {x!r} in {len(rows)} records")
        color = COLORS[number % len(COLORS)]
        at, values = points.T
        window = len(values) // 50
        if window < 2:
            marker = "o" if len(values) < 20 else ""
            axes.plot(at, values, color=color, linewidth=1.6, label=key, marker=marker, markersize=4)
        else:
            thin = slice(None, None, -(-len(values) // MAX_POINTS))
            axes.plot(at[thin], values[thin], color=color, linewidth=0.6, alpha=0.3)
            mean = _running_mean(values, window)
            axes.plot(at[thin], mean[thin], color=color, linewidth=1.8, label=f"{key}, mean of {window} records")
    if log:
        axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel or ", ".join(keys))
    _tidy(axes)
    axes.legend(frameon=False)
    return _save(figure, path)


def plot_roc(curves: Mapping[str, Roc], path: str | Path, *, title: str = "Verification") -> Path:
    """Writes ROC curves by name as a PNG, with a logarithmic false accept axis. Returns the path.

    A curve begins at the smallest rate its impostor pairs can measure, one of them. Raises ValueError for no curve.
    """
    if not curves:
        raise ValueError("curves: got none, expected at least one name with its Roc")
    figure = _figure(title)
    axes = figure.add_subplot()
    floor = min(0.1, *(1 / curve.num_impostor for curve in curves.values()))
    lowest = 1.0
    for number, (name, curve) in enumerate(curves.items()):
        smallest = 1 / curve.num_impostor
        far, tar = _upper_steps(curve)
        inside = np.maximum(far, smallest)
        axes.plot(
            inside,
            tar,
            color=COLORS[number % len(COLORS)],
            linewidth=1.8,
            drawstyle="steps-post",
            label=f"{name} ({curve.num_genuine:,} genuine, {curve.num_impostor:,} impostor pairs)",
        )
        lowest = min(lowest, float(tar[np.searchsorted(far, smallest, side="right") - 1]))
    chance = np.geomspace(floor, 1, 200)
    axes.plot(chance, chance, color=INK, linewidth=0.8, linestyle=":", label="chance")
    axes.set_xscale("log")
    axes.set_xlim(floor, 1)
    axes.set_ylim(max(0.0, lowest - 0.25 * (1 - lowest) - 0.02), 1.0 + 0.02 * (1.02 - lowest))
    axes.set_xlabel("false accept rate (share of impostor pairs)")
    axes.set_ylabel("true accept rate (share of genuine pairs)")
    _tidy(axes)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    return _save(figure, path)


def plot_scores(
    scores: ArrayLike,
    issame: ArrayLike,
    path: str | Path,
    *,
    threshold: float | None = None,
    title: str = "Scores of pairs",
) -> Path:
    """Writes histograms of the cosines of genuine and impostor pairs [P] as a PNG, each of unit area."""
    values, same = np.asarray(scores, np.float64), np.asarray(issame, bool)
    if values.shape != same.shape or values.ndim != 1 or same.all() or not same.any():
        raise ValueError(f"pairs: got {values.shape} scores, {same.shape} kinds, expected [P] of both kinds")
    figure = _figure(title)
    axes = figure.add_subplot()
    edges = np.linspace(min(values.min(), -0.2), max(values.max(), 1.0), 81).tolist()
    for kind, color, name in ((~same, COLORS[1], "impostor"), (same, COLORS[0], "genuine")):
        label = f"{name} ({kind.sum():,} pairs)"
        axes.hist(values[kind], edges, density=True, color=color, alpha=0.55, label=label)
    if threshold is not None:
        axes.axvline(threshold, color=INK, linewidth=1, linestyle="--", label=f"threshold {threshold:.3f}")
    axes.set_xlabel("cosine")
    axes.set_ylabel("density")
    _tidy(axes)
    axes.legend(frameon=False)
    return _save(figure, path)


def plot_contact_sheet(
    rows: Sequence[Sequence[tuple[NDArray[np.uint8], str]]], path: str | Path, *, title: str = "Nearest classes"
) -> Path:
    """Writes rows of captioned images [S, S, C] as a PNG; the first of a row is what the others are nearest to."""
    if not rows or not rows[0]:
        raise ValueError("rows: got none, expected at least one row of images")
    columns = max(map(len, rows))
    figure = _figure(title, size=(1.25 * columns, 1.5 * len(rows) + 0.5))
    for number, row in enumerate(rows):
        for column, (pixels, caption) in enumerate(row):
            axes = figure.add_subplot(len(rows), columns, number * columns + column + 1)
            axes.imshow(pixels if pixels.shape[2] == 3 else pixels[:, :, 0], cmap="gray", vmin=0, vmax=255)
            axes.set_title(caption, fontsize=7, color=INK)
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set(visible=column == 0, color=COLORS[0], linewidth=2)
    return _save(figure, path)


def plot_confusion(
    counts: NDArray[np.int64], names: Sequence[str], path: str | Path, *, title: str = "Confusion among close classes"
) -> Path:
    """Writes a matrix [K, K + 1] of how many samples of a row's class were nearest to a column's, or others, as a PNG.

    The last column counts those nearest to a class without a row.
    """
    if counts.shape != (len(names), len(names) + 1) or not len(names):
        raise ValueError(
            f"counts: got {counts.shape}, expected one row and column for each of {len(names)} names, and a last column"
        )
    side = max(4.5, 0.32 * len(names) + 2.5)
    figure = _figure(title, size=(side + 0.8, side))
    axes = figure.add_subplot()
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    picture = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, ax=axes, shrink=0.7, label="share of the row's samples")
    short = [name if len(name) <= 22 else f"{name[:21]}…" for name in names]
    axes.set_xticks(range(len(names) + 1), [*short, "any other"], rotation=90, fontsize=6)
    axes.set_yticks(range(len(names)), short, fontsize=6)
    for at in np.argwhere(counts > 0).tolist():
        dark = share[at[0], at[1]] > 0.5
        axes.text(
            at[1], at[0], str(counts[at[0], at[1]]), ha="center", va="center", fontsize=6, color="w" if dark else INK
        )
    axes.set_xlabel("nearest class")
    axes.set_ylabel("class of the sample")
    return _save(figure, path)


def _upper_steps(curve: Roc) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The ROC with the best true accept rate of each false accept rate only, thinned to what a picture can show."""
    last = np.append(np.flatnonzero(np.diff(curve.far)), len(curve.far) - 1)
    far, tar = curve.far[last], curve.tar[last]
    if len(far) > MAX_POINTS:  # evenly on the logarithmic axis, or its left end would be lost
        wanted = np.geomspace(1 / curve.num_impostor, 1, MAX_POINTS)
        keep = np.unique(np.concatenate([[0], np.searchsorted(far, wanted, side="right") - 1]))
        far, tar = far[keep], tar[keep]
    return far, tar


def _running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean of the `window` values around each, of fewer at the ends; one that looks back only would lag behind."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    starts, ends = np.maximum(at - window // 2, 0), np.minimum(at + (window + 1) // 2, len(values))
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _figure(title: str, *, size: tuple[float, float] = (7.0, 4.2)) -> "Figure":
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib, which is not installed; remedy: pip install matplotlib") from error
    figure = Figure(figsize=size, dpi=144, layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of its own: pyplot and its global backend are never touched
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _tidy(axes: Any) -> None:
    axes.grid(True, which="major", color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: "Figure", path: str | Path) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    with atomic_file(path) as file:
        file.write(picture.getvalue())
    return Path(path)
