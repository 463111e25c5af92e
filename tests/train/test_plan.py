"""plsc-train --plan: bytes against tensors and a process, seconds against hand calculations, what it advises."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plsc import Fleet, Strategy, cli, cli_flags
from plsc.comm import LocalCommunicator
from plsc.nn import ClassParallelHead
from plsc.ops import sample_classes
from plsc.train import build, plan, scaling, speeds
from plsc.train.config import Config, DataConfig, EvalConfig, HeadConfig, ModelConfig, OptimConfig
from plsc.train.scaling import GB, Device, Kept, Links, Work
from plsc.train.speeds import Backbone

ROOT = Path(__file__).resolve().parents[2]
DIM, CLASSES, BATCH = 24, 900, 16
BACKBONE = Backbone(0.01, 0.002, 0.5 * GB, 2e6, num_weights=10**6, flops=1e9)
DEVICE = Device(1e10, 1e-9, 1e-10, 1e-9)


def config(head: HeadConfig | None = None, **changes: object) -> Config:
    made = Config(
        batch_size=BATCH,
        plan="here",
        eval=EvalConfig(task="none"),
        data=DataConfig(kind="synthetic", image_size=16, channels=1, num_classes=CLASSES, num_samples=64, workers=0),
        model=ModelConfig(backbone="plainnet", embedding_size=DIM),
        head=head or HeadConfig(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


# ---- memory


@pytest.mark.parametrize(
    ("head", "block"),
    [
        (HeadConfig(), 256),
        (HeadConfig(cache_mb=0.0), 256),
        (HeadConfig(cache_mb=0.02), 256),  # one block of four is kept
        (HeadConfig(cache_mb=0.05), 256),  # three are, the last and shorter one is not
        (HeadConfig(fused=True, cache_mb=0.02), 256),
        (HeadConfig(fused=True, cache_mb=0.0), 4096),  # one block, shorter than asked
        (HeadConfig(fused=True, cache_mb=0.02, cache_dtype="bf16"), 256),
        (HeadConfig(fused=True, weight_dtype="split", state_dtype="bf16"), 256),
        (HeadConfig(fused=True, weight_dtype="bf16", state_dtype="int8", cache_mb=0.0), 100),
        (HeadConfig(sub_centers=3, cache_mb=0.05), 128),
        (HeadConfig(product_dtype="bf16", cache_mb=0.02), 256),
        (HeadConfig(product_dtype="bf16", sub_centers=2), 256),
        (HeadConfig(fused=True, weight_dtype="split", product_dtype="bf16", cache_mb=0.0), 256),
    ],
)
def test_workspace_is_what_the_heads_buffers_hold(head: HeadConfig, block: int) -> None:
    asked = config(head)
    made = build.build_head(asked, CLASSES, LocalCommunicator())
    made.block = block
    made(torch.randn(BATCH, DIM, requires_grad=True), torch.arange(BATCH)).backward()
    held = sum(buffer.numel() * buffer.element_size() for buffer in made.workspace._buffers.values())
    found = scaling.workspace_bytes(
        num_samples=BATCH,
        dim=DIM,
        num_rows=CLASSES,
        block=block,
        kept=plan.kept_of(asked),
        cache_bytes=int(head.cache_mb * 2**20),
        cache_half=head.cache_dtype == "bf16",
    )
    assert found == held


@pytest.mark.parametrize("cache_mb", [0.0, 0.02, 0.05, 1.0])
@pytest.mark.parametrize("sample_rate", [1.0, 0.5])
@pytest.mark.parametrize(
    "strategy", [{"clip_norm": 1.0}, {"clip_norm": 1.0, "accumulate": 2}, {"amp": "fp16"}], ids=str
)
def test_workspace_of_steps_that_wait(strategy: dict[str, object], sample_rate: float, cache_mb: float) -> None:
    head = HeadConfig(fused=True, cache_mb=cache_mb, sample_rate=sample_rate)
    asked = config(head, strategy=Strategy(**strategy))
    made = build.build_head(asked, CLASSES, LocalCommunicator())
    made.block, body = 256, torch.nn.Linear(DIM, DIM)
    fleet, optimizer = Fleet(asked.strategy, LocalCommunicator()), torch.optim.SGD(body.parameters(), 0.1)
    labels = torch.arange(BATCH)
    for _ in range(asked.strategy.accumulate):
        fleet.step(made(body(torch.randn(BATCH, DIM)), labels), optimizer)
    held = sum(buffer.numel() * buffer.element_size() for buffer in made.workspace._buffers.values())
    drawn = [sample_classes(labels, made.shard, rate=sample_rate, seed=made.seed, step=i)[0] for i in range(2)]
    num_rows = max(map(len, drawn[: asked.strategy.accumulate]))
    sizes = {"num_samples": BATCH, "dim": DIM, "num_rows": num_rows, "block": 256}
    assert scaling.workspace_bytes(**sizes, kept=plan.kept_of(asked), cache_bytes=int(cache_mb * 2**20)) == held


@pytest.mark.parametrize(
    ("optim", "head"),
    [
        (OptimConfig(), HeadConfig()),
        (OptimConfig(momentum=0.0), HeadConfig()),
        (OptimConfig(name="adamw"), HeadConfig(sub_centers=2)),
        (OptimConfig(name="lars"), HeadConfig()),
        (OptimConfig(), HeadConfig(fused=True)),
        (OptimConfig(name="adamw"), HeadConfig(fused=True, weight_dtype="bf16")),
        (OptimConfig(), HeadConfig(fused=True, weight_dtype="split", state_dtype="int8")),
        (OptimConfig(), HeadConfig(fused=True, weight_dtype="bf16", state_dtype="bf16", sample_rate=0.5)),
        (OptimConfig(), HeadConfig(fused=True, sample_rate=0.5, unsampled="decayed")),
    ],
)
def test_bytes_a_class_are_those_of_weight_and_optimizer(optim: OptimConfig, head: HeadConfig) -> None:
    asked = config(head, optim=optim)
    fleet = Fleet(asked.strategy, LocalCommunicator())
    backbone = fleet.replicate(build.build_backbone(asked))
    made = build.build_head(asked, CLASSES, fleet.comm)
    optimizer = build.build_optim(asked, backbone, made)
    fleet.step(made(backbone(torch.randn(4, 1, 16, 16)), torch.arange(4)), optimizer)
    kept = [made.weight, *made.row_state().values(), *([] if made.lag is None else [made.lag.touched])]
    kept += [value for value in optimizer.state.get(made.weight, {}).values() if value.dim() > 0]
    held = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    assert plan.kept_of(asked).bytes_per_class * CLASSES == held


def test_head_bytes_by_hand() -> None:
    at_hand = {"workspace": 1000, "num_samples": 10}
    batch = 4 * 10 * (7 * 8 + 20)
    assert scaling.head_bytes(100, 8, Kept(64.0), **at_hand) == 6400 + 1000 + batch
    torch_like = Kept(64.0, fused=False, temporaries=2)
    assert scaling.head_bytes(100, 8, torch_like, **at_hand) == 6400 + 1000 + batch + 3 * 3200
    waiting = Kept(64.0, waits=True, sampled=0.5)
    assert scaling.head_bytes(100, 8, waiting, **at_hand) == 6400 + 1000 + batch + 1600 + 24 * 50
    joined = Kept(64.0, waits=True, sampled=0.5, passes=3)  # 3/4 and 1/2 become 7/8 of the classes
    assert scaling.head_bytes(100, 8, joined, **at_hand) == 6400 + 1000 + batch + 2.125 * 3200 + 24 * 50
    accumulated = Kept(64.0, waits=True, clipped=True, passes=3)
    assert scaling.head_bytes(100, 8, accumulated, **at_hand) == 6400 + 1000 + batch + 2 * 4 * 10 * 6 * 8


SCRIPT = """
import sys
from dataclasses import replace
import torch
from plsc.comm import LocalCommunicator
from plsc.strategies import Strategy
from plsc.train import plan, run, speeds
from plsc.train.config import *
from plsc.train.trainer import Trainer

torch.set_num_threads(1)
fused, classes, passes = sys.argv[2] != "torch", 300_000, 4 if sys.argv[2] == "passes" else 1
config = Config(
    batch_size=32 * passes, out=sys.argv[3], plan="here", eval=EvalConfig(task="none"),
    data=DataConfig(
        kind="synthetic", image_size=48, channels=1, num_classes=classes, num_samples=256 * passes, workers=0
    ),
    model=ModelConfig(backbone="smallconv", embedding_size=128),
    head=HeadConfig(fused=True, weight_dtype="split", state_dtype="bf16") if fused else HeadConfig(),
    strategy=Strategy(accumulate=passes),
)
if passes > 1:  # of each a sample whose gradient waits
    config = replace(config, head=replace(config.head, sample_rate=0.3))
if sys.argv[1] == "trained":
    trainer = Trainer(config, comm=LocalCommunicator())
    for images, labels in trainer.loader.epochs(1):
        trainer.fleet.step(trainer.head(trainer.backbone(images), labels), trainer.optimizer)
    print(speeds.peak_bytes(torch.device("cpu")))
else:
    found, data = plan.open_data(config)
    assert found == classes
    plan.read_some(config, data, 32)
    backbone = speeds.measure_backbone(config, 32)
    print(plan.rank_bytes(config, classes, plan.read_target(config), backbone, plan.kept_of(config)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["torch", "split", "passes"])
def test_predicted_memory_is_a_training_process_to_five_percent(kind: str, tmp_path: Path) -> None:
    found = {}
    for name in ("trained", "planned"):
        command = [sys.executable, "-c", SCRIPT, name, kind, str(tmp_path / "run")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stderr
        found[name] = float(done.stdout.split()[-1])
    assert found["planned"] == pytest.approx(found["trained"], rel=0.05)


# ---- seconds


def test_a_step_by_hand() -> None:
    work = Work(1000, 16, batch=8, num_ranks=4, backbone_bytes=4000, sample_rate=0.5, cached=0.25, wire=2, accumulate=3)
    device, links = Device(flops=1e6, entry=1e-6, read=1e-7, step=1e-5), Links(0.01, 1e5, rate_inside=1e9)
    found = scaling.step_seconds(work, device, links, backbone=0.5)
    cosines, numbers = 32 * 125, 125 * 16  # half of 250 classes a rank
    assert found.products == pytest.approx(3 * 2 * cosines * 16 * 3.75 / 1e6)
    assert found.entries == pytest.approx(3 * cosines * 1.75e-6) and found.reads == pytest.approx(3 * numbers * 1.75e-7)
    assert found.rows == pytest.approx(numbers * 1e-5) and found.backbone == 1.5
    assert found.gather == pytest.approx(3 * 3 * (0.01 + 8 * (16 * 2 + 8) / 1e5))
    assert found.scatter == pytest.approx(3 * 3 * (0.01 + 8 * (16 + 2) * 4 / 1e5))
    assert found.sums == pytest.approx(3 * 4 * (0.01 + 256 / 1e5))  # a tree of two levels, there and back
    assert found.average == pytest.approx(2 * 3 * (0.01 + 4000 / 4 / 1e5))  # a ring
    assert found.total == pytest.approx(found.backbone + found.head + found.links)


def test_a_step_that_waits_by_hand() -> None:
    """Three passes over 1000 rows, a quarter of the exponentials cached, 0.6 of the gradient made twice."""
    work = Work(1000, 16, 8, 1, cached=0.25, accumulate=3, waits=True, norm=0.6)
    found = scaling.step_seconds(work, Device(1e6, 1e-6, 1e-7, 1e-5), Links(0.01, 1e5), backbone=0.0)
    gemm, last, other = 2 * 8 * 1000 * 16 / 1e6, 0.75 + 0.35, 1.6
    assert found.products == pytest.approx(gemm * (3 * 2 + 3 * 1.6 + last + 2 * other))
    assert found.entries == pytest.approx(8 * 1000 * 1e-6 * (3 + last + 2 * other))


def test_large_sums_travel_in_a_ring_and_one_rank_sends_nothing() -> None:
    links = Links(1e-6, 1e9)
    assert scaling.all_reduce_seconds(8e8, 4, links) == pytest.approx(2 * 3 * (1e-6 + 0.2))
    alone = scaling.step_seconds(Work(100, 8, 4, 1, backbone_bytes=10**9), DEVICE, links, backbone=0.0)
    assert alone.links == 0.0


def test_a_gpu_hides_what_it_sends_behind_what_it_computes() -> None:
    work = Work(10**6, 512, batch=128, num_ranks=16, backbone_bytes=10**8, bucket_bytes=10**7)
    links = Links(1e-5, 1e10, per_host=8, latency_inside=1e-6, rate_inside=1e11)
    cpu = scaling.step_seconds(work, DEVICE, links, backbone=1.0)
    gpu = scaling.step_seconds(work, replace(DEVICE, overlaps=True), links, backbone=1.0)
    assert cpu.scatter > 0.0 == gpu.scatter
    assert gpu.average == scaling.all_reduce_seconds(10**7, 16, links) < cpu.average
    slow = scaling.step_seconds(work, replace(DEVICE, overlaps=True), links, backbone=0.003)
    assert slow.average == pytest.approx(cpu.average - 0.002)


def test_ranks_of_one_host_use_the_links_inside() -> None:
    links = Links(1e-5, 1e10, per_host=8, latency_inside=1e-6, rate_inside=1e11)
    assert links.of(8) == (1e-6, 1e11) and links.of(9) == (1e-5, 1e10)


def test_a_shared_core_is_slower_in_everything() -> None:
    once, twice = (
        scaling.step_seconds(Work(10**5, 64, 32, 1), device, Links(0, 1), backbone=0.0)
        for device in (DEVICE, DEVICE.slowed(2.0))
    )
    assert twice.total == pytest.approx(2 * once.total)


# ---- the plan


def rows_of(asked: Config, target: plan.Target) -> list[plan.Row]:
    heads = plan.candidates(asked)
    return [plan.row_of(replace(asked, head=head), asked.data.num_classes, target, BACKBONE, DEVICE) for head in heads]


@pytest.mark.parametrize("text", ["2x4GB", "4GiB", "2xv100"])
def test_what_fits_fits_and_one_more_class_a_rank_does_not(text: str) -> None:
    asked = config(plan=text)
    target = plan.read_target(asked)
    for row in rows_of(asked, target):
        each, kept = replace(asked, head=row.head), plan.kept_of(replace(asked, head=row.head))
        at = [plan.rank_bytes(each, row.fitting + more, target, BACKBONE, kept) for more in (0, target.num_ranks)]
        assert at[0] <= target.memory < at[1]


def test_rows_hold_more_classes_in_fewer_bytes() -> None:
    asked = config(plan="8x32GB")
    rows = rows_of(asked, plan.read_target(asked))
    assert [row.head.sample_rate for row in rows] == [1.0] * 6 + [0.1] * 5
    assert [row.bytes_per_class for row in rows[:6]] == [DIM * 8, DIM * 8, DIM * 6, DIM * 5 + 4, DIM * 4, DIM * 3 + 4]
    assert sorted(row.fitting for row in rows[:6]) == [row.fitting for row in rows[:6]]
    assert rows[0].fitting < 0.6 * rows[1].fitting  # gradient and temporaries of the whole weight
    assert rows[6].seconds.head < 0.2 * rows[1].seconds.head


def test_adamw_and_plain_softmax_have_what_they_can_have() -> None:
    adamw = list(plan.candidates(config(optim=OptimConfig(name="adamw"))))
    assert {(head.fused, head.weight_dtype, head.state_dtype) for head in adamw} == {
        (False, "fp32", "fp32"),
        (True, "fp32", "fp32"),
        (True, "split", "fp32"),
        (True, "bf16", "fp32"),
    }
    assert len(list(plan.candidates(config(HeadConfig(margin="linear"))))) == 1


def test_the_advice_fits_and_is_the_first_that_does() -> None:
    asked = config(plan="8x32GB", data=replace(config().data, num_classes=1_300_000_000))
    target = plan.read_target(asked)
    rows = rows_of(asked, target)
    told = plan.verdict(1_300_000_000, target, rows)
    assert told.endswith("fit: --head.fused --head.weight-dtype split --head.state-dtype bf16")
    assert rows[1].num_bytes > target.memory >= rows[2].num_bytes
    assert plan.verdict(900, target, rows_of(config(plan="8x32GB"), target)).startswith("fits: the recipe's 900")
    none = plan.verdict(10**10, target, rows_of(replace(asked, data=replace(asked.data, num_classes=10**10)), target))
    assert "nor does any other row" in none and "such devices" in none


def test_a_target_by_name_is_told_with_its_assumed_rates() -> None:
    asked = config(plan="16xH200", batch_size=64)
    target = plan.read_target(asked)
    assert target.num_ranks == 16 and target.memory == 141 * GB and target.device is not None
    row = plan.row_of(asked, CLASSES, target, BACKBONE, target.device)
    assert row.seconds.backbone == pytest.approx(3 * 4 * 1e9 / target.device.training)
    told = "\n".join(plan.lines(asked, CLASSES, target, BACKBONE, target.device, [row]))
    assert "assumed, not measured: products 50 TF/s" in told


@pytest.mark.parametrize("text", ["8x", "eight", "0x32GB", "8xP100", "32MB", "x32GB", "8x1.2.3GB"])
def test_devices_nobody_knows_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected here, or devices as 8x32GB or 8xV100"):
        plan.read_target(config(plan=text))


def test_a_batch_that_does_not_divide_is_refused_with_one_that_does() -> None:
    with pytest.raises(ValueError, match="--batch-size 20 is one"):
        plan.batch_of(config(), plan.read_target(config(plan="5x4GB")))


def test_here_every_rank_has_its_share_and_readers_take_theirs() -> None:
    alone, three = (
        plan.read_target(config(nproc=ranks, data=replace(config().data, workers=workers)))
        for ranks, workers in ((1, 0), (3, 2))
    )
    assert three.memory == pytest.approx(alone.memory / 3 - 2 * plan.READER_BYTES, abs=0.2 * GB)
    assert (three.num_ranks, three.here, three.device) == (3, True, None)


def test_missing_data_can_be_replaced_by_a_number() -> None:
    absent = DataConfig(kind="folder", path="nowhere")
    with pytest.raises(ValueError, match=r"--data\.num-classes N"):
        plan.open_data(config(data=absent))
    assert plan.open_data(config(data=replace(absent, num_classes=7))) == (7, None)
    assert plan.open_data(config())[0] == CLASSES


# ---- measuring, small


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REPEATS", 1), ("WEIGHT_BYTES", 1), ("SECONDS", 0.01)):
        monkeypatch.setattr(speeds, name, value)
    monkeypatch.setattr(speeds, "num_measured", lambda dim: 300)


@pytest.mark.parametrize(
    "head",
    [
        HeadConfig(),
        HeadConfig(margin="curricularface", filter_threshold=0.5, sub_centers=2),
        HeadConfig(margin="linear"),
        HeadConfig(fused=True, weight_dtype="bf16", state_dtype="int8", sample_rate=0.5),
    ],
)
def test_every_head_can_be_measured(head: HeadConfig, small: None) -> None:
    found = speeds.measure_head(config(head), 16, torch.device("cpu"))
    assert found.flops > 0 and found.entry > 0 and found.read > 0 and found.step > 0


def test_a_backbone_is_measured_as_it_is_trained(small: None) -> None:
    asked = config(strategy=Strategy(recompute="full", clip_norm=1.0, accumulate=2))
    found = speeds.measure_backbone(asked, 8)
    backbone = build.build_backbone(asked)
    assert found.num_weights == sum(param.numel() for param in backbone.parameters())
    assert found.seconds_of(8) > 0 and found.num_bytes > 50e6
    layers = [module for module in backbone.modules() if isinstance(module, torch.nn.Linear)]
    assert found.flops >= sum(2 * layer.weight.numel() for layer in layers) > 0


def test_measuring_a_head_leaves_torch_heads_alone(small: None) -> None:
    """The rates are those of a head of its own; a user's head must not step by them."""
    made = ClassParallelHead(DIM, 300)
    before = made.weight.detach().clone()
    speeds.measure_head(config(), 16, torch.device("cpu"))
    assert torch.equal(made.weight.detach(), before)


def test_loopback_and_free_memory() -> None:
    links = speeds.loopback()
    assert 0 < links.latency < 1 and links.rate > 1e6
    assert speeds.available_bytes(torch.device("cpu")) >= 0


def test_the_command(small: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--data.kind", "synthetic", "--data.num-classes", "900", "--model.backbone", "plainnet"]
    flags += ["--batch-size", "16", "--out", str(tmp_path / "none"), "--data.image-size", "16"]
    assert cli.train(["glyphs", *flags, "--plan"]) == 0
    told = capsys.readouterr().out
    assert "1 rank(s) on this machine, 16 samples" in told and "fits: the recipe's 900 classes" in told
    assert told.count("\n| ") == 12  # the heading and a row each
    assert cli.train(["glyphs", *flags, "--plan", "2x2.1GB", "--nproc", "2"]) == 0
    assert "2 rank(s) on 2x2.1GB, 8 samples" in capsys.readouterr().out
    assert cli.train(["glyphs", *flags[:2], "--data.num-classes", "999999999", *flags[4:], "--plan", "4GB"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launchers_ranks_are_planned_for(
    small: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Whatever the recipe's nproc says; one of them says it."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29555}.items():
        monkeypatch.setenv(name, str(value))
    flags = ["--data.kind", "synthetic", "--data.num-classes", "900", "--model.backbone", "plainnet"]
    assert cli.train(["glyphs", *flags, "--batch-size", "16", "--data.image-size", "16", "--plan", "2x2.1GB"]) == 0
    assert ("2 rank(s) on 2x2.1GB, 8 samples" in capsys.readouterr().out) == (rank == 0)


@pytest.mark.parametrize(
    ("args", "read"),
    [
        ([], []),
        (["--plan"], ["--plan=here"]),
        (["--plan", "--nproc", "2"], ["--plan=here", "--nproc", "2"]),
        (["--nproc", "2", "--plan"], ["--nproc", "2", "--plan=here"]),
        (["--plan", "8xV100"], ["--plan", "8xV100"]),
        (["--plan=8xV100"], ["--plan=8xV100"]),
    ],
)
def test_plan_without_a_word_is_for_this_machine(args: list[str], read: list[str]) -> None:
    assert cli_flags.plan_here(args) == read
