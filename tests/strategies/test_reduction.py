"""Reductions: the mean over ranks in every precision, alone, inside one another, in a Reducer and in torch's DDP."""

import copy
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from plsc.comm import CommError, Communicator, Hierarchical, LocalCommunicator, Work, run_ranks
from plsc.ops.kernels import cast_scaled
from plsc.strategies import Accumulated, Bf16, Fp16, Full, Plain, Reducer, Reduction, make_reduction
from plsc.strategies.reduction import Lanes, as_ddp_hook

WORLD = 4
ALL = [Plain(), Accumulated(), Full(), Bf16(), Bf16(Accumulated()), Fp16(), Fp16(Accumulated())]
SCALES = [10.0**decade for decade in range(-6, 7)]


def gradients(rank: int, size: int = 4001, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of several magnitudes, as layers have; the ranks' means do not cancel."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(size, generator=generator) + 0.5).mul_(torch.rand(size, generator=generator)).to(dtype)


def mean_of(reduction: Reduction, comm: Communicator, mine: Tensor) -> Tensor:
    flat = mine.clone()
    assert reduction.start(flat, comm, divisor=comm.world_size).wait() is flat
    return flat


def truth(size: int = 4001, world: int = WORLD) -> Tensor:
    return torch.stack([gradients(rank, size).double() for rank in range(world)]).mean(0)


@pytest.mark.parametrize("reduction", ALL, ids=lambda r: r.name)
def test_mean_of_whole_numbers_is_exact_and_the_same_on_all_ranks(reduction: Reduction) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        means = []
        for size in (0, 1, 3, 130):
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
                mine = torch.arange(size).remainder(5).mul(4).add(comm.rank * 8).to(dtype)
                means.append(mean_of(reduction, comm, mine))
                assert means[-1].dtype == dtype
                expected = torch.arange(size).remainder(5).mul(4).add((comm.world_size - 1) * 4)
                assert torch.equal(means[-1].double(), expected.double())
        return means

    results = run_ranks(WORLD, body)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("around", [Plain(), Accumulated()], ids=lambda r: r.name)
@pytest.mark.parametrize("kind", [Fp16, Bf16])
def test_error_over_twelve_decades(kind: type[Fp16] | type[Bf16], around: Reduction) -> None:
    def body(comm: Communicator) -> list[float]:
        errors = []
        for scale in SCALES:
            got = mean_of(kind(around), comm, gradients(comm.rank) * scale).double() / scale
            errors.append(float((got - truth()).norm() / truth().norm()))
        return errors

    limit = 5e-4 if kind is Fp16 else 2**-8
    assert max(max(errors) for errors in run_ranks(WORLD, body)) < limit


def test_fp16_stays_in_range_where_a_cast_would_not() -> None:
    """The largest floats and the smallest: the sum of four of them is out of float16, and of float32."""

    def body(comm: Communicator) -> None:
        for size, magnitude in ((5, 3e38), (5, 6e4), (5, 1e-37), (1, 1e-30)):
            for reduction in (Fp16(), Fp16(Accumulated())):
                mine = torch.full((size,), magnitude) * (1 + torch.arange(size) / 8)
                mine = torch.where(mine.isinf(), magnitude, mine)
                torch.testing.assert_close(mean_of(reduction, comm, mine), mine, rtol=1e-3, atol=0)
        assert not mean_of(Fp16(), comm, torch.zeros(3)).any()
        one_only = torch.full((3,), 1e30 if comm.rank == 2 else 0.0)
        torch.testing.assert_close(mean_of(Fp16(), comm, one_only), torch.full((3,), 0.25e30), rtol=1e-3, atol=0)
        double = mean_of(Fp16(), comm, torch.full((3,), 1e200, dtype=torch.float64))
        torch.testing.assert_close(double, torch.full((3,), 1e200, dtype=torch.float64), rtol=1e-3, atol=0)

    run_ranks(WORLD, body)


@pytest.mark.parametrize("reduction", ALL, ids=lambda r: r.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_on_one_rank_reaches_all(reduction: Reduction, bad: float) -> None:
    def body(comm: Communicator) -> Tensor:
        mine = torch.ones(9)
        if comm.rank == 1:
            mine[4] = bad
        return mean_of(reduction, comm, mine)

    results = run_ranks(3, body)
    for got in results:
        assert not got[4].isfinite() and (got.isfinite().sum() == 8)
        assert torch.equal(got.nan_to_num(nan=7.0), results[0].nan_to_num(nan=7.0))


def powers(largest: Tensor) -> tuple[Tensor, Tensor]:
    """What 1 becomes on its way to float16 and back."""
    one = torch.ones((), dtype=largest.dtype)
    up, down = (cast_scaled(one, largest.dtype, largest=largest, down=down) for down in (False, True))
    return up, down


def test_the_scale_is_an_exactpowers() -> None:
    for dtype, numbers in ((torch.float32, (1e-33, 0.3, 1.0, 65504.0, 3.4e38)), (torch.float64, (1e-300, 1.0, 1e300))):
        for number in numbers:
            up, down = powers(torch.tensor(number, dtype=dtype))
            assert up.dtype == dtype and float(up * down) == 1.0 and torch.frexp(up).mantissa == 0.5
            assert 2**14 <= number * float(up) <= 2**15
    for number in (float("inf"), float("nan")):
        assert [float(x) for x in powers(torch.tensor(number))] == [1.0, 1.0]
    assert all(0 < float(x) < float("inf") for x in powers(torch.tensor(1e-45)))


def test_native_sums_of_halves_may_round_often_and_accumulated_ones_do_not() -> None:
    class Hopping(LocalCommunicator):
        """Adds up as gloo does: in half at every hop."""

        def __init__(self) -> None:
            super().__init__("cpu")
            self.world_size = 16

        def _all_reduce(self, x: Tensor, op: str) -> Work[Tensor]:
            if op == "sum":
                for rank in range(1, 16):
                    x.add_(gradients(rank).div(16).to(x.dtype))
            return Work.done(x)

    native = Bf16().start(gradients(0), Hopping(), divisor=16).wait()
    exact = run_ranks(16, lambda comm: mean_of(Bf16(Accumulated()), comm, gradients(comm.rank)))[0]
    expected = truth(world=16)
    errors = [float((got.double() - expected).norm() / expected.norm()) for got in (native, exact)]
    assert errors[1] < 0.5 * errors[0] and errors[1] < 2**-8


def test_names_and_wrong_words() -> None:
    names = {
        (dtype, where): make_reduction(dtype, accumulate=where).name
        for dtype in ("fp32", "bf16", "fp16")
        for where in ("native", "fp32")
    }
    assert names["fp32", "native"] == names["fp32", "fp32"] == "fp32"
    assert (names["bf16", "native"], names["fp16", "fp32"]) == ("bf16", "fp16 Accumulated")
    with pytest.raises(ValueError, match="reduce_dtype: got 'int8', expected one of fp32, bf16, fp16"):
        make_reduction("int8")
    with pytest.raises(ValueError, match="reduce_accumulate: got 'bf16', expected one of native, fp32"):
        make_reduction("fp16", accumulate="bf16")
    nccl = LocalCommunicator("cpu")
    nccl.name = "nccl"
    with pytest.raises(ValueError, match="at most 2 on NCCL"):
        Lanes(Full(), nccl, lanes=3)


# ---- in a Reducer

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))
BATCH = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))


def train(comm: Communicator, reduction: Reduction | str, lanes: int = 1, turns: int = 3) -> Tensor:
    """A few steps over several buckets; the weights in the end."""
    model = copy.deepcopy(MODEL)
    reducer = Reducer(
        model.parameters(), comm, bucket_mb=1e-4, first_bucket_mb=1e-4, reduce_dtype=reduction, lanes=lanes
    )
    assert len(reducer.layout) >= 3
    for turn in range(turns):
        if comm.rank == turn % comm.world_size:
            time.sleep(0.002)
        reducer.zero_grad()
        model(BATCH.chunk(comm.world_size)[comm.rank]).square().mean().backward()
        reducer.finish()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(0.1 * param.grad)
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("reduction", ["fp32", "bf16", "fp16", "fp16 Accumulated"])
def test_in_a_reducer_with_lanes(reduction: str, lanes: int) -> None:
    made = Fp16(Accumulated()) if " " in reduction else make_reduction(reduction)
    single = run_ranks(1, train, made)[0]
    results = run_ranks(3, train, made, lanes)
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert torch.equal(results[0], run_ranks(3, train, made)[0])  # lanes change no bit
    tolerance = {"fp32": 1e-6, "bf16": 5e-3}.get(reduction, 5e-4)
    torch.testing.assert_close(results[0], single, rtol=tolerance, atol=tolerance)


def test_in_a_reducer_over_a_topology() -> None:
    def body(comm: Communicator) -> Tensor:
        return train(Hierarchical(comm, hosts=2), Fp16(), 2)

    results = run_ranks(4, body)
    assert all(torch.equal(results[0], other) for other in results[1:])
    torch.testing.assert_close(results[0], run_ranks(1, train, "fp32")[0], rtol=1e-3, atol=1e-3)


class Noting(Reduction):
    """Goes around another one and notes what it sees: a reduction of one's own."""

    def __init__(self, around: Reduction) -> None:
        self.around, self.seen = around, []  # type: ignore[var-annotated]

    def start(self, flat: Tensor, comm: Communicator, *, divisor: int = 1) -> Work[Tensor]:
        self.seen.append((len(flat), divisor))
        return self.around.start(flat, comm, divisor=divisor)


def test_one_of_your_own_and_what_the_checkpoint_says_of_it() -> None:
    def body(comm: Communicator) -> None:
        noting = Noting(Full())
        param = nn.Parameter(torch.ones(3))
        reducer = Reducer([param], comm, reduce_dtype=noting)
        (param * (comm.rank + 1)).sum().backward()
        reducer.finish()
        assert param.grad is not None and (param.grad == 1.5).all() and noting.seen == [(16, 2)]
        saved = reducer.state_dict()
        assert saved["reduce_dtype"] == "Noting"
        reducer.remove()
        with pytest.raises(ValueError, match="got reduce_dtype 'Noting' in the checkpoint, expected 'fp16'"):
            Reducer([param], comm, reduce_dtype="fp16").load_state_dict(saved)

    run_ranks(2, body)


def test_a_failure_in_the_background_comes_out_of_finish() -> None:
    class Failing(Plain):
        staged = True

        def start(self, flat: Tensor, comm: Communicator, *, divisor: int = 1) -> Work[Tensor]:
            if comm.rank == 1:
                raise ValueError("the disk is on fire")
            return super().start(flat, comm, divisor=divisor)

    def body(comm: Communicator) -> None:
        param = nn.Parameter(torch.ones(3))
        reducer = Reducer([param], comm, reduce_dtype=Failing())
        param.sum().backward()
        with pytest.raises((ValueError, CommError), match="on fire"):
            reducer.finish()
        if comm.rank == 1:
            raise ValueError("the disk is on fire")

    with pytest.raises(ValueError, match="on fire"):
        run_ranks(2, body)


# ---- in torch's DDP, between real processes


def _process(rank: int, folder: str) -> None:
    """One of two real processes: DDP with our reductions against DDP without."""
    import os

    from plsc.comm import connect

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = Path(folder, "port").read_text()
    comm = connect("gloo", timeout=60.0)
    results = {}
    reductions = {"none": None, "fp32": Full(), "bf16": Bf16(), "fp16": Fp16(), "fp16a": Fp16(Accumulated())}
    for name, reduction in reductions.items():
        ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(MODEL), bucket_cap_mb=1e-4)
        if reduction is not None:
            ddp.register_comm_hook(None, as_ddp_hook(reduction, comm))
        for _ in range(3):
            ddp.zero_grad()
            (ddp(BATCH.chunk(2)[rank]).square().mean() * 1e6).backward()
        results[name] = torch.cat([param.grad.flatten() for param in ddp.parameters()])
    torch.save(results, Path(folder, f"{rank}.pt"))
    comm.close()


@pytest.mark.slow
def test_as_a_hook_of_torch_ddp(tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    torch.multiprocessing.spawn(_process, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    exact = first.pop("none")
    for name, got in first.items():
        assert torch.equal(got, second[name])
        error = float((got - exact).norm() / exact.norm())
        assert error < {"fp32": 1e-6, "bf16": 2**-8}.get(name, 5e-4), name
        assert (error == 0) == (name == "fp32")
