"""A made-up click log whose true probabilities are known, so that the best AUC any model can reach is known as well."""

import json
import os
from pathlib import Path

import numpy as np

from plsc.data.click_formats import Columns

NUM_DENSE, NUM_SLOTS, FACTORS = 2, 8, 4
SYNTHETIC = Columns(0, range(1, 1 + NUM_DENSE), range(1 + NUM_DENSE, 1 + NUM_DENSE + NUM_SLOTS), delimiter="\t")


class ClickWorld:
    """Who clicks on what: every id has a weight and a vector, vectors of an impression meet in pairs.

    logit = bias + dense part + sum of weights + sum over pairs of slots of inner products. Ids are drawn from
    Zipf(1.05), the same in every world of a seed.
    """

    def __init__(self, *, num_ids: int = 200, seed: int = 0) -> None:
        random = np.random.default_rng([seed, 0])
        self._weights = random.normal(0.0, 0.6, (NUM_SLOTS, num_ids))
        self._vectors = random.normal(0.0, 0.35, (NUM_SLOTS, num_ids, FACTORS))
        popularity = np.arange(1, num_ids + 1) ** -1.05
        self._cumulative = np.cumsum(popularity / popularity.sum())
        self._seed = seed

    def impressions(self, count: int, part: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Numbers int [count, 2], ids [count, 8], true probabilities of a click and clicks; `part` is which draw."""
        random = np.random.default_rng([self._seed, 1, part])
        numbers = random.geometric(0.05, (count, NUM_DENSE)) - 1
        last = len(self._cumulative) - 1
        ids = np.minimum(np.searchsorted(self._cumulative, random.random((count, NUM_SLOTS))), last)
        slots = np.arange(NUM_SLOTS)
        vectors = self._vectors[slots, ids]  # [count, S, k]
        pairs = 0.5 * (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1)
        dense = np.log1p(numbers) @ np.array([0.3, -0.3])
        logits = -1.5 + dense + self._weights[slots, ids].sum(1) + pairs
        chances = 1.0 / (1.0 + np.exp(-logits))
        return numbers, ids, chances, random.random(count) < chances


def write_clicks(
    folder: str | os.PathLike[str], *, num_train: int = 400_000, num_test: int = 50_000, files: int = 4, seed: int = 0
) -> Path:
    """Writes train-*.tsv and test.tsv, to be read as SYNTHETIC, and truth.json; returns the folder.

    truth.json, written last, holds what was asked for and the true probabilities' AUC on the test part: clicks taken
    at their chances, so the figure is what the best model is expected to reach. What is there already is kept.
    """
    folder = Path(folder)
    asked = {"num_train": num_train, "num_test": num_test, "files": files, "seed": seed}
    truth = folder / "truth.json"
    if truth.is_file() and json.loads(truth.read_text(encoding="utf-8")).items() >= asked.items():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    truth.unlink(missing_ok=True)
    world = ClickWorld(seed=seed)
    sizes = [len(some) for some in np.array_split(np.arange(num_train), files)]
    for part, size in enumerate([num_test, *sizes]):
        numbers, ids, chances, clicked = world.impressions(size, part)
        name = "test.tsv" if part == 0 else f"train-{part - 1}.tsv"
        if part == 0:
            best = _best_auc(chances)
        table = np.concatenate([clicked[:, None].astype(np.int64), numbers, ids], axis=1)
        np.savetxt(folder / name, table, fmt="%d", delimiter="\t")
    truth.write_text(json.dumps({**asked, "best_auc": best}) + "\n", encoding="utf-8")
    return folder


def _best_auc(chances: np.ndarray) -> float:
    """Chance that of two impressions, one clicked and one not, the former has the higher probability of a click."""
    p = np.sort(chances)
    below = np.cumsum(1 - p) - (1 - p)
    own = 0.5 * (1 - p)
    return float((p * (below + own)).sum() / (p.sum() * (1 - p).sum()))
