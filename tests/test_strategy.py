"""Strategy through Fleet and Trainer: each technique by a word, with the class-parallel head, through restarts."""

import dataclasses
import importlib.util
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import plsc
from plsc.comm import Auto, Communicator, Grid2D, run_ranks
from plsc.strategies import DGC, Strategy, fusion
from plsc.train import Config, Trainer
from plsc.train.config import DataConfig, EvalConfig, HeadConfig, ModelConfig, OptimConfig


def same_training() -> Any:
    """The training of test_fleet.py: six steps of a small backbone with a head, the same on any number of ranks."""
    spec = importlib.util.spec_from_file_location("training_of_test_fleet", Path(__file__).with_name("test_fleet.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


train = same_training()

EVERYTHING = {"density": 1.0, "min_numel": 1, "masking": False, "fallback": False}


@pytest.fixture(scope="module")
def alone() -> tuple:
    return run_ranks(1, train, {})[0]


def head_of(results: list[tuple]) -> torch.Tensor:
    return torch.cat([result[2] for result in results])


# ---- the same run, spread in another way


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (3, {"topology": "ring"}),
        (4, {"topology": "hierarchical:2", "lanes": 2}),
        (4, {"topology": "grid", "bucket_mb": 0.001}),
        (2, {"topology": "auto"}),
        (3, {"lanes": 3, "bucket_mb": 0.001}),
        (2, {"local_sgd": 1}),
        (3, {"local_sgd": 4, "local_sgd_args": {"begin": 100}, "topology": "ring"}),
        (3, {"compress": "dgc", "compress_args": EVERYTHING}),
        (4, {"compress": "dgc", "compress_args": EVERYTHING, "topology": "hierarchical:2", "lanes": 2}),
        (2, {"compress": "dgc", "compress_args": {**EVERYTHING, "fallback": True}}),
        (2, {"compress": "dgc", "compress_args": {**EVERYTHING, "begin": 3}, "accumulate": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [False, True])
def test_exact_techniques_give_the_losses_of_one_process(world: int, options: dict, fused: bool, alone: tuple) -> None:
    results = run_ranks(world, lambda comm: train(comm, options, fused=fused))
    losses = results[0][0].view(-1, options.get("accumulate", 1)).mean(1)
    torch.testing.assert_close(losses, alone[0], rtol=1e-10, atol=1e-10)
    for result in results:
        torch.testing.assert_close(result[1], alone[1], rtol=1e-9, atol=1e-11)
        assert torch.equal(result[1], results[0][1])
    torch.testing.assert_close(head_of(results), alone[2], rtol=1e-9, atol=1e-11)


WORDS: list[dict[str, Any]] = [
    {"topology": "ring"},
    {"topology": "hierarchical:2"},
    {"lanes": 2, "bucket_mb": 0.001},
    {"bucket_mb": 0.0},
    {"accumulate": 3},
    {"amp": "fp16"},  # the loss scale alone, for this training has no autocast: a power of two, so exact
    {"clip_norm": 1e9},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"local_sgd": 1},
    {"compress": "dgc", "compress_args": EVERYTHING},
]


def test_exact_techniques_in_pairs_give_the_losses_of_one_process(alone: tuple) -> None:
    """All pairs that are not refused; those that are say why."""
    refused = []
    for one, two in itertools.combinations(WORDS, 2):
        if set(one) & set(two):
            continue
        options = one | two
        try:
            Strategy(**options)
        except ValueError as error:
            refused.append(str(error))
            continue
        results = run_ranks(4, train, options) if "accumulate" not in options else run_ranks(2, train, options)
        losses = results[0][0].view(-1, options.get("accumulate", 1)).mean(1)
        torch.testing.assert_close(losses, alone[0], rtol=1e-10, atol=1e-10, msg=str(options))
        torch.testing.assert_close(head_of(results), alone[2], rtol=1e-9, atol=1e-11)
    assert len(refused) == 1 and "compress='dgc' and local_sgd do not go together" in refused[0]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"reduce_dtype": "bf16"}, 2e-2),
        ({"reduce_dtype": "fp16"}, 2e-3),
        ({"reduce_dtype": "fp16", "reduce_accumulate": "fp32", "lanes": 2}, 2e-3),
        ({"reduce_dtype": "fp16", "topology": "hierarchical:2"}, 2e-3),
        ({"local_sgd": 3, "reduce_dtype": "bf16"}, 0.2),
        ({"local_sgd": 2, "local_sgd_args": {"adaptive": True, "outer_lr": 0.7, "outer_momentum": 0.5}}, 0.3),
        ({"compress": "dgc", "compress_args": {"density": 0.2, "min_numel": 64, "fallback": False}}, 0.3),
    ],
    ids=str,
)
def test_inexact_techniques_stay_near(options: dict, tolerance: float, alone: tuple) -> None:
    results = run_ranks(4, train, options)
    got, expected = results[0][0], alone[0]
    assert 0 < (got - expected).abs().max() < tolerance * expected.max()
    if "local_sgd" not in options:
        assert all(torch.equal(results[0][1], other[1]) for other in results[1:])


def test_clipping_with_local_sgd_is_agreed() -> None:
    results = run_ranks(3, lambda comm: train(comm, {"local_sgd": 3, "clip_norm": 0.3}))
    norms = [[step.grad_norm for step in result[3]] for result in results]
    assert norms[0] == norms[1] == norms[2] and max(norms[0]) > 0.3


def test_clipping_with_dgc() -> None:
    """Ordinary while steps are dense; in sparse steps DGC clips what it sends, and the rest is clipped by itself."""
    dense = {"compress": "dgc", "compress_args": {"min_numel": 1, "density": 1.0}}
    expected = run_ranks(1, lambda comm: train(comm, {"clip_norm": 0.3}))[0]
    results = run_ranks(3, lambda comm: train(comm, {**dense, "clip_norm": 0.3}))
    torch.testing.assert_close(results[0][0], expected[0], rtol=1e-10, atol=1e-10)
    sparse = {"compress": "dgc", "compress_args": EVERYTHING}
    norms = [
        [step.grad_norm for step in result[3]]
        for result in run_ranks(3, lambda comm: train(comm, {**sparse, "clip_norm": 0.3}))
    ]
    assert norms[0] == norms[1] == norms[2]
    assert norms[0][0] < expected[3][0].grad_norm


@pytest.mark.parametrize("options", [{"compress": "dgc", "compress_args": EVERYTHING}, {"local_sgd": 2}], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_an_fp16_overflow_on_one_rank_skips_on_all(options: dict, fused: bool) -> None:
    def run(comm: Communicator) -> tuple:
        fleet = plsc.Fleet(plsc.Strategy(amp="fp16", **options), comm)
        layer = fleet.replicate(torch.nn.Linear(4, 4))
        head = plsc.ClassParallelHead(
            4, 6, margin=plsc.CosFace(scale=8.0), comm=comm, head_optimizer=plsc.SGD(0.1) if fused else None
        )
        optimizer = torch.optim.SGD([*layer.parameters(), *([] if fused else head.parameters())], 0.1, momentum=0.9)
        log = []
        for turn in range(4):
            before = [layer.weight.detach().clone(), head.weight.detach().clone()]
            loss = head(layer(torch.randn(2, 4, generator=torch.Generator().manual_seed(turn))), torch.tensor([0, 5]))
            bad = turn == 1 and comm.rank == 1
            handle = layer.weight.register_hook(lambda grad, bad=bad: grad * (float("inf") if bad else 1.0))
            step = fleet.step(loss, optimizer)
            handle.remove()
            same = torch.equal(before[0], layer.weight) and torch.equal(before[1], head.weight)
            log.append((step.updated, step.overflow, same))
        fleet.meet(optimizer)
        return log, layer.weight.detach().clone()

    (first, w0), (second, w1) = run_ranks(2, run)
    assert first == second and torch.equal(w0, w1) and w0.isfinite().all()
    # local SGD meets after the second step although it was skipped: the weights of one rank may move to the mean
    assert [entry[:2] for entry in first] == [(True, False), (False, True), (True, False), (True, False)]
    assert first[1][2] or "local_sgd" in options


def test_a_bad_gradient_with_dgc_skips_in_fp32_too() -> None:
    def run(comm: Communicator) -> list[tuple[bool, bool]]:
        fleet = plsc.Fleet(plsc.Strategy(compress="dgc", compress_args=EVERYTHING), comm)
        layer = fleet.replicate(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        log = []
        for turn in range(3):
            bad = float("nan") if turn == 1 and comm.rank == 0 else 1.0
            layer.weight.register_hook(lambda grad, bad=bad: grad * bad)
            step = fleet.step(layer(torch.ones(1, 4)).sum(), optimizer)
            layer.weight._backward_hooks.clear() if turn == 1 else None  # type: ignore[union-attr]
            log.append((step.updated, step.overflow))
            if turn == 1:
                break
        assert layer.weight.isfinite().all()
        return log

    assert run_ranks(2, run) == [[(True, False), (False, True)]] * 2


PROCESSES: list[dict[str, Any]] = [
    {"topology": "grid"},
    {"topology": "auto", "lanes": 2},
    {"compress": "dgc", "compress_args": EVERYTHING},
    {"compress": "dgc", "compress_args": {"density": 0.2, "min_numel": 64, "fallback": False}, "reduce_dtype": "bf16"},
    {"local_sgd": 1, "topology": "ring"},
    {"local_sgd": 3, "reduce_dtype": "fp16"},
    {"reduce_dtype": "fp16", "lanes": 2, "bucket_mb": 0.01},
    {"reduce_dtype": "bf16", "reduce_accumulate": "fp32"},
]


def _process(rank: int, port: int, folder: str) -> None:
    """One of two real processes, through all of PROCESSES."""
    import os

    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, GLOO_SOCKET_IFNAME="lo")
    comm = plsc.connect("gloo", timeout=60.0)
    torch.save([train(comm, options)[:3] for options in PROCESSES], Path(folder, f"{rank}.pt"))
    comm.close()


@pytest.mark.slow
def test_processes_do_what_threads_do(tmp_path: Path, alone: tuple) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_process, (port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for options, one, two in zip(PROCESSES, first, second, strict=True):
        threads = run_ranks(2, train, options)
        assert torch.equal(one[0], two[0]), options
        halves = options.get("reduce_dtype") is not None  # gloo adds halves in halves, threads in float32
        tolerance = {"rtol": 2e-2, "atol": 1e-2} if halves else {"rtol": 1e-9, "atol": 1e-11}
        for got, expected in zip(one, threads[0][:3], strict=True):
            torch.testing.assert_close(got, expected, **tolerance)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compress": "dgc", "local_sgd": 8}, "compress='dgc' and local_sgd do not go together: DGC sends"),
        ({"compress": "dgc", "reduce_dtype": "fp16"}, "reduce_dtype='fp16' do not go together: DGC keeps exactly"),
        ({"local_sgd": 8, "sync_bn": True}, "local_sgd and sync_bn do not go together: replicas differ"),
        ({"reduce_accumulate": "fp32", "topology": "ring"}, "topology='ring' do not go together"),
        ({"compress": "topk"}, "got compress 'topk'"),
        ({"local_sgd": -1}, "local_sgd -1"),
        ({"lanes": 0}, "lanes=0"),
        ({"topology": "star"}, "topology: got 'star'"),
        ({"topology": "hierarchical:0"}, "topology: got 'hierarchical:0'"),
        ({"topology": "grid:2x0"}, "topology: got 'grid:2x0'"),
        ({"reduce_accumulate": "bf16"}, "reduce_accumulate: got 'bf16'"),
        ({"compress_args": {"density": 0.1}}, "got compress_args .* but compress is 'none'"),
        ({"local_sgd_args": {"begin": 1}}, "got local_sgd_args .* but local_sgd is 0"),
        ({"compress": "dgc", "compress_args": {"densty": 0.1}}, "compress_args: unknown 'densty'; expected density"),
        ({"compress": "dgc", "compress_args": {"density": "much"}}, "density is 'much', expected float"),
        ({"compress": "dgc", "compress_args": {"density": 2.0}}, "dgc: got density 2.0"),
        ({"local_sgd": 8, "local_sgd_args": {"begin": True}}, "begin is True, expected int"),
        ({"local_sgd": 8, "local_sgd_args": {"every": 5}}, "got every in local_sgd_args .*; give it as local_sgd"),
        ({"local_sgd": 8, "local_sgd_args": {"outer_lr": math.inf}}, "outer_lr inf, .* outer_lr a number > 0"),
    ],
)
def test_strategy_says_why_it_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Strategy(**options)


@pytest.mark.parametrize("world", [1, 2])
def test_dgc_refuses_adamw_before_the_first_step(world: int) -> None:
    def run(comm: Communicator) -> None:
        fleet = plsc.Fleet(plsc.Strategy(compress="dgc"), comm)
        layer = fleet.replicate(torch.nn.Linear(4, 4))
        with pytest.raises(ValueError, match=r"got the optimizer AdamW, expected torch.optim.SGD"):
            fleet.step(layer(torch.ones(1, 4)).sum(), torch.optim.AdamW(layer.parameters()))

    run_ranks(world, run)


def test_options_arrive() -> None:
    def run(comm: Communicator) -> None:
        fleet = plsc.Fleet(plsc.Strategy(compress="dgc", compress_args={"density": 0.5, "min_numel": 4}), comm)
        fleet.replicate(torch.nn.Linear(4, 4))
        (dgc,) = fleet.reducers
        assert isinstance(dgc, DGC) and (dgc.options.density, dgc.options.min_numel) == (0.5, 4)
        fleet = plsc.Fleet(plsc.Strategy(local_sgd=5, local_sgd_args={"outer_lr": 1, "begin": 2}), comm)
        fleet.replicate(torch.nn.Linear(4, 4))
        assert (fleet.locals[0].options.every, fleet.locals[0].options.begin) == (5, 2) and not fleet.reducers
        fleet = plsc.Fleet(plsc.Strategy(topology="grid:1x2"), comm)
        fleet.replicate(torch.nn.Linear(4, 4))
        assert isinstance(fleet.reducers[0].comm, Grid2D)

    run_ranks(2, run)


# ---- a whole run

BASE = Config(
    epochs=1,
    batch_size=12,
    log_every=1,
    save_every=3,
    export=False,
    data=DataConfig(kind="synthetic", image_size=16, channels=1, num_classes=10, num_samples=120, workers=0, crop=1),
    model=ModelConfig(backbone="plainnet", embedding_size=8),
    head=HeadConfig(margin="cosface", margin_args={"scale": 16.0}),
    optim=OptimConfig(lr=0.05, warmup_epochs=0.5),
    eval=EvalConfig(task="none"),
)
RUNS: dict[str, dict[str, Any]] = {
    "dgc": {"compress": "dgc", "compress_args": {"density": 0.05, "min_numel": 64, "warmup_steps": 8, "begin": 1}},
    "local": {"local_sgd": 4, "local_sgd_args": {"outer_lr": 0.7, "outer_momentum": 0.9}, "reduce_dtype": "bf16"},
    "adaptive": {"local_sgd": 4, "local_sgd_args": {"adaptive": True, "begin": 2}},
    "fp16": {"reduce_dtype": "fp16", "reduce_accumulate": "fp32", "lanes": 2, "bucket_mb": 0.01},
    "grid": {"topology": "grid"},
}


class Killed(Exception):
    """What ends a rank in the middle of its run."""


def run(config: Config, world: int, *, killed_at: int = 0) -> list[torch.Tensor]:
    """Trains on thread ranks, to the end or until something kills it; the backbone's weights of each rank."""

    def body(comm: Communicator) -> torch.Tensor:
        trainer = Trainer(config, comm=comm)
        step = trainer.fleet.step

        def dying(*args: Any) -> Any:
            if trainer.step == killed_at > 0:
                raise Killed
            return step(*args)

        trainer.fleet.step = dying  # type: ignore[method-assign]
        assert trainer.fit()
        return torch.cat([param.detach().flatten() for param in trainer.backbone.parameters()])

    return run_ranks(world, body)


@pytest.mark.parametrize("name", list(RUNS))
def test_a_killed_run_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, strategy=Strategy(**RUNS[name]))
    whole, parts = (dataclasses.replace(config, out=str(tmp_path / folder)) for folder in ("whole", "parts"))
    straight = run(whole, 2)
    with pytest.raises(Killed):
        run(parts, 2, killed_at=8)
    resumed = run(parts, 2)
    assert torch.equal(straight[0], straight[1])
    assert all(torch.equal(one, straight[0]) for one in resumed)


ELSEWHERE: dict[str, dict[str, Any]] = {
    **RUNS,
    "averaged": {},
    "all at once": {**RUNS["dgc"], "amp": "bf16", "reduce_dtype": "bf16", "accumulate": 2, "clip_norm": 1.0},
}


@pytest.mark.parametrize("name", list(ELSEWHERE))
@pytest.mark.parametrize("worlds", [(3, 1), (2, 3)])
def test_a_killed_run_goes_on_on_another_number_of_ranks(name: str, worlds: tuple[int, int], tmp_path: Path) -> None:
    """All ranks the same in the end; where the number of ranks is to change nothing, as one process alone would be."""
    config = dataclasses.replace(BASE, strategy=Strategy(**ELSEWHERE[name]), out=str(tmp_path / "run"))
    with pytest.raises(Killed):
        run(config, worlds[0], killed_at=8)
    resumed = run(config, worlds[1])
    assert resumed[0].isfinite().all() and all(torch.equal(one, resumed[0]) for one in resumed)
    if name in ("averaged", "grid", "fp16"):
        straight = run(dataclasses.replace(BASE, out=str(tmp_path / "alone")), 1)[0]
        tolerance = 1e-2 if name == "fp16" else 1e-4
        assert (resumed[0] - straight).norm() < tolerance * straight.norm()
    else:
        kinds = r"the checkpoint was made with (dgc|local_sgd), this run has reducer"
        with pytest.raises(ValueError, match=kinds):
            run(dataclasses.replace(config, strategy=Strategy(), epochs=2), worlds[1])


def test_the_measured_topology_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    favourite = "ring"

    def measured(self: Auto, ways: Any, size: int, *, turns: int) -> dict[str, float]:
        return {name: 0.1 if name == favourite else 1.0 for name in ways}

    monkeypatch.setattr(Auto, "_time", measured)
    config = dataclasses.replace(BASE, strategy=Strategy(topology="auto"), out=str(tmp_path), max_steps=4)

    def choice(comm: Communicator) -> str:
        trainer = Trainer(config, comm=comm)
        trainer.fit()
        assert isinstance(trainer.fleet._route, Auto)
        return trainer.fleet._route.choice

    assert run_ranks(2, choice) == ["ring"] * 2
    favourite = "grid"
    assert run_ranks(2, choice) == ["ring"] * 2
    assert run_ranks(3, choice) == ["grid"] * 3


def test_a_loss_scale_that_collapses_names_the_gradient() -> None:
    def body(comm: Communicator) -> str:
        fleet = plsc.Fleet(plsc.Strategy(amp="fp16"), comm)
        net = fleet.replicate(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
        assert fleet.scaler is not None
        fleet.scaler.loss_scale = 2.0
        if comm.rank == 1:
            net[1].weight.register_hook(lambda grad: grad * float("inf"))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        assert fleet.step(net(torch.ones(2, 4)).sum(), optimizer).overflow
        with pytest.raises(plsc.fleet.NonFiniteLoss) as caught:
            fleet.step(net(torch.ones(2, 4)).sum(), optimizer)
        assert caught.value.gradient == "1.weight (gradient)"
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second and "the loss scale fell to 0.5" in first and "not finite: 1.weight (gradient)" in first


@pytest.mark.parametrize("name", ["averaged", "dgc", "local"])
def test_the_measured_bucket_size_is_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes measures other costs, and goes on with the buckets of its checkpoint, bit for bit."""
    costs = [fusion.Costs(1e-3, 1e-6)]
    monkeypatch.setattr(fusion, "measure", lambda comm: costs[-1])
    config = dataclasses.replace(BASE, strategy=Strategy(**{**RUNS.get(name, {}), "bucket_mb": 0.0}))
    whole, parts = (dataclasses.replace(config, out=str(tmp_path / folder)) for folder in ("whole", "parts"))
    straight = run(whole, 2)
    with pytest.raises(Killed):
        run(parts, 2, killed_at=8)
    costs.append(fusion.Costs(1.0, 1e-6))
    resumed = run(parts, 2)
    assert all(torch.equal(one, straight[0]) for one in resumed)
