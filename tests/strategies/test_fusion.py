"""Bucket sizes from measured costs: the formula, that ranks agree, that a checkpoint's size is taken over."""

from typing import Any

import pytest
import torch

from plsc.comm import Communicator, run_ranks
from plsc.strategies import DGC, DGCOptions, LocalSGD, LocalSGDOptions, Reducer, fusion
from plsc.strategies.fusion import Costs, measure, measured_buckets


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))  # 16 KiB a weight


def costs(start: float, byte: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "measure", lambda comm: Costs(start, byte))


@pytest.mark.parametrize(
    ("start", "byte", "total", "bucket", "first"),
    [
        (0.0, 1e-9, 400.0, 32.0, 1.0),  # nothing to start: buckets of 25 MiB, rounded up to a power of two
        (0.0, 1e-9, 8.0, 2.0, 1.0),  # of a small model a quarter, so that sending begins early
        (1e-3, 1e-9, 8.0, 4.0, 4.0),  # 7/3 ms worth of bytes: 2.2 MiB
        (1.0, 1e-9, 8.0, 256.0, 256.0),  # no more than that
        (0.0, 1e-9, 0.0, 2.0**-6, 2.0**-6),
    ],
)
def test_the_formula(start: float, byte: float, total: float, bucket: float, first: float) -> None:
    assert Costs(start, byte).bucket_mb(total) == (bucket, first)


def test_a_sum_of_twice_the_size_takes_seven_tenths_more() -> None:
    made = Costs(2e-3, 3e-9)
    size = 2e-3 * fusion.GAIN / 3e-9
    assert (made.start + 2 * size * made.byte) / (made.start + size * made.byte) == pytest.approx(1.7)


def test_ranks_agree() -> None:
    found = run_ranks(3, lambda comm: (measure(comm), measured_buckets([torch.ones(2**20)], comm)))
    assert found[0] == found[1] == found[2] and found[0][0].byte > 0
    alone = run_ranks(1, lambda comm: measured_buckets([torch.ones(2**20)], comm))
    assert alone == [(1.0, 1.0)]


def gradients(reducer: Reducer, net: torch.nn.Module, rank: int) -> torch.Tensor:
    for _ in range(2):  # the hooks must be there once
        net(torch.full((2, 64), float(rank + 1))).sum().backward()
        reducer.finish()
        found = torch.cat([param.grad.flatten() for param in net.parameters() if param.grad is not None])
        reducer.zero_grad()
    return found


def test_a_loaded_state_brings_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> tuple[Any, ...]:
        before = Reducer(model().parameters(), comm, bucket_mb=0.02, first_bucket_mb=0.01)
        costs(1e-3, 1e-7, monkeypatch)
        net = model()
        measured = Reducer(net.parameters(), comm, bucket_mb=0)
        own = measured.bucket_mb, len(measured.layout)
        expected = gradients(measured, net, comm.rank)
        measured.load_state_dict(before.state_dict())
        assert measured.state_dict() == before.state_dict() and len(measured._handles) == 2 * 16
        torch.testing.assert_close(gradients(measured, net, comm.rank), expected)
        fixed = Reducer(model().parameters(), comm, bucket_mb=1.0)
        with pytest.raises(ValueError, match=r"got bucket_mb 0.02 in the checkpoint, expected 1.0"):
            fixed.load_state_dict(before.state_dict())
        return (*own, len(measured.layout))

    assert run_ranks(2, body) == [(0.0625, 2, 5)] * 2


def test_dgc_and_local_sgd_measure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    costs(1e-3, 1e-7, monkeypatch)

    def body(comm: Communicator) -> None:
        options = DGCOptions(min_numel=1)
        dgc = DGC(model().parameters(), comm, options=options, bucket_mb=0)
        assert dgc.wide.bucket_mb == 0.0625 and dgc.wide.measured
        other = DGC(model().parameters(), comm, options=options, bucket_mb=0.5)
        dgc.load_state_dict(other.state_dict())
        assert dgc.wide.bucket_mb == 0.5

        outer = LocalSGDOptions(every=1, outer_momentum=0.9)
        nets = [model() for _ in range(3)]
        first = LocalSGD(nets[0], comm, options=outer, bucket_mb=0.02)
        optimizer = torch.optim.SGD(nets[0].parameters(), 0.1)
        first.begin_step()
        nets[0](torch.ones(2, 64)).sum().backward()
        optimizer.step()
        first.end_step(optimizer)
        local = LocalSGD(nets[1], comm, options=outer, bucket_mb=0)
        assert local.bucket_mb == 0.0625
        local.load_state_dict(first.state_dict())
        assert local.bucket_mb == 0.02
        for mine, theirs in zip(local._buckets, first._buckets, strict=True):
            assert torch.equal(mine.velocity, theirs.velocity)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"got bucket_mb 0.02 in the checkpoint, expected 1.0"):
            LocalSGD(nets[2], comm, options=outer, bucket_mb=1.0).load_state_dict(first.state_dict())

    run_ranks(2, body)
