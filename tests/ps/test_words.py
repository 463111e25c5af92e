"""Skip-gram in the core against a twin in plain numpy, and on the rows of every mode."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from plsc.ps import Async, Direct, Geo, Host, Seat, Store, Sync, Table, WordLoop

MASK = (1 << 64) - 1
WORDS = 50


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Draws:
    """The stream of random words that belongs to a sentence."""

    def __init__(self, seed: int, epoch: int, sentence: int) -> None:
        key = (epoch << 40) + sentence
        self.state = mix(mix((seed + 0x9E3779B97F4A7C15) & MASK) ^ ((key * 0xD1342543DE82EF95 + 1) & MASK))

    def __call__(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        return mix(self.state)


def twin(
    rows: tuple[np.ndarray, np.ndarray],
    text: tuple[np.ndarray, np.ndarray],
    noise: tuple[np.ndarray, np.ndarray],
    *,
    keep: np.ndarray,
    window: int,
    negatives: int,
    shared: bool,
    seed: int,
    epoch: int,
    first: int,
    lr: float,
) -> int:
    """Trains float64 rows in place, pair after pair; how many pairs."""
    inputs, outputs = rows
    tokens, starts = text
    pairs = 0
    for s in range(len(starts) - 1):
        draw = Draws(seed, epoch, first + s)
        kept = [
            w
            for w in map(int, tokens[starts[s] : starts[s + 1]])
            if keep[w] >= 1 or draw() >> 32 < int(keep[w] * 2.0**32)
        ]
        for at, centre in enumerate(kept):
            reach = 1 + ((draw() >> 32) * window >> 32)
            beside = [i for i in range(max(0, at - reach), min(len(kept), at + reach + 1)) if i != at]
            drawn: list[int] = []
            for n, i in enumerate(beside):
                if not shared or n == 0:
                    drawn = [negative(draw(), noise) for _ in range(negatives)]
                targets = [centre, *(word for word in drawn if word != centre)]
                x = inputs[kept[i]].copy()
                labels = np.eye(1, len(targets))[0]
                slopes = lr * (labels - 1 / (1 + np.exp(-outputs[targets] @ x)))
                for g, target in zip(slopes, targets, strict=True):
                    inputs[kept[i]] += g * outputs[target]
                    outputs[target] += g * x
                pairs += 1
    return pairs


def negative(x: int, noise: tuple[np.ndarray, np.ndarray]) -> int:
    slot = (x >> 32) * WORDS >> 32
    return slot if x & 0xFFFFFFFF < noise[0][slot] else int(noise[1][slot])


def a_text(seed: int = 0, sentences: int = 30) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 15, sentences)
    starts = np.r_[0, np.cumsum(lengths)].astype(np.int64)
    tokens = np.minimum(random.zipf(1.3, int(starts[-1])) - 1, WORDS - 1).astype(np.int32)
    return tokens, starts


KEEP = np.linspace(0.3, 1.2, WORDS).clip(0, 1)
WEIGHTS = np.arange(WORDS, 0, -1) ** 0.75


def tables(dim: int, **options: Any) -> tuple[Table, Table]:
    made = [Table(dim, rule="sgd", lr=1.0, init="normal", init_scale=0.3, seed=seed, **options) for seed in (1, 2)]
    return made[0], made[1]


def values(store: Any) -> np.ndarray:
    return store.pull(np.arange(WORDS, dtype=np.uint64), create=False)


def loop_on(stores: tuple[Store, Store], **options: Any) -> WordLoop:
    return WordLoop(*stores, **{"keep": KEEP, "weights": WEIGHTS, "seed": 5, **options})


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("dim", "negatives", "instructions"),
    [(100, 5, ""), (7, 3, ""), (33, 2, ""), (16, 11, ""), (1, 1, ""), (31, 4, "plain"), (47, 6, "avx2")],
)
def test_equals_the_twin(dim: int, negatives: int, shared: bool, instructions: str) -> None:
    stores, text = tables(dim), a_text(sentences=20)
    try:
        loop = loop_on(stores, window=3, negatives=negatives, shared=shared, instructions=instructions)
    except ValueError:
        pytest.skip(f"this processor has no {instructions}")
    rows = (values(stores[0]).astype(np.float64), values(stores[1]).astype(np.float64))
    before = rows[0].copy()
    done = loop.train(*text, first=7, epoch=3, lr=0.1)
    options = {"window": 3, "negatives": negatives, "shared": shared, "seed": 5, "epoch": 3, "first": 7, "lr": 0.1}
    assert done.pairs == twin(rows, text, loop.noise(), keep=KEEP, **options) > 200
    assert 0 < done.sampled < done.pairs and done.kept < len(text[0])
    assert np.abs(rows[0] - before).max() > 0.05
    for store, wanted in zip(stores, rows, strict=True):
        np.testing.assert_allclose(values(store), wanted, rtol=1e-5, atol=1e-5)


def test_loss_is_that_of_the_formula() -> None:
    """Two words, of which one is never drawn: the pair's loss by hand; at the first kept word it is taken."""
    stores = tables(8)
    a, b = (values(store)[:2].astype(np.float64) for store in stores)
    loop = WordLoop(*stores, keep=np.ones(2), weights=np.array([0.0, 1.0]), window=1, negatives=3)
    done = loop.train(np.array([0, 1], np.int32), np.array([0, 2]), first=0, epoch=0, lr=0.0)
    wanted = np.log1p(np.exp(-a[1] @ b[0])) + 3 * np.log1p(np.exp(a[1] @ b[1]))
    assert done.sampled == 1 and done.pairs == 2 and done.loss == pytest.approx(wanted, rel=1e-6)


def test_draws_do_not_depend_on_how_a_text_is_cut() -> None:
    whole, cut = tables(12), tables(12)
    tokens, starts = a_text()
    loop_on(whole).train(tokens, starts, first=0, epoch=0, lr=0.1)
    loop = loop_on(cut)
    for begin, end in ((0, 11), (11, 12), (12, 30)):
        loop.train(tokens, starts[begin : end + 1], first=begin, epoch=0, lr=0.1)
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(values(one), values(other))
    again = tables(12)
    loop_on(again, seed=6).train(tokens, starts, first=0, epoch=0, lr=0.1)
    assert (values(again[0]) != values(whole[0])).any()


def test_negatives_are_drawn_by_weight() -> None:
    """The mass that the alias tables give each word, added up."""
    weights = np.random.default_rng(0).random(WORDS) ** 4
    weights[3] = 0.0
    thresholds, aliases = loop_on(tables(2), weights=weights).noise()
    share = thresholds / 2.0**32
    mass = share + np.bincount(aliases, 1.0 - share, WORDS)
    np.testing.assert_allclose(mass / WORDS, weights / weights.sum(), atol=1e-9)


def test_marks_are_the_rows_that_move() -> None:
    stores, (tokens, starts) = tables(4), a_text(sentences=3)
    loop = loop_on(stores)
    before = [values(store) for store in stores]
    marks = np.zeros((2, WORDS), np.uint8)
    loop._core.touched(tokens, starts, 0, 0, marks[0], marks[1])
    loop.train(tokens, starts, first=0, epoch=0, lr=0.1)
    for store, old, mark in zip(stores, before, marks, strict=True):
        np.testing.assert_array_equal((values(store) != old).any(1), mark.astype(bool))


MODES: dict[str, Callable[[Seat], Any]] = {
    "direct": Direct,
    "async": lambda seat: Async(seat, merge=1, staleness=0),
    "sync": lambda seat: Sync(seat, workers=1),
    "geo": lambda seat: Geo(seat, every=2),
    "geo, each row at its pace": lambda seat: Geo(seat, every=2, pace=0.01),
}


@pytest.mark.parametrize("mode", MODES)
def test_one_worker_in_any_mode_equals_tables_here(mode: str) -> None:
    here, served = tables(10), tables(10, locked=True)
    stores = tuple(MODES[mode](Seat(Host(table))) for table in served)
    for pair in (here, stores):
        loop = loop_on(pair)
        for epoch in range(4):
            tokens, starts = a_text(seed=epoch)
            loop.train(tokens, starts, first=0, epoch=epoch, lr=0.1)
    for store in stores:
        store.close()
    for table, wanted in zip(served, here, strict=True):
        # Differences are rounded on their way: to the copy's bits in Geo, to the pushes' elsewhere.
        np.testing.assert_allclose(values(table), values(wanted), rtol=0, atol=2e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_steps_are_counted_as_they_are_drawn(shared: bool) -> None:
    """What a Geo's copy is told of a long text: steps on average, against those of the twin's draws."""
    random = np.random.default_rng(3)
    tokens = np.minimum(random.zipf(1.3, 40_000) - 1, WORDS - 1).astype(np.int32)
    starts = np.arange(0, len(tokens) + 1, 2_000)
    told: list[np.ndarray] = []

    class Told(Geo):
        def touch(self, keys: Any, steps: Any = None, *, wait: bool = True) -> int:
            told.append(np.bincount(keys.astype(np.int64), steps, WORDS))
            return 0

    stores = tuple(Told(Seat(Host(table)), every=9, pace=0.01) for table in tables(2, locked=True))
    loop = loop_on(stores, window=3, negatives=4, shared=shared)
    pairs = loop.train(tokens, starts, first=0, epoch=0, lr=0.1).pairs
    noise = WEIGHTS / WEIGHTS.sum()
    kept = np.bincount(tokens, minlength=WORDS) * KEEP
    np.testing.assert_allclose(told[0].sum(), pairs, rtol=0.02)
    np.testing.assert_allclose(told[0], kept * 4, rtol=1e-5)
    drawn = kept.sum() if shared else pairs
    np.testing.assert_allclose(told[1], kept * 4 + 4 * drawn * noise, rtol=0.02)


def test_both_copies_exchange_at_the_same_time() -> None:
    meeting = threading.Barrier(2)

    class Meeting(Seat):
        def exchange(self, keys: np.ndarray, deltas: np.ndarray) -> Any:
            meeting.wait(10)
            return super().exchange(keys, deltas)

    stores = tuple(Geo(Meeting(Host(table)), every=1) for table in tables(2, locked=True))
    loop_on(stores).train(*a_text(sentences=5), first=0, epoch=0, lr=0.1)
    assert [(store.sends, store.pending) for store in stores] == [(1, 0), (1, 0)]
    for store in stores:
        store.close()


def test_threads_share_rows() -> None:
    stores = tables(8)
    loop = loop_on(stores)
    tokens, starts = a_text(sentences=200)
    threads = [
        threading.Thread(target=loop.train, args=(tokens, starts), kwargs={"first": 0, "epoch": i, "lr": 0.05})
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.isfinite(values(store)).all() for store in stores)
    last = loop.train(tokens, starts, first=0, epoch=9, lr=0.0)
    fresh = loop_on(tables(8)).train(tokens, starts, first=0, epoch=9, lr=0.0)
    assert last.loss < 0.9 * fresh.loss


def test_addresses_are_of_rows_that_stay() -> None:
    table = Table(4, rule="sgd", lr=1.0, init="constant", init_scale=2.0)
    keys = np.array([3, 2**64 - 1], np.uint64)
    addresses = table.addresses(keys)
    assert len(table) == 2 and len(set(addresses)) == 2
    table.pull(np.arange(10_000, dtype=np.uint64))
    np.testing.assert_array_equal(table.addresses(keys), addresses)
    for options in ({"dtype": "fp16"}, {"max_rows": 10_000}):
        with pytest.raises(ValueError, match="expected fp32 rows that stay"):
            Table(4, **options).addresses(keys)


def test_bad_input() -> None:
    stores = tables(4)
    with pytest.raises(ValueError, match="two stores of one dimension"):
        loop_on((stores[0], Table(5)))
    with pytest.raises(ValueError, match="window=0"):
        loop_on(stores, window=0)
    with pytest.raises(ValueError, match="one of each for every word"):
        loop_on(stores, weights=WEIGHTS[:3])
    with pytest.raises(ValueError, match="one of each for every word"):
        loop_on(stores, weights=np.full(WORDS, np.nan))
    with pytest.raises(ValueError, match="expected SGD"):
        loop_on((Direct(Seat(Host(Table(4)))), stores[1]))
    with pytest.raises(ValueError, match="no mmx"):
        loop_on(stores, instructions="mmx")
    loop = loop_on(stores)
    before = values(stores[0])
    for tokens, starts, word in [
        ([WORDS], [0, 1], "not in the vocabulary"),
        ([-1], [0, 1], "not in the vocabulary"),
        ([0, 1], [0, 3], "outside"),
        ([0, 1], [-1, 2], "outside"),
        ([0, 1], [2, 0], "starts fall"),
    ]:
        with pytest.raises(ValueError, match=word):
            loop.train(np.array(tokens, np.int32), np.array(starts, np.int64), first=0, epoch=0, lr=0.1)
    with pytest.raises(ValueError, match="expected int32 and int64"):
        loop.train(np.array([0.0, 1.0]), np.array([0, 2]), first=0, epoch=0, lr=0.1)
    np.testing.assert_array_equal(values(stores[0]), before)
    assert loop.train(np.empty(0, np.int32), np.zeros(1, np.int64), first=0, epoch=0, lr=0.1).pairs == 0
