"""Click prediction: AUC on held-out rows, samples a second beside plain torch, rows a second of the readers.

    python benchmarks/ctr.py quality SET/ctr.toml ... [--seeds 3]     # as datasets/*/prepare.py write them
    python benchmarks/ctr.py quality --folds 5 SET/ctr.toml ...       # each line is held out once
    python benchmarks/ctr.py speed [--steps 200] [--rounds 5]
    python benchmarks/ctr.py reader [--rows 200000] [--rounds 3]

quality: DeepFM with the recipe's settings and logistic regression on the same rows; mean and range over seeds (of the
means over folds, which are drawn by line). speed:
the same DeepFM, batches from memory, rows in the table (1 and 2 threads) and in nn.Embedding with sparse gradients and
Adagrad; contenders take turns, medians of wall and processor time. reader: a Criteo-like file
read by Clicks into batches of hashed ids, by pyarrow's CSV reader into columns, and line by line in Python.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from plsc.data import CRITEO, Clicks
from plsc.data.click_formats import Hasher, parse_lines, split_lines
from plsc.models import DeepFM
from plsc.ps import SparseEmbedding, Table
from plsc.train import ctr
from plsc.train.config import from_dict, read_recipe
from plsc.train.ctr_config import CtrConfig


def quality(args: argparse.Namespace) -> None:
    print("| recipe | model | AUC | range | AUC within groups | log loss |\n|---|---|---|---|---|---|")
    for recipe in args.recipes:
        base = from_dict(CtrConfig, read_recipe(recipe), where=recipe)
        for name in ("logistic", base.model.name):
            found = []
            for seed in range(args.seeds):
                with tempfile.TemporaryDirectory() as out:
                    config = replace(base, seed=seed, out=out, export=False, model=replace(base.model, name=name))
                    found.append(mean_of_folds(config, args.folds) if args.folds else ctr.train(config))
            aucs = [result["auc"] for result in found]
            within = np.mean([result.get("group_auc", np.nan) for result in found])
            loss = np.mean([result["log_loss"] for result in found])
            line = f"{np.mean(aucs):.4f} | {min(aucs):.4f}-{max(aucs):.4f} | {within:.4f} | {loss:.4f}"
            print(f"| {Path(recipe).parent.name} | {name} | {line} |", flush=True)


def mean_of_folds(config: CtrConfig, folds: int) -> dict[str, float]:
    """Trains once for each fold of the recipe's lines, which that training is tested on; the folds are no seed's."""
    lines = [line for path in config.data.train for line in Path(path).read_bytes().splitlines(keepends=True)]
    fold_of, found = np.random.default_rng(0).integers(0, folds, len(lines)), []
    for fold in range(folds):
        paths = [Path(config.out) / f"{kind}-{fold}.tsv" for kind in ("train", "test")]
        for path, here in zip(paths, (fold_of != fold, fold_of == fold), strict=True):
            path.write_bytes(b"".join(line for line, kept in zip(lines, here, strict=True) if kept))
        data = replace(config.data, train=(str(paths[0]),), test=(str(paths[1]),))
        found.append(ctr.train(replace(config, data=data, out=f"{config.out}/{fold}")))
    return {name: float(np.mean([result[name] for result in found])) for name in found[0]}


SLOTS, DENSE, FACTORS, BATCH, IDS = 26, 13, 16, 4096, 1_000_000


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Zipf(1.05) ids, every slot with a range of its own; half of the rows clicked."""
    random = np.random.default_rng(0)
    cumulative = np.cumsum(np.arange(1, IDS // SLOTS + 1, dtype=np.float64) ** -1.05)
    made = []
    for _ in range(count):
        ids = np.searchsorted(cumulative, random.random((BATCH, SLOTS)) * cumulative[-1])
        ids += np.arange(SLOTS) * (IDS // SLOTS)
        dense = random.standard_normal((BATCH, DENSE), np.float32)
        made.append(
            (
                torch.from_numpy(dense),
                torch.from_numpy(ids),
                torch.from_numpy(random.integers(0, 2, BATCH) * np.float32(1)),
            )
        )
    return made


def trainer(kind: str, threads: int) -> Callable[[list], None]:
    """Trains on a list of batches; `threads` models share their weights."""
    torch.manual_seed(0)
    table = Table(1 + FACTORS, rule="adagrad", lr=0.05)
    embedding = nn.Embedding(IDS, 1 + FACTORS, sparse=kind == "torch, sparse")

    def model() -> DeepFM:
        sparse = SparseEmbedding(table, pooling="none") if kind == "table" else embedding
        return DeepFM(sparse, num_slots=SLOTS, num_dense=DENSE)

    models = [model() for _ in range(threads)]
    for other in models[1:]:
        for mine, shared in zip(other.parameters(), models[0].parameters(), strict=True):
            mine.data = shared.data
    rows = [] if kind == "table" else [torch.optim.Adagrad(embedding.parameters(), lr=0.05)]
    steps = [[torch.optim.Adam([p for n, p in m.named_parameters() if "sparse" not in n]), *rows] for m in models]

    def work(i: int, some: list) -> None:
        for dense, ids, clicked in some[i::threads]:
            loss = F.binary_cross_entropy_with_logits(models[i](dense, ids), clicked)
            for optimizer in steps[i]:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in steps[i]:
                optimizer.step()

    def run(some: list) -> None:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work, i, some) for i in range(threads)]:
                done.result()

    return run


def speed(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    made = batches(args.steps // args.rounds)
    contenders = {
        "table, 1 thread": trainer("table", 1),
        "table, 2 threads": trainer("table", 2),
        "torch, sparse gradients, Adagrad": trainer("torch, sparse", 1),
    }
    show(
        contenders,
        {name: lambda run=run: run(made) for name, run in contenders.items()},
        args.rounds,
        BATCH * len(made),
    )


def reader(args: argparse.Namespace) -> None:
    import pyarrow.csv

    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "day"
        numbers = random.geometric(0.02, (args.rows, 13))
        tokens = random.zipf(1.2, (args.rows, 26)) % 100_000
        table = np.concatenate([random.integers(0, 2, (args.rows, 1)), numbers, tokens], axis=1)
        np.savetxt(path, table, fmt="\t".join(["%d"] * 14 + ["%08x"] * 26))
        options = pyarrow.csv.ReadOptions(use_threads=False, autogenerate_column_names=True)
        tabs = pyarrow.csv.ParseOptions(delimiter="\t")
        warm = Clicks(path, CRITEO)
        work = {
            "Clicks": lambda: sum(len(clicked) for _, _, clicked in warm),
            "Clicks, first pass": lambda: sum(len(clicked) for _, _, clicked in Clicks(path, CRITEO)),
            "pyarrow.csv.read_csv, no hashing": lambda: pyarrow.csv.read_csv(path, options, tabs),
            "line by line": lambda: parse_lines(CRITEO, split_lines(path.read_bytes()), Hasher(26, slots=True)),
        }
        show(work, work, args.rounds, args.rows)


def show(names: dict, work: dict[str, Callable[[], object]], rounds: int, samples: int) -> None:
    """Medians over rounds in which all take turns; the first round is not counted."""
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names:
            start, spent = time.perf_counter(), time.process_time()
            work[name]()
            if turn:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - spent)
    print("| | rows/s | range | rows / CPU-second |\n|---|---|---|---|")
    for name in names:
        rates = samples / np.array(wall[name])
        print(
            f"| {name} | {np.median(rates):,.0f} | {rates.min():,.0f}-{rates.max():,.0f} | "
            f"{samples / np.median(cpu[name]):,.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("quality")
    command.add_argument("recipes", nargs="+")
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--folds", type=int, default=0, help="of all lines, instead of the recipe's held-out part")
    command = commands.add_parser("speed")
    command.add_argument("--steps", type=int, default=200)
    command.add_argument("--rounds", type=int, default=5)
    command = commands.add_parser("reader")
    command.add_argument("--rows", type=int, default=200_000)
    command.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    {"quality": quality, "speed": speed, "reader": reader}[args.command](args)


if __name__ == "__main__":
    main()
