"""Optimizers by name, groups without decay, LARS against its formula, and schedules as functions of the step."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from plsc.comm import Communicator, Shard, mark, run_ranks
from plsc.strategies import LARS, Schedule, build_optimizer, param_groups, set_lr


def test_groups_spare_biases_and_norms() -> None:
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.PReLU(2), nn.Linear(2, 2))
    backbone[3].register_parameter("frozen", nn.Parameter(torch.ones(2, 2), requires_grad=False))
    head = nn.Module()
    head.weight, head.tied = nn.Parameter(torch.ones(3, 2)), backbone[3].weight
    head.bias = nn.Parameter(torch.ones(1, 3))
    decayed, plain = param_groups(backbone, head, weight_decay=5e-4)
    assert decayed["weight_decay"] == 5e-4 and plain["weight_decay"] == 0
    expected = [backbone[0].weight, backbone[3].weight, head.weight]
    assert len(decayed["params"]) == 3 and all(a is b for a, b in zip(decayed["params"], expected, strict=True))
    assert len(plain["params"]) == 6
    assert len(param_groups(nn.BatchNorm1d(2), weight_decay=1.0)) == 1
    with pytest.raises(ValueError, match="no trainable parameter"):
        param_groups(nn.ReLU(), weight_decay=0.0)


def test_build_by_name() -> None:
    groups = param_groups(nn.Linear(2, 2), weight_decay=0.1)
    sgd = build_optimizer("sgd", groups, lr=0.5, momentum=0.8, nesterov=True)
    assert isinstance(sgd, torch.optim.SGD)
    assert [group["weight_decay"] for group in sgd.param_groups] == [0.1, 0.0]
    assert all(group["nesterov"] and group["momentum"] == 0.8 for group in sgd.param_groups)
    adamw = build_optimizer("adamw", nn.Linear(2, 2).parameters(), lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    assert isinstance(adamw, torch.optim.AdamW)
    assert [adamw.param_groups[0][key] for key in ("betas", "eps", "weight_decay")] == [(0.8, 0.9), 1e-6, 0.2]
    lars = build_optimizer("lars", nn.Linear(2, 2).parameters(), lr=0.5, trust=0.01)
    assert isinstance(lars, LARS) and lars.param_groups[0]["trust"] == 0.01
    set_lr(sgd, 0.25)
    set_lr(sgd, 0.5)
    assert [group["lr"] for group in sgd.param_groups] == [0.25, 0.25]
    with pytest.raises(ValueError, match="initial_lr"):
        set_lr(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), 1.0)
    with pytest.raises(ValueError, match="expected one of sgd"):
        build_optimizer("adam", groups, lr=0.1)
    with pytest.raises(ValueError, match="nesterov"):
        build_optimizer("lars", groups, lr=0.1, nesterov=True)
    with pytest.raises(ValueError, match="trust"):
        build_optimizer("lars", groups, lr=0.1, trust=0.0)


def lars_by_hand(w: np.ndarray, grads: list[np.ndarray], *, lrs: list[float], by_row: bool) -> np.ndarray:
    """Momentum .9, decay .01, trust .02, in numpy; a vector has ratio 1."""
    v = np.zeros_like(w)
    for g, lr in zip(grads, lrs, strict=True):
        parts = range(len(w)) if by_row else [slice(None)]
        step = np.empty_like(w)
        for part in parts:
            nw, ng = np.sqrt((w[part] ** 2).sum()), np.sqrt((g[part] ** 2).sum())
            ratio = 0.02 * nw / (ng + 0.01 * nw) if nw > 0 and ng > 0 and w.ndim > 1 else 1.0
            step[part] = ratio * (g[part] + 0.01 * w[part])
        v = 0.9 * v + step
        w = w - lr * v
    return w


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4,)])
def test_lars_follows_its_formula(cut: bool, shape: tuple[int, ...]) -> None:
    rng, lrs = np.random.default_rng(0), [0.5, 0.3, 0.1]
    start, grads = rng.normal(size=shape), [rng.normal(size=shape) for _ in lrs]
    start[1] = 0  # ratio 1 for this row where rows have their own
    grads[0][2] = 0
    param = nn.Parameter(torch.from_numpy(start.copy()))
    if cut:
        mark(param, Shard(4, 0, 1))
    optimizer = build_optimizer("lars", [param], lr=1.0, momentum=0.9, weight_decay=0.01, trust=0.02)
    for grad, lr in zip(grads, lrs, strict=True):
        param.grad = torch.from_numpy(grad.copy())
        set_lr(optimizer, lr)
        optimizer.step()
        assert np.array_equal(param.grad.numpy(), grad)
    expected = lars_by_hand(start, grads, lrs=lrs, by_row=cut)
    np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-12, atol=1e-14)


def test_lars_on_a_cut_weight_does_not_depend_on_the_number_of_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, grad = torch.randn(2, 5, 3, generator=generator)

    def rank(comm: Communicator) -> torch.Tensor:
        shard = Shard.of(5, comm)
        param = mark(nn.Parameter(weight[shard.start : shard.stop].clone()), shard)
        optimizer = LARS([param], 0.1)
        for _ in range(2):
            param.grad = grad[shard.start : shard.stop]
            optimizer.step()
        return param.detach()

    one = run_ranks(1, rank)[0]
    for world_size in (2, 4):
        assert torch.equal(torch.cat(run_ranks(world_size, rank)), one)


def test_lars_state_resumes() -> None:
    def step(optimizer: LARS, param: nn.Parameter) -> None:
        param.grad = torch.ones_like(param)
        optimizer.step(lambda: 1.0)

    first = nn.Parameter(torch.arange(6.0).view(2, 3))
    one = LARS([first], 0.1)
    step(one, first)
    second = nn.Parameter(first.detach().clone())
    two = LARS([second], 0.1)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    step(one, first)
    step(two, second)
    assert torch.equal(first, second)
    first.grad = torch.ones(2, 3).to_sparse()
    with pytest.raises(ValueError, match="dense"):
        one.step()


def test_schedules() -> None:
    poly = Schedule("polynomial", 12, warmup_steps=2, power=2.0)
    assert [poly.factor(step) for step in (0, 1, 2, 7, 12, 99)] == [0.5, 1.0, 1.0, 0.25, 0.0, 0.0]
    cosine = Schedule("cosine", 10, final=0.1)
    assert [cosine.factor(step) for step in (0, 5, 10)] == pytest.approx([1.0, 0.55, 0.1])
    assert cosine.factor(3) == pytest.approx(0.1 + 0.9 * (1 + math.cos(0.3 * math.pi)) / 2)
    steps = Schedule("step", 10, warmup_steps=1, milestones=(4, 8), gamma=0.5)
    assert [steps.factor(step) for step in (0, 3, 4, 7, 8, 20)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert [Schedule("constant", 4, warmup_steps=4).factor(step) for step in (0, 3, 4, 9)] == [0.25, 1.0, 1.0, 1.0]
    assert Schedule("polynomial", 3, warmup_steps=3).factor(3) == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        poly.power = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "linear"}, "expected one of polynomial"),
        ({"kind": "cosine", "total_steps": 0}, "total_steps >= 1"),
        ({"kind": "cosine", "warmup_steps": 11}, "warmup_steps <= total_steps"),
        ({"kind": "cosine", "final": 2.0}, "final in"),
        ({"kind": "cosine", "milestones": (3,)}, "none for the others"),
        ({"kind": "step"}, "rising steps"),
        ({"kind": "step", "milestones": (5, 3)}, "rising steps"),
    ],
)
def test_wrong_schedules(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**{"total_steps": 10, **arguments})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step -1"):
        Schedule("constant", 1).factor(-1)
