"""Class sampling: positives kept, the same for every world size, uniform, at the rate asked for."""

from pathlib import Path

import numpy as np
import pytest
import torch

from plsc.comm import Shard
from plsc.ops.sampling import BLOCK, block_keys, permute, sample_classes


def shards(total: int, world: int) -> list[Shard]:
    return [Shard(total, rank, world) for rank in range(world)]


def union(labels: torch.Tensor, total: int, world: int, rate: float, step: int = 0, seed: int = 1) -> torch.Tensor:
    parts = [sample_classes(labels, s, rate=rate, seed=seed, step=step)[0] + s.start for s in shards(total, world)]
    return torch.cat(parts)


def test_permute_is_a_permutation_for_every_key() -> None:
    keys = block_keys(7, 3, torch.arange(50))
    ids = permute(keys[:, None], torch.arange(BLOCK)[None])
    assert torch.equal(ids.sort(1).values, torch.arange(BLOCK).expand(50, -1))
    assert len({tuple(row.tolist()[:8]) for row in ids}) == 50


@pytest.mark.parametrize("total", [1, 5, 1023, 1024, 1025, 10_000])
@pytest.mark.parametrize("rate", [0.0, 0.001, 0.1, 0.7, 1.0])
def test_every_world_draws_the_same_and_keeps_positives(total: int, rate: float) -> None:
    labels = torch.randint(0, total, (20,), generator=torch.Generator().manual_seed(0))
    labels[3] = -1
    whole = union(labels, total, 1, rate)
    for world in (2, 3, 4, 6):
        assert torch.equal(union(labels, total, world, rate), whole)
    assert set(labels.tolist()) - {-1} <= set(whole.tolist())
    assert torch.equal(whole, whole.unique()) and int(whole.max()) < total
    if rate == 1.0:
        assert len(whole) == total
    if rate == 0.0:
        assert len(whole) == len(labels[labels >= 0].unique())


def test_place_maps_labels_to_rows() -> None:
    labels = torch.tensor([0, 4999, 77, 77, -1, 2600])
    for shard in shards(5000, 3):
        rows, place = sample_classes(labels, shard, rate=0.05, seed=2, step=9)
        for label, at in zip(labels.tolist(), place.tolist(), strict=True):
            inside = shard.start <= label < shard.stop
            assert (at >= 0) == inside
            if inside:
                assert rows[at] + shard.start == label


def test_rate_is_met_and_every_class_has_its_turn() -> None:
    none = torch.tensor([-1])
    total, rate, steps = 2500, 0.1, 400
    counts = torch.zeros(total)
    for step in range(steps):
        counts[union(none, total, 1, rate, step)] += 1
    assert counts.sum().item() / (total * steps) == pytest.approx(rate, rel=0.01)
    spread = counts.var().item() / (steps * rate * (1 - rate))  # 1 for independent uniform draws
    assert 0.85 < spread < 1.15 and counts.min() > 0


def test_small_rates_are_right_on_average() -> None:
    drawn = sum(len(union(torch.tensor([-1]), 100_000, 1, 0.0004, step)) for step in range(50))
    assert drawn / 50 == pytest.approx(40, rel=0.1)


def test_steps_and_seeds_differ_and_repeat() -> None:
    none = torch.tensor([-1])
    a = union(none, 4000, 1, 0.1, step=1)
    assert torch.equal(a, union(none, 4000, 1, 0.1, step=1))
    overlap = len(set(a.tolist()) & set(union(none, 4000, 1, 0.1, step=2).tolist())) / len(a)
    assert overlap < 0.2
    assert not torch.equal(a, union(none, 4000, 1, 0.1, step=1, seed=-5))


def test_properties_of_the_reference_operator(shared: Path) -> None:
    """What class_center_sample promises: positives all kept, unique, sorted by id for us, labels remapped both ways."""
    golden = np.load(shared / "reference/golden/golden_class_center_sample_cpu.npz")
    for case in sorted({name.split("_")[0] for name in golden.files if name.endswith("_label")}):
        labels = torch.from_numpy(golden[f"{case}_label"]).long()
        classes, samples = int(golden[f"{case}_num_classes"]), int(golden[f"{case}_num_samples"])
        rows, place = sample_classes(labels, Shard(classes, 0, 1), rate=min(samples / classes, 1.0), seed=0, step=0)
        assert torch.equal(rows[place], labels) and len(rows.unique()) == len(rows)
        theirs, remapped = golden[f"{case}_sampled"], golden[f"{case}_remapped"]
        assert (theirs[remapped] == labels.numpy()).all()
        assert len(rows) >= len(labels.unique())


def test_bad_rate() -> None:
    with pytest.raises(ValueError, match=r"sample rate is 1\.2"):
        sample_classes(torch.tensor([0]), Shard(3, 0, 1), rate=1.2, seed=0, step=0)
