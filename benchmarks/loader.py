"""Compares the loader with bare decoding: images a second of processor time, on the same JPEG files.

    python benchmarks/loader.py                      # 2,000 files of 112 x 112 made on the spot
    python benchmarks/loader.py --folder DIR         # your own DIR/NAME/*.jpg
    python benchmarks/loader.py --containers list rec tar parquet     # the same images in other containers too

Bare: each file is read, decoded and mirrored, by Pillow (numpy takes the pixels) and, where it is installed, by
simplejpeg and numpy: the decoder that the loader then uses too. Loader: one worker process, random mirror,
batches shipped to this process and normalised to float32. Its time is that of both processes; that of the worker alone
is shown too, since for a GPU the floats are made there and this process has next to nothing to do. Rounds alternate
and medians are compared.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from plsc.data import Augment, Dataset, ImageFolder, Loader, Synthetic, convert, open_images

TARGETS = {"list": "x.txt", "rec": "x.rec", "tar": "x.tar", "parquet": "x.parquet"}


def make_jpegs(folder: Path, count: int) -> None:
    """Smooth pictures of 112 x 112, about 4 kB each, as aligned faces are."""
    source = Synthetic(count, max(1, count // 20), image_size=28)
    for i in range(count):
        image, label = source[i]
        (folder / f"{label:05d}").mkdir(exist_ok=True)
        smooth = Image.fromarray(image).resize((112, 112), Image.Resampling.BICUBIC)
        smooth.save(folder / f"{label:05d}" / f"{i:06d}.jpg", quality=86)


def processor_seconds() -> tuple[float, float]:
    """Of this process and its ended children, and of the children alone."""
    times = os.times()
    children = times.children_user + times.children_system
    return times.user + times.system + children, children


def time_bare(paths: list[str]) -> float:
    start, _ = processor_seconds()
    for path in paths:
        np.asarray(Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    return len(paths) / (processor_seconds()[0] - start)


def time_simplejpeg(paths: list[str]) -> float:
    import simplejpeg

    start, _ = processor_seconds()
    for path in paths:
        with open(path, "rb") as file:
            pixels = simplejpeg.decode_jpeg(file.read())
        np.ascontiguousarray(pixels[:, ::-1])
    return len(paths) / (processor_seconds()[0] - start)


def time_loader(dataset: Dataset, batch_size: int, workers: int, epochs: int) -> tuple[float, float]:
    """Images a second of all processor time, and of the workers' alone (inf without workers)."""
    start, start_children = processor_seconds()
    loader = Loader(dataset, batch_size, transform=Augment(), workers=workers)
    images = 0
    for batch, _ in loader.epochs(epochs):
        images += len(batch)
    loader.close()
    end, end_children = processor_seconds()
    return images / (end - start), images / max(end_children - start_children, 1e-9) if workers else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description="images a second of processor time: loader against bare decoding")
    parser.add_argument("--folder", help="DIR/NAME/*.jpg to read (default: made on the spot)")
    parser.add_argument("--containers", nargs="*", default=[], choices=TARGETS)
    parser.add_argument("--images", type=int, default=2000, help="how many to make")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the files a round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as packed:
        if args.folder is None:
            make_jpegs(Path(scratch), args.images)
        dataset = ImageFolder(args.folder or scratch)
        paths = [os.path.join(dataset.root, dataset.name(i)) for i in range(len(dataset))]
        size = np.mean([os.path.getsize(path) for path in paths])
        print(f"{len(paths)} files of {size / 1000:.1f} kB, batches of {args.batch_size}, {args.workers} worker(s)")
        sets: dict[str, Dataset] = {"folder": dataset}
        for kind in args.containers:
            target = os.path.join(packed, TARGETS[kind])
            convert(dataset, target)
            sets[kind] = open_images(target)
        pillow, turbo = [], []
        loader: dict[str, list[float]] = {kind: [] for kind in sets}
        worker: dict[str, list[float]] = {kind: [] for kind in sets}
        for _ in range(args.rounds):
            pillow.append(time_bare(paths * args.epochs))
            if importlib.util.find_spec("simplejpeg"):
                turbo.append(time_simplejpeg(paths * args.epochs))
            for kind, each in sets.items():
                both, alone = time_loader(each, args.batch_size, args.workers, args.epochs)
                loader[kind].append(both)
                worker[kind].append(alone)
    print("images a second of processor time, median of rounds (range), and as a share of each bare decoder")
    base = [statistics.median(rates) for rates in (pillow, turbo) if rates]
    rows = [("pillow", pillow), ("simplejpeg", turbo)]
    for kind in sets:
        rows += [(f"{kind}: loader", loader[kind]), (f"{kind}: worker", worker[kind])]
    for name, rates in rows:
        if rates:
            rate = statistics.median(rates)
            shares = ", ".join(f"{rate / other:.2f}" for other in base)
            print(f"{name:16}{rate:8.0f} ({min(rates):.0f} to {max(rates):.0f})   {shares}")


if __name__ == "__main__":
    main()
