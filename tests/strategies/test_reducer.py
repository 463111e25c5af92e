"""The Reducer: equal to one process on the whole batch, in a fixed order, and nothing lost whatever the loop does."""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plsc.comm import CommError, Communicator, LocalCommunicator, Shard, mark, run_ranks
from plsc.strategies import Reducer, broadcast_parameters
from plsc.strategies.reducer import ALIGN, plan_buckets

TINY = 1e-4  # MiB: a bucket for every parameter or two of these small models


class Tied(nn.Module):
    """A weight used twice, a strided one, and one that is not used unless asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.spare = nn.Linear(12, 2)
        self.last = nn.Linear(12, 1)

    def forward(self, x: Tensor, *, spare: bool = False) -> Tensor:  # [B, 6] -> [B]
        x = self.first(torch.tanh(self.first(x)))
        x = self.conv(x.view(-1, 1, 2, 3)).flatten(1)
        return self.last(x).squeeze(1) + (self.spare(x).sum(1) if spare else 0)


def make_model(dtype: torch.dtype = torch.float64) -> Tied:
    torch.manual_seed(0)
    return Tied().to(dtype)


MODEL = make_model()
BATCH = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, x: Tensor, **kwargs: bool) -> Tensor:
    return model(x, **kwargs).square().mean()


def part(x: Tensor, comm: Communicator) -> Tensor:
    return x.chunk(comm.world_size)[comm.rank]


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def whole_batch(x: Tensor = BATCH, **kwargs: bool) -> dict[str, Tensor]:
    """What one process gets; unused parameters count as zero."""
    model = copy.deepcopy(MODEL)
    loss_of(model, x, **kwargs).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda m: m)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_mb", [TINY, 25.0])
def test_equals_one_process_on_the_whole_batch(world_size: int, bucket_mb: float) -> None:
    def rank(comm: Communicator) -> dict[str, Tensor]:
        model = copy.deepcopy(MODEL)
        model.conv.to(memory_format=torch.channels_last)
        reducer = Reducer(model.parameters(), comm, bucket_mb=bucket_mb, first_bucket_mb=bucket_mb)
        assert (len(reducer.layout) > 3) == (bucket_mb == TINY)
        for _ in range(2):  # the second step finds the buckets as the first left them
            reducer.zero_grad()
            loss_of(model, part(BATCH, comm)).backward()
            reducer.finish()
        return grads_of(model)

    for got in run_ranks(world_size, rank):
        assert_close(got, whole_batch())


def test_gradients_are_aligned_views_that_stay() -> None:
    def rank(comm: Communicator) -> None:
        model = copy.deepcopy(MODEL)
        model.conv.to(memory_format=torch.channels_last)
        reducer = Reducer(model.parameters(), comm)
        before = {name: param.grad for name, param in model.named_parameters()}
        loss_of(model, part(BATCH, comm)).backward()
        reducer.finish()
        reducer.zero_grad()
        base = min(grad.data_ptr() for grad in before.values() if grad is not None)
        for name, param in model.named_parameters():
            assert param.grad is before[name] and not param.grad.any()
            assert (param.grad.data_ptr() - base) % ALIGN == 0
            assert param.grad.stride() == param.stride()

    run_ranks(2, rank)


def test_unused_parameters_count_as_zero() -> None:
    def rank(comm: Communicator) -> dict[str, Tensor]:
        model = copy.deepcopy(MODEL)
        reducer = Reducer(model.parameters(), comm, bucket_mb=TINY, first_bucket_mb=TINY)
        loss_of(model, part(BATCH, comm), spare=comm.rank == 1).backward()
        reducer.finish()
        return grads_of(model)

    first, second = run_ranks(2, rank)
    alone = [copy.deepcopy(MODEL) for _ in range(2)]
    for index, model in enumerate(alone):
        loss_of(model, BATCH.chunk(2)[index], spare=index == 1).backward()
    assert torch.equal(first["spare.weight"], second["spare.weight"])
    torch.testing.assert_close(first["spare.weight"], alone[1].spare.weight.grad / 2)
    torch.testing.assert_close(first["last.weight"], (alone[0].last.weight.grad + alone[1].last.weight.grad) / 2)


def test_accumulation_communicates_once_and_equals_the_big_batch() -> None:
    def rank(comm: Communicator) -> tuple[dict[str, Tensor], int]:
        model = copy.deepcopy(MODEL)
        reducer = Reducer(model.parameters(), comm, bucket_mb=TINY, first_bucket_mb=TINY)
        sent: list[int] = []
        original = comm.all_reduce
        comm.all_reduce = lambda x, op="sum": (sent.append(x.numel()), original(x, op))[1]  # type: ignore[method-assign]
        mine = part(BATCH, comm).chunk(3)
        with reducer.accumulate():
            (loss_of(model, mine[0], spare=True) / 3).backward()  # what only this micro-step uses is kept
            (loss_of(model, mine[1]) / 3).backward()
            assert not sent
            with pytest.raises(RuntimeError, match="outside accumulate"):
                reducer.finish()
        (loss_of(model, mine[2]) / 3).backward()
        reducer.finish()
        return grads_of(model), len(sent) - len(reducer.layout)

    model = copy.deepcopy(MODEL)
    for micro in range(3):
        for half in BATCH.chunk(2):
            (loss_of(model, half.chunk(3)[micro], spare=micro == 0) / 6).backward()
    for got, surplus in run_ranks(2, rank):
        assert surplus == 0
        assert_close(got, grads_of(model))


def test_gradients_set_to_none_are_copied_into_the_buckets() -> None:
    def rank(comm: Communicator) -> dict[str, Tensor]:
        model = copy.deepcopy(MODEL)
        reducer = Reducer(model.parameters(), comm, bucket_mb=TINY, first_bucket_mb=TINY)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            with reducer.accumulate():
                loss_of(model, part(BATCH, comm)).backward()
            loss_of(model, part(BATCH, comm)).backward()
            reducer.finish()
        model.first.weight.grad = torch.ones_like(model.first.weight)  # and a foreign one is not dropped
        for param in model.parameters():
            if param is not model.first.weight:
                param.grad = None
        reducer.finish()
        assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight))
        assert not model.last.weight.grad.any()
        optimizer.zero_grad()
        loss_of(model, part(BATCH, comm)).backward()
        reducer.finish()
        return grads_of(model)

    for got in run_ranks(2, rank):
        assert_close(got, whole_batch())


def test_bits_do_not_depend_on_timing_and_repeat() -> None:
    model32 = make_model(torch.float32)

    def rank(comm: Communicator, sleeper: int) -> dict[str, Tensor]:
        model = copy.deepcopy(model32)
        reducer = Reducer(model.parameters(), comm, bucket_mb=TINY, first_bucket_mb=TINY)
        for param in model.parameters():
            param.register_hook(lambda grad: time.sleep(0.003 if comm.rank == sleeper else 0))
        loss_of(model, part(BATCH.float(), comm)).backward()
        reducer.finish()
        return grads_of(model)

    runs = [run_ranks(3, rank, sleeper) for sleeper in (-1, 0, 2)]
    for run in runs:
        for got in run:
            assert all(torch.equal(got[name], runs[0][0][name]) for name in got)


def test_buckets_leave_in_layout_order_during_backward() -> None:
    """A bucket that is ready early waits: gradients of the first layers come last although they are sent last."""

    def rank(comm: Communicator) -> list[int]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 2))
        order = [*model[2].parameters(), *model[0].parameters(), *model[1].parameters()]  # not the order of use
        reducer = Reducer(order, comm, bucket_mb=TINY / 10, first_bucket_mb=TINY / 10)
        sent: list[int] = []
        original = comm.all_reduce
        comm.all_reduce = lambda x, op="sum": (sent.append(x.data_ptr()), original(x, op))[1]  # type: ignore[method-assign]
        model(torch.ones(2, 4)).sum().backward()
        during = len(sent)
        reducer.finish()
        assert during == len(sent)
        return [[bucket.flat.data_ptr() for bucket in reducer._buckets].index(address) for address in sent]

    for sent in run_ranks(2, rank):
        assert sent == list(range(6))


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_bf16_error(scale: float) -> None:
    model32 = make_model(torch.float32)

    def rank(comm: Communicator, dtype: str) -> dict[str, Tensor]:
        model = copy.deepcopy(model32)
        reducer = Reducer(model.parameters(), comm, reduce_dtype=dtype)
        (loss_of(model, part(BATCH.float(), comm)) * scale).backward()
        reducer.finish()
        assert reducer.bytes_per_step == (2 if dtype == "bf16" else 4) * reducer._buckets[0].flat.numel()
        return grads_of(model)

    exact, rounded = run_ranks(4, rank, "fp32"), run_ranks(4, rank, "bf16")
    for name, truth in exact[0].items():
        error = (rounded[0][name] - truth).norm() / truth.norm().clamp(min=1e-30)
        assert error < 2**-8
        assert torch.equal(rounded[0][name], rounded[3][name])
    assert not torch.equal(exact[0]["last.weight"], rounded[0]["last.weight"])


def test_bf16_is_rounded_once_after_the_division_which_keeps_the_sum_in_range() -> None:
    def rank(comm: Communicator) -> Tensor:
        param = nn.Parameter(torch.zeros(4))
        reducer = Reducer([param], comm, reduce_dtype="bf16")
        sent: list[Tensor] = []
        original = comm.all_reduce
        comm.all_reduce = lambda x, op="sum": (sent.append(x.clone()), original(x, op))[1]  # type: ignore[method-assign]
        values = torch.tensor([3e38, 1.2345678, -0.0271828, 1e-30])  # three of the first overflow
        (param * values).sum().backward()
        reducer.finish()
        assert torch.equal(sent[0][:4], (values / 3).bfloat16())
        assert param.grad is not None
        torch.testing.assert_close(param.grad, values, rtol=2**-7, atol=0)
        return param.grad

    run_ranks(3, rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_travel_in_float32(dtype: torch.dtype) -> None:
    def rank(comm: Communicator) -> Tensor:
        param = nn.Parameter(torch.zeros(2, dtype=dtype))
        reducer = Reducer([param, nn.Parameter(torch.zeros(3))], comm)
        (param * 6e4).sum().backward()  # the sum over ranks overflows float16
        reducer.finish()
        assert param.grad is not None
        return param.grad

    torch.testing.assert_close(run_ranks(4, rank)[0], torch.full((2,), 6e4).to(dtype))


def test_cut_and_frozen_parameters_are_left_alone() -> None:
    def rank(comm: Communicator) -> None:
        cut = mark(nn.Parameter(torch.ones(2, 3)), Shard.of(4, comm))
        frozen, whole = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
        reducer = Reducer([cut, frozen, whole, whole], comm)
        ((cut.sum(0) + frozen + whole) * (comm.rank + 1)).sum().backward()
        reducer.finish()
        assert cut.grad is not None and (cut.grad == comm.rank + 1).all()
        assert frozen.grad is None and whole.grad is not None and (whole.grad == 1.5).all()

    run_ranks(2, rank)


def test_a_second_backward_without_finish_is_an_error_not_a_wrong_sum() -> None:
    def rank(comm: Communicator) -> None:
        model = copy.deepcopy(MODEL)
        reducer = Reducer(model.parameters(), comm, bucket_mb=TINY, first_bucket_mb=TINY)
        loss_of(model, part(BATCH, comm), spare=True).backward()
        with pytest.raises(RuntimeError, match="call finish"):
            loss_of(model, part(BATCH, comm), spare=True).backward()
        reducer.zero_grad()  # clears up
        loss_of(model, part(BATCH, comm)).backward()
        reducer.finish()
        assert_close(grads_of(model), whole_batch())

    run_ranks(2, rank)


class _NoGradient(torch.autograd.Function):
    """A function that says None where a parameter's gradient would be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_are_none_empty_or_differentiable() -> None:
    def rank(comm: Communicator) -> None:
        used, unused, empty = (nn.Parameter(torch.ones(shape)) for shape in (2, 2, (0, 3)))
        reducer = Reducer([used, unused, empty], comm)
        (_NoGradient.apply(used, unused) * (comm.rank + 1)).sum().backward()
        reducer.finish()
        assert used.grad is not None and (used.grad == 1.5).all()
        assert unused.grad is not None and not unused.grad.any() and empty.grad is not None
        reducer.zero_grad()
        (used**2 * (comm.rank + 1)).sum().backward(create_graph=True)
        reducer.finish()
        assert (used.grad == 3).all() and not used.grad.requires_grad

    run_ranks(2, rank)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    for seen_before in (True, False):
        reducer = Reducer(table.parameters(), LocalCommunicator("cpu"))
        if not seen_before:
            table.weight.grad = None
        with pytest.raises(ValueError, match="sparse=False"):
            table(torch.tensor([1])).sum().backward()
        reducer.remove()


def test_a_parameter_moved_afterwards_is_refused() -> None:
    for dtype in (torch.float64, torch.float16):
        model = nn.Linear(2, 2)
        reducer = Reducer(model.parameters(), LocalCommunicator("cpu"))
        model.to(dtype)
        with pytest.raises(RuntimeError, match="build the Reducer last"):
            model(torch.ones(1, 2, dtype=dtype)).sum().backward()
            reducer.finish()


def test_remove_takes_the_hooks_off() -> None:
    def rank(comm: Communicator) -> None:
        param = nn.Parameter(torch.ones(2))
        reducer = Reducer([param], comm)
        reducer.remove()
        (param * comm.rank).sum().backward()
        assert param.grad is not None and (param.grad == comm.rank).all()

    run_ranks(2, rank)


def test_a_parameter_of_two_reducers_is_refused() -> None:
    """The second would divide again what the first has divided: half the gradient on two ranks."""

    def rank(comm: Communicator) -> None:
        param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        first = Reducer([param], comm)
        with pytest.raises(ValueError, match=r"shape \[2\] that another Reducer averages already"):
            Reducer([other, param], comm)
        first.remove()
        second = Reducer([other, param], comm)
        (param.sum() * (comm.rank + 1)).backward()
        second.finish()
        assert param.grad is not None and param.grad.tolist() == [1.5, 1.5]
        del first, second  # as a cell of a notebook that is run again
        third = Reducer([param], comm)
        third.zero_grad()
        (param.sum() * (comm.rank + 1)).backward()
        third.finish()
        assert param.grad.tolist() == [1.5, 1.5]

    run_ranks(2, rank)


def test_ranks_that_differ_are_named() -> None:
    def rank(comm: Communicator) -> None:
        Reducer([nn.Parameter(torch.ones(2 + comm.rank // 2))], comm)

    with pytest.raises(ValueError, match=r"at place 0 rank 0 has \(2,\) torch.float32, rank 2 has \(3,\)"):
        run_ranks(3, rank)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda comm: Reducer([], comm, reduce_dtype="int8"), "expected one of fp32, bf16, fp16"),
        (lambda comm: Reducer([], comm, lanes=0), "lanes: got 0, expected at least 1"),
        (lambda comm: Reducer([], comm, bucket_mb=-1.0), "bucket_mb=-1.0, .*expected >= 0"),
        (lambda comm: Reducer(nn.Linear(1, 1).named_parameters(), comm), "pass module.parameters"),
        (lambda comm: Reducer([nn.Parameter(torch.ones(1, dtype=torch.cfloat))], comm), "floating-point"),
    ],
)
def test_wrong_arguments(build: Callable[[Communicator], Reducer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(LocalCommunicator("cpu"))


def test_layout_is_reverse_order_by_dtype() -> None:
    sizes = [10, 20, 300_000, 40, 50]
    params = [nn.Parameter(torch.zeros(n, dtype=torch.float64 if n == 40 else torch.float32)) for n in sizes]
    assert plan_buckets(params, bucket_mb=25.0, first_bucket_mb=1.0) == [[3], [4, 2], [1, 0]]
    assert plan_buckets(params, bucket_mb=25.0, first_bucket_mb=25.0) == [[3], [4, 2, 1, 0]]
    assert plan_buckets(params, bucket_mb=1e-6, first_bucket_mb=1e-6) == [[4], [3], [2], [1], [0]]


def test_state_is_the_layout_and_refuses_another() -> None:
    model, comm = nn.Linear(3, 3), LocalCommunicator("cpu")
    state = Reducer(model.parameters(), comm).state_dict()
    Reducer(model.parameters(), comm).load_state_dict(state)
    with pytest.raises(ValueError, match="first_bucket_mb"):
        Reducer(model.parameters(), comm, first_bucket_mb=2.0).load_state_dict(state)


def test_broadcast_gives_rank_0_to_all_but_cut_parameters() -> None:
    def rank(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
        for x in [*model.parameters(), *model.buffers()]:
            x.detach().fill_(comm.rank + 1)
        model.register_parameter("cut", mark(nn.Parameter(torch.full((2,), float(comm.rank))), Shard.of(6, comm)))
        broadcast_parameters(model, comm)
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            assert (x == (comm.rank if name == "cut" else 1)).all()

    run_ranks(3, rank)


def test_broadcast_names_what_differs() -> None:
    with pytest.raises((ValueError, CommError), match="rank 0 has weight"):
        run_ranks(2, lambda comm: broadcast_parameters(nn.Linear(2, 2 + comm.rank), comm))


def _process(rank: int, folder: str) -> None:
    """One of two real processes: ours and torch's DistributedDataParallel on the same model and data."""
    import os

    from plsc.comm import connect

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = Path(folder, "port").read_text()
    comm = connect("gloo", timeout=60.0)
    ours, theirs = make_model(torch.float32), make_model(torch.float32)
    reducer = Reducer(ours.parameters(), comm, bucket_mb=TINY, first_bucket_mb=TINY)
    ddp = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    mine = part(BATCH.float(), comm)
    for _ in range(3):
        for model in (ours, ddp):
            model.zero_grad()
            loss_of(model, mine).backward()
        reducer.finish()
    torch.save([grads_of(ours), grads_of(theirs)], Path(folder, f"{rank}.pt"))
    comm.close()


@pytest.mark.slow
def test_equals_torch_ddp(tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    torch.multiprocessing.spawn(_process, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        ours, theirs = torch.load(tmp_path / f"{rank}.pt")
        for name, grad in theirs.items():
            torch.testing.assert_close(ours[name], grad, rtol=1e-6, atol=1e-7)
        assert not ours["spare.weight"].any()
