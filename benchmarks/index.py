"""Opens an index of 40 million images of 2 million people and shuffles it: seconds, memory; no image is there to read.

    python benchmarks/index.py                        # what the loader costs at that size, 3 minutes
    python benchmarks/index.py --images 4000000       # smaller

The record file is sparse: headers stand in it and nothing else, 64 bytes a record, so that it takes 3 GB of disk where
a real one takes 200. The first opening reads every header and keeps the index in a cache (`RecordIO(..., cache=)`), the
second maps that. Each part runs in a process of its own, which tells the most memory of its own that it held (RssAnon,
looked at every 20 ms), and the most with the pages of files that it had mapped, which the system takes back at will.
"""

import argparse
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RECORD = 64  # bytes: a part's head, the payload's header, 24 bytes of nothing for an image, 8 of padding
CHUNK = 2**20


def write(folder: Path, images: int, classes: int) -> None:
    """A record file with classes drawn at random and images of zeros, and its index."""
    rng = np.random.default_rng(0)
    head = struct.pack("<4sI", bytes.fromhex("0a23d7ce"), RECORD - 8)
    with open(folder / "train.rec", "wb") as records, open(folder / "train.idx", "wb") as index:
        for start in range(0, images, CHUNK):
            count = min(CHUNK, images - start)
            block = np.zeros((count, RECORD), np.uint8)
            block[:, :8] = np.frombuffer(head, np.uint8)
            block[:, 12:16] = rng.integers(0, classes, count).astype("<f4").view(np.uint8).reshape(count, 4)
            records.write(block.tobytes())
            keys = range(start, start + count)
            index.write(b"".join(b"%d\t%d\n" % (key, key * RECORD) for key in keys))


PART = """
import logging, sys, threading, time
sys.path[:0] = {path!r}
start = time.perf_counter()
import numpy as np
from plsc.data import Loader, RecordIO
logging.disable(logging.WARNING)
def status():
    return dict(line.split(":", 1) for line in open("/proc/self/status"))
def held(name):
    return int(status()[name].split()[0]) / 2**10
def watch():
    while True:
        seen.append(held("RssAnon"))
        time.sleep(0.02)
before, begun, cpu = held("RssAnon"), time.perf_counter(), time.process_time()
seen = [before]
threading.Thread(target=watch, daemon=True).start()
{work}
print(f"{name}: {{time.perf_counter() - begun:.1f}} s ({{time.process_time() - cpu:.1f}} s of processor time), "
      f"{{held('RssAnon') - before:.0f}} MiB held, {{max(seen) - before:.0f}} at most, "
      f"{{held('VmHWM'):.0f}} with mapped pages{extra}")
"""

OPEN = "data = RecordIO({folder!r}, cache={folder!r} + '/index.npy')"
NEXT = """
from plsc.data.order import BalancedOrder, Order
data = RecordIO({folder!r}, cache={folder!r} + '/index.npy')
begun, cpu, before = time.perf_counter(), time.process_time(), held("RssAnon")
order = {order}
steps = 0
for epoch, samples in order:
    steps += 1
    if steps == 1000:
        break
"""


def run(name: str, work: str, folder: Path, extra: str = "") -> None:
    code = PART.format(
        path=[str(Path(__file__).parents[1])], work=work.format(folder=str(folder)), name=name, extra=extra
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="an index of 40 million images: seconds and memory")
    parser.add_argument("--images", type=int, default=40_000_000)
    parser.add_argument("--classes", type=int, default=2_000_000)
    parser.add_argument("--folder", help="where the files are kept (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "train.idx").exists():
            start = time.perf_counter()
            write(folder, args.images, args.classes)
            print(
                f"written in {time.perf_counter() - start:.0f} s: {os.path.getsize(folder / 'train.rec') / 1e9:.1f} GB"
            )
        (folder / "index.npy").unlink(missing_ok=True)
        run("first opening, every header read", OPEN, folder)
        run("opening from the cache", OPEN, folder)
        shuffled = NEXT.replace("{order}", "Order(len(data), 1024, 0, 1, 0)")
        run("1,000 shuffled batches of 1,024", shuffled, folder)
        balanced = NEXT.replace("{order}", "BalancedOrder(data.labels, 1024, 0, 1, 0, per_class=4)")
        run("1,000 batches of 256 classes with 4 images each", balanced, folder)


if __name__ == "__main__":
    main()
