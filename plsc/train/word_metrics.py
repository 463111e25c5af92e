"""How good word vectors are: rank correlation with people's similarity scores, and analogies solved."""

import re
from os import PathLike, fspath
from pathlib import Path

import numpy as np

from plsc.data.vectors import WordVectors

BLOCK = 256  # questions answered at a time


def similarity(vectors: WordVectors, path: str | PathLike[str]) -> dict[str, float]:
    """spearman: of cosines with the scores of a file of `word word score` lines (tab, comma or space; # comments).

    unknown: share of pairs that have a word without a vector; those are left out. Words are looked up as they are,
    then in lower case.
    """
    scores, cosines, asked, heading = [], [], 0, True
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        fields, first_line, heading = re.split(r"[\t,; ]+", line.strip()), heading, False
        try:
            first, second, score = fields[0], fields[1], float(fields[2])
        except (IndexError, ValueError):
            if first_line:
                continue  # names of columns
            raise ValueError(f"{fspath(path)}, line {number}: got {line!r}, expected two words and a score") from None
        asked += 1
        rows = [_row(vectors, word) for word in (first, second)]
        if rows[0] is not None and rows[1] is not None:
            a, b = vectors.vectors[rows[0]], vectors.vectors[rows[1]]
            cosines.append(float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)))
            scores.append(score)
    if len(scores) < 2:
        raise ValueError(f"{fspath(path)}: {len(scores)} of {asked} pairs have vectors, expected at least 2")
    return {"spearman": spearman(np.array(cosines), np.array(scores)), "unknown": 1.0 - len(scores) / asked}


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of ranks; equal values share the mean of their ranks. NaN where one side is constant."""
    x, y = (_ranks(values) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    spread = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / spread if spread > 0 else float("nan")


def analogies(vectors: WordVectors, path: str | PathLike[str], *, most_frequent: int = 30_000) -> dict[str, float]:
    """Shares of `a b c d` questions whose d is the word nearest to b - a + c, but for a, b and c (3CosAdd).

    accuracy: of all questions; semantic, syntactic: of the sections (`: name`) whose names do not, or do, begin with
    gram. unknown: share of questions with a word that is not among the `most_frequent`; they are left out. Words are
    looked up as they are, then in lower case.
    """
    questions, sections, asked, section = [], [], 0, ""
    known = min(most_frequent, len(vectors))
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith(":"):
            section = line[1:].strip()
            continue
        words = line.split()
        if not words:
            continue
        if len(words) != 4:
            raise ValueError(f"{fspath(path)}, line {number}: got {line!r}, expected four words or `: section`")
        asked += 1
        rows = [_row(vectors, word) for word in words]
        if all(row is not None and row < known for row in rows):
            questions.append(rows)
            sections.append(section.startswith("gram"))
    if not questions:
        raise ValueError(f"{fspath(path)}: none of {asked} questions has four words with vectors")
    right = _solved(vectors.vectors[:known], np.array(questions, np.int64))
    syntactic = np.array(sections)
    found = {"accuracy": float(right.mean()), "unknown": 1.0 - len(right) / asked}
    if syntactic.any() and not syntactic.all():
        found |= {"semantic": float(right[~syntactic].mean()), "syntactic": float(right[syntactic].mean())}
    return found


def _solved(vectors: np.ndarray, questions: np.ndarray) -> np.ndarray:
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    right = np.empty(len(questions), bool)
    for start in range(0, len(questions), BLOCK):
        a, b, c, d = questions[start : start + BLOCK].T
        cosines = (unit[b] - unit[a] + unit[c]) @ unit.T
        for given in (a, b, c):
            cosines[np.arange(len(given)), given] = -np.inf
        right[start : start + BLOCK] = cosines.argmax(1) == d
    return right


def _row(vectors: WordVectors, word: str) -> int | None:
    return vectors.index.get(word, vectors.index.get(word.lower()))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[at]
