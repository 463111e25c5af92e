"""A made-up text whose words are related in a known way, with questions on similarity and analogies to go with it."""

import json
import os
from pathlib import Path

import numpy as np

NUM_ITEMS, FORMS = 40, ("land", "town")
LENGTH = 14  # words of a sentence
_OWN, _OF_FORM, _COMMON = 6, 10, 200  # words around an item, around a form, and everywhere


def write_text(folder: str | os.PathLike[str], *, num_sentences: int = 60_000, seed: int = 0) -> Path:
    """Writes text.txt, similarity.tsv and analogies.txt; returns the folder. What is there already is kept.

    Items stand on a ring; each is spoken of in two forms. A sentence has the word of an item in a form, words that go
    with the item (sometimes with its neighbour on the ring), words that go with the form, and common ones. So words are
    the more alike the nearer their items, and landb is to townb as landf is to townf.
    """
    folder = Path(folder)
    asked = {"num_sentences": num_sentences, "seed": seed}
    truth = folder / "truth.json"
    if truth.is_file() and json.loads(truth.read_text(encoding="utf-8")) == asked:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    truth.unlink(missing_ok=True)
    (folder / "text.txt").write_text("".join(_sentences(num_sentences, seed)), encoding="utf-8")
    _write_questions(folder)
    truth.write_text(json.dumps(asked) + "\n", encoding="utf-8")
    return folder


def name(kind: str, *numbers: int) -> str:
    """A word of letters alone: name("land", 1) is landb."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return kind + "".join((letters[n // 26] if n >= 26 else "") + letters[n % 26] for n in numbers)


def _sentences(count: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    items, forms = random.integers(NUM_ITEMS, size=count), random.integers(2, size=count)
    aside = random.choice([-2, -1, 0, 1, 2], (count, 5), p=[0.05, 0.1, 0.7, 0.1, 0.05])
    near = (items[:, None] + aside) % NUM_ITEMS
    own = random.integers(_OWN, size=(count, 5))
    of_form = random.integers(_OF_FORM, size=(count, 3))
    common = np.minimum(random.zipf(1.3, (count, LENGTH - 10)) - 1, _COMMON - 1)
    lines = []
    for i in range(count):
        form = FORMS[forms[i]]
        words = [name(form, items[i])] * 2
        words += [name("with", near[i, k], own[i, k]) for k in range(5)]
        words += [name(f"in{form}", k) for k in of_form[i]] + [name("common", k) for k in common[i]]
        lines.append(" ".join(words[k] for k in random.permutation(LENGTH)) + "\n")
    return lines


def _write_questions(folder: Path) -> None:
    pairs = []
    for i in range(NUM_ITEMS):
        for distance, score in ((1, 9), (2, 6), (3, 3), (15, 0)):
            pairs.append(f"{name('land', i)}\t{name('land', (i + distance) % NUM_ITEMS)}\t{score}\n")
    (folder / "similarity.tsv").write_text("".join(pairs), encoding="utf-8")
    lines = [": land-town\n"]
    for i in range(NUM_ITEMS):
        for k in ((i + 7) % NUM_ITEMS, (i + 16) % NUM_ITEMS):
            lines.append(f"{name('land', i)} {name('town', i)} {name('land', k)} {name('town', k)}\n")
    (folder / "analogies.txt").write_text("".join(lines), encoding="utf-8")
