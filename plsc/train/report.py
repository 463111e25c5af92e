"""A run's evaluation as one HTML page with its pictures inside: what people look at before they believe a number."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plsc.comm import together
from plsc.data import Dataset
from plsc.data.embeddings import atomic_file
from plsc.ops import block_topk
from plsc.train.metrics import normalize, pair_distances
from plsc.train.plots import plot_confusion, plot_contact_sheet, plot_roc, plot_scores
from plsc.train.trainer import Trainer

QUERIES, NEIGHBOURS = 8, 6  # rows and columns of the contact sheet
CLOSE_CLASSES = 20  # of the confusion matrix
Ints = NDArray[np.int64]

STYLE = """
:root { --ground: #f6f7f9; --card: #fff; --ink: #1b2330; --quiet: #5b6675; --line: #d9dee6; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #12161d; --card: #1b212b; --ink: #e7ebf1; --quiet: #9aa6b6; --line: #323b49; }
}
body { margin: 0 auto; max-width: 900px; padding: 24px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
figure, table { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px; }
figure, table { margin: 16px 0; }
figure img { width: 100%; background: #fff; border-radius: 4px; }
figcaption, small { color: var(--quiet); font-size: 13px; }
td { padding: 2px 24px 2px 0; font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True)
class Confusion:
    """Among the classes that are confused most: how many samples of one were nearest to another."""

    classes: Ints  # [K]
    counts: Ints  # [K, K + 1]; last, those nearest to a class that is not among these
    num_wrong: int  # of all samples that could be judged
    num_judged: int


def write_report(trainer: Trainer, folder: str | Path, result: Mapping[str, Any]) -> Path:
    """Writes report.html, and its pictures beside it, of what trainer.evaluate() found; collective."""
    out = Path(folder)
    data, rows = trainer.embed()
    chosen = _spread(np.asarray(data.labels), QUERIES)
    unit = torch.from_numpy(normalize(rows[chosen]).astype(np.float32)).to(trainer.fleet.device)
    depth = min(NEIGHBOURS, trainer.num_classes)
    scores, classes = (found.cpu().numpy() for found in trainer.head.topk(unit, depth))
    path = out / "report.html"

    def write() -> None:
        if trainer.fleet.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            pictures = _pictures(trainer, out, data, rows)
            sheet = _sheet(data, chosen, trainer.data, classes, scores)
            drawn = plot_contact_sheet(sheet, out / "nearest.png")
            pictures.append(
                (drawn, "Images of the evaluation set (framed) and the trained classes nearest to each, with cosines.")
            )
            with atomic_file(path) as file:
                file.write(_page(trainer, result, pictures).encode())

    together(trainer.fleet.comm, f"write {path}", write)
    return path


def confusion(embeddings: NDArray[Any], labels: Ints, *, most: int = CLOSE_CLASSES) -> Confusion:
    """Which classes samples [N, D] would be taken for, by the nearest mean of the other samples of a class.

    A sample takes no part in its own class's mean; labels -1 and classes of one sample are left out.
    """
    counts = np.bincount(labels[labels >= 0], minlength=1)
    judged = np.flatnonzero((labels >= 0) & (counts[labels] > 1))
    rows, owners = normalize(embeddings[judged]), labels[judged]
    if len(np.unique(owners)) < 2:
        return Confusion(np.empty(0, np.int64), np.empty((0, 1), np.int64), 0, len(owners))
    known, at = np.unique(owners, return_inverse=True)
    sums = np.zeros((len(known), rows.shape[1]))
    np.add.at(sums, at, rows)
    means = torch.from_numpy(normalize(sums))
    best, nearest = (t.numpy() for t in block_topk(torch.from_numpy(rows), means.split(4096), 2))
    own = np.einsum("nd,nd->n", rows, normalize(sums[at] - rows))
    first = np.where(nearest[:, 0] == at, 1, 0)  # of the two, the one that is not its own class
    lines = np.arange(len(rows))
    taken = np.where(best[lines, first] > own, nearest[lines, first], at)
    wrong = np.flatnonzero(taken != at)
    errors = np.bincount(at[wrong], minlength=len(known)) + np.bincount(taken[wrong], minlength=len(known))
    close = np.sort(np.argsort(-errors, kind="stable")[: min(most, int((errors > 0).sum()))])
    place = np.full(len(known), -1)
    place[close] = np.arange(len(close))
    shown = place[at] >= 0
    matrix = np.zeros((len(close), len(close) + 1), np.int64)
    np.add.at(matrix, (place[at[shown]], place[taken[shown]]), 1)  # place -1 is the last column
    return Confusion(known[close], matrix, len(wrong), len(rows))


def _pictures(trainer: Trainer, out: Path, data: Dataset, rows: NDArray[np.float32]) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    if trainer.verified:
        curves = {name: one.roc for name, one in trainer.verified.items()}
        found.append((plot_roc(curves, out / "roc.png"), "True against false accepts over all thresholds."))
    if trainer.pairs is not None and "verification" in trainer.verified:
        cosines = 1 - pair_distances(rows, trainer.pairs.first, trainer.pairs.second) / 2
        threshold = trainer.verified["verification"].threshold
        drawn = plot_scores(cosines, trainer.pairs.same, out / "scores.png", threshold=threshold)
        found.append((drawn, "Cosines of genuine and impostor pairs; the line is where most pairs are right."))
    confused = confusion(rows, np.asarray(data.labels))
    if len(confused.classes):
        names = _names(data, confused.classes)
        drawn = plot_confusion(confused.counts, names, out / "confusion.png")
        found.append(
            (
                drawn,
                f"The {len(names)} classes confused most: {confused.num_wrong:,} of {confused.num_judged:,} samples "
                "are nearer to the mean of another class than to that of the other samples of their own.",
            )
        )
    return found


def _sheet(
    data: Dataset, chosen: Ints, trained: Dataset, classes: Ints, scores: NDArray[np.float32]
) -> list[list[tuple[NDArray[np.uint8], str]]]:
    """Rows of a query and the first training images of its nearest classes."""
    labels = np.asarray(trained.labels)
    order = np.argsort(labels, kind="stable")
    sheet = []
    for query, near, score in zip(chosen.tolist(), classes, scores, strict=True):
        row = [(data[query][0], _short(data.name(query)))]
        for label, cosine, name in zip(near.tolist(), score.tolist(), _names(trained, near), strict=True):
            at = int(np.searchsorted(labels[order], label))
            if at < len(order) and labels[order[at]] == label:
                row.append((trained[int(order[at])][0], f"{_short(name)}\n{cosine:.3f}"))
        sheet.append(row)
    return sheet


def _spread(labels: Ints, count: int) -> Ints:
    """Samples of different classes, evenly over the set."""
    firsts = np.sort(np.unique(labels, return_index=True)[1])
    rows = firsts if len(firsts) >= count else np.arange(len(labels))
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64)]


def _names(data: Dataset, classes: Ints) -> Sequence[str]:
    names = getattr(data, "class_names", None)
    return [str(names[i]) if names is not None and i < len(names) else f"class {i}" for i in classes.tolist()]


def _short(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:19]}…"


def _page(trainer: Trainer, result: Mapping[str, Any], pictures: Sequence[tuple[Path, str]]) -> str:
    title = f"{trainer.out.resolve().name}, step {trainer.step}"
    lines = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_shown(value))}</td></tr>" for name, value in result.items()
    )
    figures = "".join(_figure(path, words) for path, words in pictures)
    about = f"{trainer.config.model.backbone}, {trainer.config.head.margin}, {trainer.num_classes:,} classes"
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    facts = f"<p><small>{html.escape(about)}</small></p>"
    body = f"<h1>{html.escape(title)}</h1>{facts}<table>{lines}</table>{figures}"
    return f'<!doctype html><html lang="en">{head}{body}</html>\n'


def _figure(path: Path, words: str) -> str:
    image = base64.b64encode(path.read_bytes()).decode()
    caption = html.escape(words)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{image}"><figcaption>{caption}</figcaption></figure>'
    )


def _shown(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
