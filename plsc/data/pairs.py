"""Pairs of images for verification: read from a list in LFW's format, or drawn from a labelled data set."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
from numpy.typing import NDArray

from plsc.data.embeddings import atomic_file


@dataclass(frozen=True)
class Pairs:
    """Which images to compare: P pairs in `num_folds` contiguous folds of equal size."""

    first: NDArray[np.int64]  # [P] sample numbers
    second: NDArray[np.int64]  # [P]
    same: NDArray[np.bool_]  # [P] true where both show one class
    num_folds: int

    def __len__(self) -> int:
        return len(self.same)


def read_pairs(path: str | os.PathLike[str], names: Sequence[str]) -> Pairs:
    """Reads pairs in the format of LFW's pairs.txt; `names` are the image names of the data set, in sample order.

    First line: folds and pairs of each kind a fold (`10 300`; a lone count means one fold). Then for each fold lines
    `NAME i j` and `NAME i OTHER j`, image i of NAME being NAME_000i.jpg (any folder and suffix). ValueError names the
    line that is wrong or the images that are missing.
    """
    with open(path, encoding="utf-8-sig") as file:
        lines = [(number, fields) for number, line in enumerate(file, 1) if (fields := line.split())]
    if not lines or len(lines[0][1]) not in (1, 2) or not all(field.isdecimal() for field in lines[0][1]):
        raise ValueError(f"{path}: expected a first line `folds pairs`, such as `10 300`")
    folds, each = [1, *map(int, lines[0][1])][-2:]
    if folds < 1 or each < 1 or len(lines) - 1 != 2 * folds * each:
        raise ValueError(
            f"{path}: got {len(lines) - 1} pairs, expected {folds} folds of {each} same and {each} different"
        )
    stems = [PurePosixPath(name).stem for name in names]
    index = {stem: i for i, stem in enumerate(stems)}
    pairs, same, missing = np.empty((len(lines) - 1, 2), np.int64), np.empty(len(lines) - 1, np.bool_), []
    for p, (number, fields) in enumerate(lines[1:]):
        if len(fields) not in (3, 4) or not (
            fields[-1].isdecimal() and fields[-2 if len(fields) == 3 else 1].isdecimal()
        ):
            raise ValueError(
                f"{path}, line {number}: got {' '.join(fields)!r}, expected `NAME i j` or `NAME i OTHER j`"
            )
        person, i, other, j = (fields[0], fields[1], fields[0], fields[2]) if len(fields) == 3 else fields
        same[p] = person == other
        for side, name in enumerate((f"{person}_{int(i):04d}", f"{other}_{int(j):04d}")):
            if name not in index:
                missing.append(name)
            pairs[p, side] = index.get(name, -1)
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        none = ""
        if len(missing) == pairs.size:
            none = (
                f"; its images are called {names[0]!r} and so on, expected NAME_0001.jpg: a .rec has no names, read "
                "what it was made of"
            )
        raise ValueError(f"{path}: {len(missing)} images are not in the data set: {shown}{none}")
    if len(index) < len(names):  # a name in two folders: which of them is meant?
        counts = Counter(stems)
        if twice := [stems[row] for row in np.unique(pairs).tolist() if counts[stems[row]] > 1]:
            raise ValueError(
                f"{path}: {len(twice)} of its images are named alike in several folders of the data set: "
                f"{', '.join(twice[:5])}; expected each NAME_0001 once, rename them"
            )
    if any(same[fold].sum() != each for fold in np.split(np.arange(len(same)), folds)):
        raise ValueError(f"{path}: a fold has not {each} pairs of each kind; expected the folds one after the other")
    return Pairs(pairs[:, 0].copy(), pairs[:, 1].copy(), same, folds)


def write_pairs(path: str | os.PathLike[str], pairs: Pairs, names: Sequence[str]) -> None:
    """Writes pairs as LFW's pairs.txt, which `read_pairs` reads with the same names, each NAME_0001.jpg or the like.

    ValueError: names of another form, folds that are not equally many pairs of each kind, in this order.
    """
    each = len(pairs) // (2 * pairs.num_folds)
    expected = np.tile(np.repeat([True, False], each), pairs.num_folds)
    if not np.array_equal(np.asarray(pairs.same, np.bool_), expected):
        raise ValueError(f"{path}: expected folds of {each} same and then {each} different pairs")
    lines = [f"{pairs.num_folds}\t{each}"]
    for first, second, same in zip(pairs.first.tolist(), pairs.second.tolist(), pairs.same.tolist(), strict=True):
        (person, i), (other, j) = (_person(path, names[row]) for row in (first, second))
        if (person == other) != same:
            raise ValueError(f"{path}: {names[first]} and {names[second]} contradict their labels by their names")
        lines.append(f"{person}\t{i}\t{j}" if same else f"{person}\t{i}\t{other}\t{j}")
    with atomic_file(os.fspath(path)) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def _person(path: str | os.PathLike[str], name: str) -> tuple[str, int]:
    person, _, number = PurePosixPath(name).stem.rpartition("_")
    if not person or not number.isdecimal() or f"{int(number):04d}" != number or len(person.split()) != 1:
        raise ValueError(
            f"{path}: got an image named {name}, expected NAME_0001.jpg without blanks; `plsc-data convert` to .rec, "
            "and from there to a folder, names images so"
        )
    return person, int(number)


def make_pairs(labels: NDArray[np.integer], *, num_pairs: int, folds: int = 10, seed: int = 0) -> Pairs:
    """Draws pairs without repeats, half of one class and half of two; no class stands in two folds.

    Same-class pairs go round the classes, so that one with many images does not fill a fold; different pairs draw two
    classes alike often. Samples of label -1 are left out. ValueError if a fold's classes do not give enough pairs.
    """
    if folds < 1 or num_pairs < 1 or num_pairs % (2 * folds):
        raise ValueError(f"got num_pairs={num_pairs}, expected a multiple of 2 * folds = {2 * folds}")
    rng = np.random.default_rng(seed)
    order = np.argsort(labels, kind="stable")
    order = order[np.asarray(labels)[order] >= 0]
    _, starts = np.unique(np.asarray(labels)[order], return_index=True)
    classes = np.split(order, starts[1:]) if len(order) else []
    # Classes with two images or more are dealt first, so that every fold gets its part of them.
    shuffled = [classes[c] for c in rng.permutation(len(classes))]
    dealt = [c for c in shuffled if len(c) > 1] + [c for c in shuffled if len(c) == 1]
    each = num_pairs // (2 * folds)
    parts = []
    for fold in range(folds):
        own = dealt[fold::folds]
        parts += [_same_pairs(own, each, rng, fold), _different_pairs(own, each, rng, fold)]
    pairs = np.concatenate(parts)
    same = np.tile(np.repeat([True, False], each), folds)
    return Pairs(pairs[:, 0].copy(), pairs[:, 1].copy(), same, folds)


def _same_pairs(classes: list[NDArray[np.int64]], count: int, rng: np.random.Generator, fold: int) -> NDArray[np.int64]:
    most = sum(len(c) * (len(c) - 1) // 2 for c in classes)
    if most < count:
        raise ValueError(
            f"fold {fold} has {most} pairs of one class, expected {count}; use fewer pairs or folds, or more images"
        )
    pairs: list[tuple[int, int]] = []
    left = [(c, set[tuple[int, int]]()) for c in classes if len(c) > 1]
    while len(pairs) < count:
        for c, used in left[: count - len(pairs)]:
            while True:
                i, j = sorted(rng.choice(len(c), 2, replace=False).tolist()) if len(c) > 2 else (0, 1)
                if (i, j) not in used:
                    break
            used.add((i, j))
            pairs.append((int(c[i]), int(c[j])))
        left = [(c, used) for c, used in left if len(used) < len(c) * (len(c) - 1) // 2]
    return np.array(pairs, np.int64).reshape(-1, 2)


def _different_pairs(
    classes: list[NDArray[np.int64]], count: int, rng: np.random.Generator, fold: int
) -> NDArray[np.int64]:
    images = sum(map(len, classes))
    most = (images * images - sum(len(c) ** 2 for c in classes)) // 2
    if most < count:
        raise ValueError(
            f"fold {fold} has {most} pairs of two classes, expected {count}; use fewer pairs or folds, or more classes"
        )
    if most < 4 * count:  # few to choose from: list them all
        every = [(i, j) for a, c in enumerate(classes) for d in classes[a + 1 :] for i in c for j in d]
        return np.array(every, np.int64)[rng.permutation(len(every))[:count]]
    found: dict[tuple[int, int], None] = {}  # a set that keeps its order
    while len(found) < count:
        a, b = sorted(rng.choice(len(classes), 2, replace=False).tolist())
        found[int(rng.choice(classes[a])), int(rng.choice(classes[b]))] = None
    return np.array(list(found), np.int64)
