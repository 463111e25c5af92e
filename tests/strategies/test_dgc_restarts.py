"""DGC through restarts: what was kept survives on any number of ranks, bit for bit on the same."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from plsc.comm import Communicator, run_ranks
from plsc.strategies import DGC, DGCOptions
from plsc.train.checkpoint import load, save

from .dgc_runs import MODEL, SETTINGS, drift, loss_of, same_bits, sparse, weights


def saved_at(world: int, path: Path, steps: int = 5) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Trains and saves on `world` ranks; each rank's weight, u and v."""

    def body(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        weight, dgc = drift(comm, sparse(), steps)
        save(path, comm=comm, step=steps, dgc=dgc)
        entry = dgc._entries[0]
        assert entry.velocity is not None and entry.residual is not None
        return weight, entry.velocity.clone(), entry.residual.clone()

    return run_ranks(world, body)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_residuals_survive_a_restart_on_any_number_of_ranks(world: int, tmp_path: Path) -> None:
    before = saved_at(4, tmp_path / "saved")

    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        dgc = DGC([nn.Parameter(torch.zeros(20, 10, dtype=torch.float64))], comm, options=sparse())
        load(tmp_path / "saved", comm=comm, dgc=dgc)
        entry = dgc._entries[0]
        assert dgc.steps == 5 and entry.velocity is not None and entry.residual is not None
        return entry.velocity, entry.residual

    after = run_ranks(world, body)
    for which in (0, 1):  # the mean over ranks is what will reach the weight
        old = torch.stack([rank[1 + which] for rank in before]).mean(0)
        new = torch.stack([rank[which] for rank in after]).mean(0)
        assert old.abs().max() > 0.1
        torch.testing.assert_close(new, old, rtol=1e-14, atol=1e-15)
    if world == 4:
        assert all(torch.equal(old[1 + i], new[i]) for old, new in zip(before, after, strict=True) for i in (0, 1))


def test_resume_continues_bit_for_bit(tmp_path: Path) -> None:
    def body(comm: Communicator, stop: int) -> Tensor:
        model = copy.deepcopy(MODEL)
        dgc = DGC(model.parameters(), comm, options=sparse(0.05, warmup_steps=4))
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        parts = {"model": model, "optimizer": optimizer, "dgc": dgc}
        path = tmp_path / "saved"
        if stop == 0:
            load(path, comm=comm, **parts)
        for step in range(dgc.steps, stop or 8):
            loss_of(model, step, comm).backward()
            dgc.step(optimizer)
        if stop == 3:
            save(path, comm=comm, **parts)
        return weights(model)

    straight = same_bits(run_ranks(3, body, 8))
    run_ranks(3, body, 3)
    assert torch.equal(same_bits(run_ranks(3, body, 0)), straight)


def test_what_was_kept_is_sent_when_sparse_steps_end(tmp_path: Path) -> None:
    """Saved by 4 ranks, loaded where sparse does not pay: one step later no residual is left, and the sum is whole."""
    before = saved_at(4, tmp_path / "saved")
    expected = before[0][0] - torch.stack([rank[2] for rank in before]).mean(0).view(20, 10)
    velocity = torch.stack([rank[1] for rank in before]).mean(0).view(20, 10)

    def body(comm: Communicator) -> Tensor:
        weight = nn.Parameter(before[0][0].clone())
        dgc = DGC([weight], comm, options=DGCOptions(density=1.0, min_numel=1))
        load(tmp_path / "saved", comm=comm, dgc=dgc)
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
        (weight * 2.0).sum().backward()
        dgc.step(optimizer)
        assert not dgc._entries[0].residual.any()  # type: ignore[union-attr]
        return weight.detach()

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, expected - (0.9 * velocity + 2.0), rtol=1e-13, atol=1e-13)


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved_at(2, tmp_path / "saved")

    def body(comm: Communicator) -> None:
        dgc = DGC([nn.Parameter(torch.zeros(10, 20, dtype=torch.float64))], comm, options=sparse())
        load(tmp_path / "saved", comm=comm, dgc=dgc)

    with pytest.raises(Exception, match=r"compressed other tensors .*\[20, 10\]"):
        run_ranks(2, body)
