"""Orders: permutations that are computed, batches of P classes with K images; the same on any number of ranks."""

import numpy as np
import pytest

from plsc.data import Loader, Samples, Synthetic
from plsc.data import order as module
from plsc.data.order import BalancedOrder, Order, Permutation


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_a_permutation_has_each_number_once(n: int) -> None:
    found = [tuple(Permutation(n, seed, epoch)(np.arange(n)).tolist()) for seed in (0, 7) for epoch in (0, 1)]
    assert all(sorted(each) == list(range(n)) for each in found)
    assert n < 64 or len(set(found)) == 4


def test_a_permutation_is_even() -> None:
    """Rank correlation of place and number, and of neighbours, within five standard deviations of none."""
    n = 100_003
    found = Permutation(n, 3, 1)(np.arange(n))
    limit = 5 / np.sqrt(n)
    assert abs(np.corrcoef(found, np.arange(n))[0, 1]) < limit
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < limit
    spread = np.bincount(found[: n // 10] * 10 // n, minlength=10)  # where the first tenth goes
    assert ((spread - n / 100) ** 2 / (n / 100)).sum() < 40  # chi-square of 9 degrees of freedom


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_and_places(monkeypatch: pytest.MonkeyPatch, large: bool, shuffle: bool) -> None:
    monkeypatch.setattr(module, "LARGE", 10 if large else 10**9)
    monkeypatch.setattr(module, "_BLOCK", 12)  # several blocks an epoch
    n, batch = 103, 12

    def steps(world_size: int, position: int = 0) -> list[list[int]]:
        orders = [Order(n, batch, rank, world_size, 5 if shuffle else None) for rank in range(world_size)]
        for each in orders:
            each.epoch, each.position = 2, position
        return [[i for _, part in parts for i in part.tolist()] for parts in zip(*orders, strict=True)]

    whole = steps(1)
    assert len(whole) == 8 and len({i for step in whole for i in step}) == 96
    assert shuffle or whole[3] == list(range(36, 48))
    for world_size in (2, 3, 4):
        assert steps(world_size) == whole
    assert steps(2, 36) == whole[3:] and steps(1, 96) == []
    assert steps(1, 7)[0][:5] == whole[0][7:]  # a place saved with another batch size


def test_a_large_order_holds_no_permutation() -> None:
    order = Order(2**40, 64, 0, 1, 5)  # would be 8 TiB
    order.position = 2**39
    _, samples = next(iter(order))
    assert len(set(samples.tolist())) == 64 and samples.max() < 2**40 and samples.max() > 2**36


LABELS = np.random.default_rng(0).permutation(np.repeat([-1, 0, 1, 2, 3, 5, 6, 7], [9, 1, 2, 3, 40, 5, 6, 7]))


def balanced(world_size: int, position: int = 0, epoch: int = 0) -> list[list[int]]:
    orders = [BalancedOrder(LABELS, 12, rank, world_size, 5, per_class=3) for rank in range(world_size)]
    for each in orders:
        each.epoch, each.position = epoch, position
    return [[i for _, part in parts for i in part.tolist()] for parts in zip(*orders, strict=True)]


def test_classes_come_with_k_images_and_equally_often() -> None:
    steps = balanced(1)
    assert len(steps) == len(LABELS) // 12
    counts = np.zeros(8, int)
    for step in steps:
        groups = LABELS[step].reshape(4, 3)
        assert (groups == groups[:, :1]).all() and len(set(groups[:, 0].tolist())) == 4
        for images, label in zip(np.reshape(step, (4, 3)).tolist(), groups[:, 0].tolist(), strict=True):
            counts[label] += 1
            assert len(set(images)) == 3 or (label == LABELS).sum() < 3
    assert counts[4] == 0  # no image
    many = np.concatenate([LABELS[step] for epoch in range(60) for step in balanced(1, epoch=epoch)])
    shares = np.bincount(many, minlength=8)[[0, 1, 2, 3, 5, 6, 7]] / len(many)
    assert abs(shares - 1 / 7).max() < 0.02  # though one class has 40 images and one has 1


def test_balance_is_the_same_on_any_number_of_ranks_and_resumes() -> None:
    whole = balanced(1)
    assert balanced(2) == whole and balanced(4) == whole and balanced(2, 24) == whole[2:]
    assert balanced(1, epoch=1) != whole


def test_balance_through_the_loader() -> None:
    data = Synthetic(60, 12, image_size=8)
    loader = Loader(data, 8, per_class=2, seed=3)
    labels = [found.tolist() for _, found in loader.epochs(1)]
    assert len(labels) == 7 and all(step[::2] == step[1::2] and len(set(step)) == 4 for step in labels)
    other = Loader(data, 8, per_class=2, seed=3)
    for k, _ in enumerate(loader.epochs(2)):
        if k == 2:
            other.load_state_dict(loader.state_dict())
            break
    rest = [found.tolist() for _, found in loader.epochs(2)]
    assert [found.tolist() for _, found in other.epochs(2)] == rest and len(rest) == 4
    with pytest.raises(ValueError, match="per_class=2, not the 0 of this loader"):
        Loader(data, 8, seed=3).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("per_class", "batch_size", "message"),
    [(5, 12, "expected a divisor"), (-1, 12, "expected a divisor"), (1, 12, "got 7 classes with images, expected 12")],
)
def test_what_balance_cannot_do(per_class: int, batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BalancedOrder(LABELS, batch_size, 0, 1, 0, per_class=per_class)
    assert len(Samples([(np.zeros((2, 2), np.uint8), 0)])) == 1
