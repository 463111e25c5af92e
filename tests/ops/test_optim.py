"""Row optimizers step like their torch twins, row by row, and touch nothing else."""

from typing import Any

import pytest
import torch

from plsc.comm import Shard, mark
from plsc.ops import LARS, SGD, AdamW, RowOptimizer
from plsc.ops.optim import apply_rows
from plsc.strategies import LARS as WholeLARS

TWINS: dict[str, tuple[RowOptimizer, Any]] = {
    "sgd": (SGD(0.1, 0.01, momentum=0.8), lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, weight_decay=0.01)),
    "adamw": (AdamW(0.01, 0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    "lars": (LARS(0.5, 0.01, momentum=0.8), lambda p: WholeLARS(p, 0.5, momentum=0.8, weight_decay=0.01)),
}


@pytest.mark.parametrize("name", list(TWINS))
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)])
def test_all_rows_equal_the_twin(name: str, shape: tuple) -> None:
    ours, twin = TWINS[name]
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=g, dtype=torch.float64)
    plain = mark(torch.nn.Parameter(weight.clone()), Shard(6, 0, 1))  # a cut weight: LARS takes one ratio a row
    optimizer, state = twin([plain]), ours.state(weight)
    for _ in range(4):
        plain.grad = torch.randn(*shape, generator=g, dtype=torch.float64)
        apply_rows(ours, weight, state, None, plain.grad.clone())
        optimizer.step()
        torch.testing.assert_close(weight, plain.detach(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", list(TWINS))
def test_chosen_rows_step_as_if_alone(name: str) -> None:
    """Rows that come up at different steps end where a weight of that row alone would."""
    ours, _ = TWINS[name]
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(5, 3, generator=g, dtype=torch.float64)
    alone = weight[2:3].clone()
    state, alone_state = ours.state(weight), ours.state(alone)
    untouched = weight[4].clone()
    for rows in ([0, 2], [1], [2, 3], [0, 1, 2]):
        grad = torch.randn(len(rows), 3, generator=g, dtype=torch.float64)
        if 2 in rows:
            apply_rows(ours, alone, alone_state, None, grad[rows.index(2)][None].clone())
        apply_rows(ours, weight, state, torch.tensor(rows), grad)
    assert torch.equal(weight[2], alone[0]) and torch.equal(weight[4], untouched)
    assert all((value[4] == 0).all() for value in state.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-0.1), "lr is -0.1"),
        (lambda: SGD("0.1"), "lr is '0.1', expected a finite number"),
        (lambda: SGD(float("inf")), "lr is inf, expected a finite number"),
        (lambda: SGD(0.1, momentum=1.0), "momentum is 1.0"),
        (lambda: SGD(0.1, nesterov=True), "nesterov needs"),
        (lambda: AdamW(0.1, -1.0), "weight_decay is -1.0"),
        (lambda: AdamW(0.1, betas=(1.0, 0.9)), r"betas\[0\] is 1.0, expected a finite number in \[0, 1\)"),
        (lambda: AdamW(0.1, betas=(0.9, -0.1)), r"betas\[1\] is -0.1"),
        (lambda: AdamW(0.1, betas=(0.9,)), r"betas is \(0.9,\), expected two numbers"),
        (lambda: AdamW(0.1, betas=0.9), "betas is 0.9, expected two numbers"),
        (lambda: AdamW(0.1, eps=-1.0), "eps is -1.0"),
        (lambda: LARS(0.1, momentum=1.5), "momentum is 1.5"),
        (lambda: LARS(0.1, trust=0.0), r"trust is 0.0, expected a finite number in \(0, inf\)"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
