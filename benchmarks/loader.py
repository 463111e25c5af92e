"""Compares the loader with bare decoding and with other loaders: images a second of processor time, on the same JPEGs.

    python benchmarks/loader.py                      # 2,000 files of 112 x 112 made on the spot
    python benchmarks/loader.py --folder DIR         # your own DIR/NAME/*.jpg, or a .zip of them
    python benchmarks/loader.py --containers list rec tar parquet --workers 1 2 --peers --memory

Bare: "decode" decodes bytes that lie in memory and keeps nothing, by the decoder that the loader chooses (simplejpeg
where it is installed, else Pillow); "read" reads a file before, and no more; "bytes" decodes from memory, mirrors every
other picture and puts them side by side as uint8, what any loader must do; "floats" makes float32 of them, what one on
a CPU must do (to a GPU bytes travel, and become floats there). "bare" reads the files, decodes, mirrors by numpy and
stops at bytes. Loader: worker processes, random mirror, batches as float32 in this process; its time is that of all
processes. Peers: torch's DataLoader over Pillow (a plain ImageFolder loop) and, where it is installed, webdataset over
the same tar; both mirror and make the same floats. Rounds alternate, medians are compared.
"""

import argparse
import gc
import importlib.util
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from plsc.data import Augment, Dataset, ImageFolder, Loader, RecordIO, Synthetic, convert, open_images
from plsc.data.pixels import mirror, normalise

TARGETS = {"list": "x.txt", "rec": "x.rec", "tar": "x.tar", "parquet": "x.parquet"}


def make_jpegs(folder: Path, count: int) -> None:
    """Smooth pictures of 112 x 112, about 4 kB each, as aligned faces are."""
    source = Synthetic(count, max(1, count // 20), image_size=28)
    for i in range(count):
        image, label = source[i]
        (folder / f"{label:05d}").mkdir(exist_ok=True)
        smooth = Image.fromarray(image).resize((112, 112), Image.Resampling.BICUBIC)
        smooth.save(folder / f"{label:05d}" / f"{i:06d}.jpg", quality=86)


def processor_seconds() -> float:
    """Of this process and its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def rate(images: int, work: Callable[[], object]) -> float:
    """Images a second of processor time."""
    start = processor_seconds()
    work()
    return images / (processor_seconds() - start)


def decoder() -> Callable[[bytes], np.ndarray]:
    if importlib.util.find_spec("simplejpeg"):
        import simplejpeg

        return simplejpeg.decode_jpeg
    return lambda data: np.asarray(Image.open(io.BytesIO(data)))


def decode_all(encoded: list[bytes]) -> None:
    decode = decoder()
    for data in encoded:
        decode(data)


def read_and_decode(paths: list[str]) -> None:
    """By three system calls a file, and nothing kept."""
    decode = decoder()
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        data = os.read(file, 1 << 20)
        os.close(file)
        decode(data)


def into_batches(encoded: list[bytes], batch_size: int, *, floats: bool) -> None:
    """By the loader's own two passes over pixels, and nothing else of it."""
    decode = decoder()
    batch = torch.empty((batch_size, 112, 112, 3), dtype=torch.uint8)
    made, rows = torch.empty(batch.shape), batch.numpy()
    for k, data in enumerate(encoded):
        if k % 2:
            mirror(decode(data), rows[k % batch_size])
        else:
            rows[k % batch_size] = decode(data)
        if floats and k % batch_size == batch_size - 1:
            normalise(batch, made)


def bare(paths: list[str], batch_size: int) -> None:
    decode = decoder()
    batch = np.empty((batch_size, 112, 112, 3), np.uint8)
    for k, path in enumerate(paths):
        with open(path, "rb") as file:
            pixels = decode(file.read())
        batch[k % batch_size] = pixels[:, ::-1] if k % 2 else pixels


def through(dataset: Dataset, batch_size: int, workers: int, epochs: int) -> None:
    loader = Loader(dataset, batch_size, transform=Augment(), workers=workers)
    for _ in loader.epochs(epochs):
        pass
    loader.close()


class PlainFolder(torch.utils.data.Dataset):
    """What users write: Pillow, mirror half of the time, floats as torchvision's ToTensor and Normalize make them."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        with open(self.paths[i], "rb") as file:
            return to_floats(Image.open(file).convert("RGB")), 0


def to_floats(image: Image.Image) -> torch.Tensor:
    if torch.rand(1) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.to(torch.float32).div(255).sub_(0.5).div_(0.5)


def plain_loop(paths: list[str], batch_size: int, workers: int) -> None:
    for _ in DataLoader(PlainFolder(paths), batch_size, shuffle=True, num_workers=workers, drop_last=True):
        pass


def webdataset_loop(tar: str, batch_size: int, workers: int, epochs: int) -> None:
    import webdataset

    samples = webdataset.WebDataset([tar] * max(1, workers), shardshuffle=False, empty_check=False)
    samples = samples.shuffle(1000).decode("pil").to_tuple("jpg", "cls").map_tuple(to_floats, int)
    for _ in range(epochs):
        for _ in DataLoader(samples.batched(batch_size, partial=False), None, num_workers=workers):
            pass


def resident() -> int:
    """Bytes of memory that this process and its children hold."""
    pids = [os.getpid(), *(child.pid for child in active_children())]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def watch_memory(dataset: Dataset, batch_size: int) -> Iterator[int]:
    """Memory at the end of each of 10 epochs."""
    loader = Loader(dataset, batch_size, transform=Augment(), workers=2)
    for epoch in range(1, 11):
        for _ in loader.epochs(epoch):
            pass
        gc.collect()
        yield resident()
    loader.close()


def random_access(records: RecordIO, epochs: int) -> tuple[float, float]:
    """Records a second of processor time, at random and in the order of the file; the cache is warm."""
    found = []
    orders = (np.random.default_rng(0).permutation(len(records)), np.arange(len(records)))
    for order in (*orders, *orders):  # the first time warms up
        start = time.process_time()
        for _ in range(epochs):
            for i in order.tolist():
                records.encoded(i)
        found.append(epochs * len(records) / (time.process_time() - start))
    return found[2], found[3]


def main() -> None:
    parser = argparse.ArgumentParser(description="images a second of processor time: loader, bare decoding, peers")
    parser.add_argument("--folder", help="DIR/NAME/*.jpg of 112 x 112, or a .zip (default: made on the spot)")
    parser.add_argument("--containers", nargs="*", default=[], choices=TARGETS)
    parser.add_argument("--images", type=int, default=2000, help="how many to make")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--epochs", type=int, default=5, help="passes over the files a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="a plain torch loop, and webdataset if it is installed")
    parser.add_argument("--memory", action="store_true", help="memory over 10 epochs, records at random and in order")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "folder")
        root.mkdir()
        if args.folder is None:
            make_jpegs(root, args.images)
        elif os.path.isdir(args.folder):
            root = Path(args.folder)
        else:
            root = Path(convert(open_images(args.folder), os.path.join(scratch, "unpacked")))
        measure(args, ImageFolder(root), scratch)


def measure(args: argparse.Namespace, folder: ImageFolder, scratch: str) -> None:
    paths = [os.path.join(folder.root, folder.name(i)) for i in range(len(folder))]
    encoded = [folder.encoded(i) for i in range(len(folder))]
    size = np.mean([len(each) for each in encoded])
    print(f"{len(paths)} files of {size / 1000:.1f} kB, batches of {args.batch_size}, {args.epochs} epochs a round")
    sets: dict[str, Dataset] = {"folder": folder}
    for kind in dict.fromkeys([*args.containers, *(["tar"] if args.peers else []), *(["rec"] if args.memory else [])]):
        sets[kind] = open_images(convert(folder, os.path.join(scratch, TARGETS[kind])))
    epochs, batch_size = args.epochs, args.batch_size
    whole = epochs * (len(paths) // batch_size) * batch_size
    rows: dict[str, tuple[int, Callable[[], object]]] = {
        "decode": (epochs * len(paths), lambda: decode_all(encoded * epochs)),
        "read": (epochs * len(paths), lambda: read_and_decode(paths * epochs)),
        "bytes": (epochs * len(paths), lambda: into_batches(encoded * epochs, batch_size, floats=False)),
        "floats": (epochs * len(paths), lambda: into_batches(encoded * epochs, batch_size, floats=True)),
        "bare": (epochs * len(paths), lambda: bare(paths * epochs, batch_size)),
    }
    for workers in args.workers:
        for kind in ["folder", *args.containers]:
            rows[f"{kind}, {workers}"] = (whole, lambda k=kind, w=workers: through(sets[k], batch_size, w, epochs))
        if args.peers:
            rows[f"torch loop, {workers}"] = (
                whole,
                lambda w=workers: [plain_loop(paths, batch_size, w) for _ in range(epochs)],
            )
            if importlib.util.find_spec("webdataset"):
                tar = os.path.join(scratch, TARGETS["tar"])
                rows[f"webdataset, {workers}"] = (
                    epochs * max(1, workers) * (len(paths) // batch_size) * batch_size,
                    lambda t=tar, w=workers: webdataset_loop(t, batch_size, w, epochs),
                )
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(args.rounds):
        for name, (images, work) in rows.items():
            rates[name].append(rate(images, work))
    compared = ("decode", "floats", "bare")
    print(f"what, workers: images a second of processor time, median of rounds (range); share of {', '.join(compared)}")
    base = [statistics.median(rates[name]) for name in compared]
    for name, found in rates.items():
        middle = statistics.median(found)
        shares = ", ".join(f"{middle / other:.2f}" for other in base)
        print(f"{name:16}{middle:8.0f} ({min(found):.0f} to {max(found):.0f})   {shares}")
    if args.memory:
        at_random, in_order = random_access(sets["rec"], epochs)
        print(f".rec: {at_random:.0f} records/s at random, {in_order:.0f} in order: {at_random / in_order:.2f}")
        for kind in ["folder", *args.containers]:
            held = [f"{each / 2**20:.0f}" for each in watch_memory(sets[kind], batch_size)]
            print(f"{kind}: MiB held by all processes after each of 10 epochs: {' '.join(held)}")


if __name__ == "__main__":
    main()
