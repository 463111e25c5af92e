"""DGC between hosts: a host compresses as one rank would and shares out what it sends."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plsc.comm import Communicator, Counting, Hierarchical, run_ranks
from plsc.strategies import DGC

from .dgc_runs import ALL, MODEL, SETTINGS, alone, loss_of, sparse, train


@pytest.mark.parametrize(("world", "hosts"), [(4, 2), (6, 3), (6, 2), (2, 2), (4, [3, 1])])
def test_between_hosts_at_ratio_1_it_is_momentum_sgd(world: int, hosts: Any) -> None:
    for result in run_ranks(world, lambda comm: train(Hierarchical(comm, hosts=hosts), ALL)):
        torch.testing.assert_close(result, alone(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("world", "hosts"), [(4, 2), (6, 3), (6, 2)])
def test_a_host_compresses_as_one_rank_would(world: int, hosts: int) -> None:
    twin = run_ranks(world // hosts, lambda comm: train(comm, sparse(0.1)))
    for result in run_ranks(world, lambda comm: train(Hierarchical(comm, hosts=hosts), sparse(0.1))):
        torch.testing.assert_close(result, twin[0], rtol=1e-12, atol=1e-12)


def test_the_ranks_of_a_host_share_out_what_it_sends() -> None:
    def body(comm: Communicator) -> tuple[int, int, int]:
        counting = Counting(comm)
        model = nn.Linear(6, 31, bias=False).double()  # nothing is left dense, and the payload does not divide
        dgc = DGC(model.parameters(), Hierarchical(counting, hosts=3), options=sparse(0.1))
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        loss_of(model, 0, comm).backward()
        counting.reset()
        dgc.step(optimizer)
        return counting.bytes["all_gather"], dgc._payload(0.1), dgc.bytes_per_step

    for gathered, payload, told in run_ranks(6, body):
        share = -(-payload // 3)
        assert gathered == share + 2 * share and told == share  # between two hosts, then what came inside each


@pytest.mark.parametrize("before", [None, 2, 4])
@pytest.mark.parametrize("after", [None, 2])
def test_residuals_survive_a_change_of_hosts(before: int | None, after: int | None) -> None:
    def route(comm: Communicator, hosts: int | None) -> Communicator:
        return comm if hosts is None else Hierarchical(comm, hosts=hosts)

    def body(comm: Communicator) -> tuple[Tensor, Tensor, bool]:
        model = copy.deepcopy(MODEL)
        first = DGC(model.parameters(), route(comm, before), options=sparse(0.1))
        optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
        for step in range(3):
            loss_of(model, step, comm).backward()
            first.step(optimizer)
        second = DGC(copy.deepcopy(model).parameters(), route(comm, after), options=sparse(0.1))
        second.load_state_dict(first.state_dict())
        kept = [torch.cat([entry.state()[1] for entry in dgc._entries]) for dgc in (first, second)]
        return kept[0], kept[1], torch.equal(*kept)

    results = run_ranks(4, body)
    old, new = (torch.stack([result[index] for result in results]) for index in (0, 1))
    torch.testing.assert_close(new.mean(0), old.mean(0), rtol=1e-12, atol=1e-14)
    if before == after:
        assert all(result[2] for result in results)
    if after == 2:
        assert torch.equal(new[0], new[1]) and torch.equal(new[2], new[3])


def test_finite_gradients_of_a_host_do_not_overflow_in_their_sum() -> None:
    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        weight = nn.Parameter(torch.zeros(8, 8))
        dgc = DGC([weight], Hierarchical(comm, hosts=2), options=sparse(0.25))
        (weight * 3e38).sum().backward()
        assert dgc.step(torch.optim.SGD([weight], 1e-38))
        residual = dgc._entries[0].residual
        assert residual is not None
        return weight.detach(), residual

    for weight, residual in run_ranks(4, body):
        assert sorted(weight.flatten().tolist())[15:17] == [pytest.approx(-3.0), 0.0] and weight.min() >= -3.01
        assert residual.isfinite().all() and (residual == 0).sum() == 16
