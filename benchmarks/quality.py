"""What ways of training together do to the result: the same task trained to its end with each, three seeds.

    python benchmarks/quality.py            # about 15 minutes on two quiet cores, after a minute of drawing once
    python benchmarks/quality.py --heads    # the forms of a fused head's weight and momentum, about 8 minutes
    python benchmarks/quality.py --heads --faces TRAIN VAL PAIRS --epochs 12   # the same for the recipe faces, smaller
    python benchmarks/quality.py --smoke    # one short training each of three ways; says nothing about quality

The task: characters of the fonts that matplotlib ships which stand in at least 16 faces (561 classes, 9,113 pictures),
a small convolutional network with a class-parallel ArcFace head; accuracy of verification on 6,000 pairs of characters
never trained on. Four ranks, as threads of one process: what the ranks compute is what processes would, bytes and time
are another matter (network.py). All ways have one schedule, batch and number of steps. A difference below the spread
over the seeds is no difference.

--faces takes the recipe `faces` (benchmarks/faces.md), photographs of people and CosFace, at 32 pixels instead of 64, a
quarter of the work: TRAIN and VAL are its folders or .zip archives, PAIRS its pairs; accuracy over the pairs of VAL.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch

from plsc.comm import run_ranks
from plsc.strategies import Strategy
from plsc.train import Config, Trainer
from plsc.train.build import build_data
from plsc.train.config import DataConfig, EvalConfig, HeadConfig, ModelConfig, OptimConfig, load_recipe

TASK = Config(
    batch_size=128,
    log_every=10_000,
    export=False,
    keep=1,
    data=DataConfig(
        kind="glyphs", fonts="matplotlib", min_faces=16, image_size=32, channels=1, workers=0, flip=False, crop=1
    ),
    model=ModelConfig(backbone="smallconv", embedding_size=64),
    head=HeadConfig(margin="arcface", margin_args={"scale": 32.0, "margin": 0.3}),
    optim=OptimConfig(name="sgd", lr=0.2, momentum=0.9, nesterov=True, schedule="cosine", warmup_epochs=0.5),
    eval=EvalConfig(task="verification", flip=False),
)
SPARSE = {"density": 0.01, "min_numel": 1024}
WAYS: dict[str, dict[str, Any]] = {
    "averaged, fp32": {},
    "averaged, bf16": {"reduce_dtype": "bf16"},
    "averaged, fp16": {"reduce_dtype": "fp16"},
    "DGC 1 %": {"compress": "dgc", "compress_args": SPARSE},
    "DGC 1 %, warm-up of a quarter": {"compress": "dgc", "compress_args": SPARSE},
    "local SGD 8": {"local_sgd": 8},
    "local SGD 8, bf16": {"local_sgd": 8, "reduce_dtype": "bf16"},
    "local SGD 8 after a quarter": {"local_sgd": 8},
    "local SGD, adaptive": {"local_sgd": 8, "local_sgd_args": {"adaptive": True}},
    "local SGD 8, outer momentum": {"local_sgd": 8, "local_sgd_args": {"outer_lr": 0.7, "outer_momentum": 0.9}},
}
FORMS = {  # of a fused head's weight and momentum
    "separate optimizer": {},
    "fused, fp32": {"fused": True},
    "split weight, bf16 momentum": {"fused": True, "weight_dtype": "split", "state_dtype": "bf16"},
    "split weight, bf16 momentum, bf16 products": {
        "fused": True,
        "weight_dtype": "split",
        "state_dtype": "bf16",
        "product_dtype": "bf16",
    },
    "fp32 weight, int8 momentum": {"fused": True, "state_dtype": "int8"},
    "bf16 weight, bf16 momentum": {"fused": True, "weight_dtype": "bf16", "state_dtype": "bf16"},
    "bf16 weight, int8 momentum": {"fused": True, "weight_dtype": "bf16", "state_dtype": "int8"},
}
SMOKE = ("averaged, fp32", "DGC 1 %", "local SGD 8, bf16")


def faces(train: str, val: str, pairs: str) -> Config:
    """The recipe `faces`, smaller."""
    recipe = load_recipe("faces")
    data = replace(recipe.data, path=train, image_size=32, crop=2)
    evaluation = replace(recipe.eval, path=val, pairs=pairs, every=0)
    return replace(recipe, data=data, eval=evaluation, log_every=10_000, save_every=0, export=False, keep=1)


def asked(task: Config, name: str, steps: int) -> Config:
    """The task in one way, or with one form of the head."""
    if name in FORMS:
        return replace(task, head=replace(task.head, **FORMS[name]))
    options = dict(WAYS[name])
    if name.startswith("DGC") and "warm-up" in name:
        options["compress_args"] = SPARSE | {"warmup_steps": steps // 4}
    if name.endswith("after a quarter"):
        options["local_sgd_args"] = {"begin": steps // 4}
    return replace(task, strategy=Strategy(**options))


def train(config: Config, ranks: int) -> tuple[float, float]:
    """Verification accuracy and the loss of the last tenth of the steps."""

    def body(comm: Any) -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            folder = comm.gather_objects(folder)[0]
            trainer = Trainer(replace(config, out=folder), comm=comm)
            losses: list[float] = []
            step = trainer.fleet.step

            def noting(loss: Any, optimizer: Any) -> Any:
                losses.append(float(loss.detach()))
                return step(loss, optimizer)

            trainer.fleet.step = noting  # type: ignore[method-assign]
            trainer.fit()
            accuracy = float(trainer.evaluate()["accuracy"])
            trainer.close()
            last = torch.tensor(statistics.mean(losses[-max(1, len(losses) // 10) :]))
            comm.barrier()
            return accuracy, float(comm.all_reduce(last).wait()) / comm.world_size

    return run_ranks(ranks, body)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="accuracy of one task under each way of training together")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=[*WAYS, *FORMS])
    parser.add_argument("--heads", action="store_true", help="the forms of the head in place of the ways")
    parser.add_argument("--faces", nargs=3, metavar=("TRAIN", "VAL", "PAIRS"), help="the recipe faces as the task")
    parser.add_argument("--smoke", action="store_true", help="one epoch, one seed, three ways")
    args = parser.parse_args()
    if args.smoke:
        args.epochs, args.seeds, args.ways = 1, 1, list(SMOKE)
    if args.heads and args.ways == list(WAYS):
        args.ways = list(FORMS)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    task = faces(*args.faces) if args.faces else TASK
    data = build_data(task.data, seed=0)
    steps = len(data) // task.batch_size
    print(f"{data.num_classes} classes, {len(data)} images, {args.ranks} ranks, {args.epochs} epochs of {steps} steps,")
    print(f"{args.seeds} seeds, torch {torch.__version__}\n")
    print(
        "| | accuracy % | spread | against the first, points | last loss | s |\n|---|---|---|---|---|---|", flush=True
    )
    first: float | None = None
    for name in args.ways:
        start = time.perf_counter()
        ask = replace(asked(task, name, args.epochs * steps), epochs=args.epochs)
        found = [train(replace(ask, seed=seed), args.ranks) for seed in range(args.seeds)]
        accuracies = [100 * accuracy for accuracy, _ in found]
        mean = statistics.mean(accuracies)
        first = mean if first is None else first
        spread = f"{min(accuracies):.2f}-{max(accuracies):.2f}"
        loss = statistics.mean(loss for _, loss in found)
        took = time.perf_counter() - start
        print(f"| {name} | {mean:.2f} | {spread} | {mean - first:+.2f} | {loss:.3f} | {took:.0f} |", flush=True)


if __name__ == "__main__":
    main()
