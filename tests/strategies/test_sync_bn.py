"""SyncBatchNorm on ranks equals BatchNorm in one process on the union of their batches."""

import copy
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from plsc.comm import Communicator, LocalCommunicator, run_ranks
from plsc.strategies import Reducer, SyncBatchNorm, convert_sync_bn

KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def net_of(dims: int, momentum: float | None = 0.1, affine: bool = True, track: bool = True) -> nn.Module:
    torch.manual_seed(0)
    norm = KINDS[dims](3, momentum=momentum, affine=affine, track_running_stats=track)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return nn.Sequential(norm, nn.Tanh()).double()


def batch_of(rows: int, dims: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (rows, 3, *([2] * dims if dims > 1 else []))
    x, target = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return x * 3 + 50, target


def per_sample(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().flatten(1).sum(1)  # [B]


def check(world_size: int, sizes: Sequence[int], net: nn.Module, dims: int, steps: int = 2) -> None:
    """A rank's loss is the mean over its own samples; the objective is the mean over ranks."""
    x, target = batch_of(sum(sizes), dims)

    def rank(comm: Communicator) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        start = sum(sizes[: comm.rank])
        mine, aim = (t[start : start + sizes[comm.rank]].clone() for t in (x, target))
        mine.requires_grad_()
        model = convert_sync_bn(copy.deepcopy(net), comm)
        reducer = Reducer(model.parameters(), comm)
        for _ in range(steps):
            reducer.zero_grad()
            mine.grad = None
            out = model(mine)
            (per_sample(out, aim).sum() / max(1, len(mine))).backward()
            reducer.finish()
        assert mine.grad is not None
        return out.detach(), mine.grad, [p.grad for p in model.parameters()], list(model.buffers())  # type: ignore[misc]

    results = run_ranks(world_size, rank)
    union, one = x.clone().requires_grad_(), copy.deepcopy(net)
    weight = torch.cat([torch.full((n,), 1 / max(1, n) / world_size, dtype=torch.float64) for n in sizes])
    for _ in range(steps):
        one.zero_grad()
        union.grad = None
        out = one(union)
        (per_sample(out, target) * weight).sum().backward()
    assert union.grad is not None
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close(torch.cat([result[0] for result in results]), out.detach())
    close(torch.cat([result[1] for result in results]) / world_size, union.grad)  # theirs belong to the sum of losses
    for _, _, grads, buffers in results:
        for got, param in zip(grads, one.parameters(), strict=True):
            close(got, param.grad)
        for mine, theirs in zip(buffers, one.buffers(), strict=True):
            close(mine, theirs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_equals_one_process(world_size: int, dims: int) -> None:
    check(world_size, [3] * world_size, net_of(dims), dims)


@pytest.mark.parametrize("sizes", [[4, 1, 2], [1, 1], [5, 0, 2], [0, 2]])
def test_uneven_batches(sizes: list[int]) -> None:
    check(len(sizes), sizes, net_of(1), 1)


def test_options() -> None:
    check(2, [2, 2], net_of(2, momentum=None), 2, steps=3)
    check(2, [2, 2], net_of(2, affine=False), 2)
    check(2, [2, 2], net_of(2, track=False), 2)


def test_convert_keeps_parameters_keys_and_mode() -> None:
    comm = LocalCommunicator("cpu")
    shared = nn.BatchNorm2d(2)
    net = nn.Sequential(nn.Conv2d(1, 2, 1), shared, nn.ModuleDict({"again": shared}), nn.BatchNorm1d(4).eval())
    net[0].weight.requires_grad_(False)
    params, buffers, keys = list(net.parameters()), list(net.buffers()), list(net.state_dict())
    again = convert_sync_bn(net, comm)
    assert again is net and isinstance(net[1], SyncBatchNorm) and net[2]["again"] is net[1]
    assert not net[3].training and net[1].training and net[3].num_features == 4
    assert all(a is b for a, b in zip(net.parameters(), params, strict=True))
    assert all(a is b for a, b in zip(net.buffers(), buffers, strict=True))
    assert list(net.state_dict()) == keys
    assert isinstance(convert_sync_bn(nn.BatchNorm1d(2, eps=0.5), comm), SyncBatchNorm)
    assert isinstance(convert_sync_bn(nn.SyncBatchNorm(2), comm), SyncBatchNorm)
    assert copy.deepcopy(net)[1].comm is comm
    other = LocalCommunicator("cpu")
    assert convert_sync_bn(net, other)[1].comm is other

    class Special(nn.BatchNorm1d):
        pass

    with pytest.raises(ValueError, match="got a Special"):
        convert_sync_bn(nn.Sequential(Special(2)), comm)


def test_evaluation_and_a_world_of_one_are_plain_batch_norm() -> None:
    comm = LocalCommunicator("cpu")
    x = torch.randn(4, 3, 2, 2)
    plain = nn.BatchNorm2d(3)
    ours = convert_sync_bn(copy.deepcopy(plain), comm)
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.eval()(x), plain.eval()(x))

    def rank(comm: Communicator) -> Tensor:  # evaluation communicates nothing: one rank may do it alone
        model = convert_sync_bn(copy.deepcopy(plain), comm).eval()
        return model(x) if comm.rank == 0 else x

    assert torch.equal(run_ranks(2, rank)[0], plain(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_is_computed_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(8, 3, 4, generator=generator) + 100).to(dtype)
    exact = nn.BatchNorm1d(3)(x.double().float())

    def rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        mine = x.chunk(2)[comm.rank].clone().requires_grad_()
        out = SyncBatchNorm(3, comm)(mine)
        out.sum().backward()
        assert mine.grad is not None
        return out.detach(), mine.grad

    results = run_ranks(2, rank)
    assert all(out.dtype == dtype and grad.dtype == dtype for out, grad in results)
    torch.testing.assert_close(torch.cat([out for out, _ in results]), exact.to(dtype).detach(), rtol=0.01, atol=0.01)


def test_errors() -> None:
    def one_value(comm: Communicator) -> None:
        SyncBatchNorm(2, comm)(torch.ones(1 if comm.rank == 0 else 0, 2))

    with pytest.raises(ValueError, match="1 values a channel on all ranks"):
        run_ranks(2, one_value)
    norm = SyncBatchNorm(2, LocalCommunicator("cpu"))
    for shape in ((2,), (2, 3)):
        with pytest.raises(ValueError, match=r"expected \[B, 2, \.\.\.\]"):
            norm(torch.ones(shape))
