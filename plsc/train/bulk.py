"""Embeddings of a whole data set in pieces: shared out over ranks, kept on disk as they are made, joined at the end.

The pieces depend on the data set alone, not on the number of ranks: a run that was ended goes on with those that are
missing, on as many ranks as it likes, and the file it writes is the same to the bit.
"""

import hashlib
import json
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from plsc.comm import Communicator, together
from plsc.data.convert import Encoded
from plsc.data.embeddings import atomic_file, map_safetensors
from plsc.data.parquet import EmbeddingWriter, read_metadata
from plsc.data.pipeline import Pipeline
from plsc.train.evaluate import _embed_batch, _precision, evaluating, unwrapped
from plsc.train.export import export_blocks, model_digest, unit_rows

logger = logging.getLogger(__name__)

PIECE_ROWS = 4_096
COMPARED = 256  # samples by which data sets are told apart

Floats32 = NDArray[np.float32]
Progress = Callable[[int, int], None]


def embed_to_file(
    backbone: nn.Module,
    data: Encoded,
    target: str | Path,
    *,
    source: str,
    comm: Communicator,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    flip: bool = True,
    autocast: torch.dtype | None = None,
    workers: int = 0,
    progress: Progress | None = None,
    piece_rows: int = PIECE_ROWS,
    overwrite: bool = False,
) -> Path:
    """Writes unit embeddings of a data set in its order: .safetensors (as export_embeddings) or .parquet; collective.

    Pieces lie in `target`.parts, a folder that all ranks see, until the file is whole; of a run that goes on, those
    whose images have changed are made again. A whole file of this model and
    data stays as it is; anything else at `target` is refused, or replaced with `overwrite`. source: what messages call
    the data. progress: rank 0's images. ValueError: an image that cannot be read, an embedding without a direction.
    """
    target, digest, about = Path(target), model_digest(backbone), dict[str, str]()
    pieces = _Pieces(Path(f"{target}.parts"), len(data), piece_rows)

    def begin() -> bool:
        """Whether there is anything to do; then the folder is there, with pieces of this plan or none."""
        about.update(data_digest=data_digest(data), flip=str(flip).lower(), autocast=str(autocast))
        if not overwrite and _is_complete(target, {"model_digest": digest, **about}):
            return False
        pieces.begin({"digest": digest, **about, "batch_size": batch_size, "piece_rows": piece_rows})
        return True

    if not together(comm, f"begin {target}", lambda: comm.rank == 0 and begin())[0]:
        if comm.rank == 0:
            logger.info("complete already: %s, of this model and data; nothing was done", target)
        return target
    # Rank 0 says which pieces are there, for the others may see the folder a moment later; each looks at its share.
    there = together(comm, f"look into {pieces.folder}", lambda: pieces.there() if comm.rank == 0 else [])[0]
    mine = there[comm.rank :: comm.world_size]
    old = list(chain.from_iterable(together(comm, f"compare {source}", lambda: pieces.outdated(mine, data))))
    missing = sorted({*range(len(pieces.starts))} - {*there} | {*old})
    if comm.rank == 0 and old:
        logger.warning("%d pieces are of images that have changed since: they are made again", len(old))
    if comm.rank == 0 and len(missing) < len(pieces.starts):
        logger.info("going on: %d of %d pieces were done", len(pieces.starts) - len(missing), len(pieces.starts))

    def embed_mine() -> None:
        place = comm.device if device is None else torch.device(device)
        mine = missing[comm.rank :: comm.world_size]
        model = unwrapped(backbone)
        with evaluating(model), torch.no_grad(), _precision(place, autocast):
            _embed_pieces(
                model,
                data,
                pieces,
                mine,
                place=place,
                batch_size=batch_size,
                flip=flip,
                workers=workers,
                progress=progress,
            )

    together(comm, f"embed {source}", embed_mine)
    together(comm, f"write {target}", lambda: _join(target, pieces, data, digest, about) if comm.rank == 0 else None)
    if comm.rank == 0:
        logger.info("written: %s", target)
    return target


def data_digest(data: Encoded) -> str:
    """SHA-256 (hex) over all labels, and the names and images of 256 samples at even distances."""
    chosen = np.unique(np.linspace(0, len(data) - 1, COMPARED).astype(np.int64)).tolist()
    return _digest(data, chosen, hashlib.sha256(np.ascontiguousarray(data.labels, "<i8").data)).hex()


def _digest(data: Encoded, samples: Iterable[int], digest: Any) -> bytes:
    """Of the names and images of some samples, as they are now, after what the digest was begun with."""
    for i in samples:
        name = data.name(i)
        try:
            encoded = data.encoded(i)
        except OSError as error:
            words = f"sample {i} ({name}) cannot be read: {type(error).__name__}: {error}"
            raise ValueError(f"{words}; fetch it again") from error
        for part in (name.encode("utf-8", "surrogateescape"), encoded):
            digest.update(struct.pack("<Q", len(part)) + part)
    found: bytes = digest.digest()
    return found


def _is_complete(target: Path, about: Mapping[str, str]) -> bool:
    """Whether the file is there already, with this in its metadata. ValueError for any other."""
    if not os.path.lexists(target):
        return False
    try:
        found = read_metadata(target) if target.suffix == ".parquet" else map_safetensors(target)[1]
    except (ValueError, OSError):
        found = {}
    what = {"model_digest": "of another model", "data_digest": "of other data"}
    differs = [what.get(key, f"with {key} {found.get(key)}") for key in about if found.get(key) != about[key]]
    if not differs:
        return True
    got = f"embeddings {', '.join(differs)}" if "data_digest" in found else "a file that plsc-embed has not written"
    raise ValueError(
        f"{target}: got {got}, expected none, or those of this model and data; give another --out, or --overwrite to "
        "replace it"
    )


class _Pieces:
    """Runs of rows in files of a folder, each there when it is whole."""

    def __init__(self, folder: Path, samples: int, rows: int) -> None:
        self.folder = folder
        self.starts = range(0, samples, rows)
        self._samples, self._rows = samples, rows

    def range_of(self, piece: int) -> range:
        return range(self.starts[piece], min(self.starts[piece] + self._rows, self._samples))

    def begin(self, plan: dict[str, Any]) -> None:
        """Makes the folder, empty unless it was begun with the same plan."""
        path = self.folder / "plan.json"
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before == plan:
                return
            changed = ", ".join(sorted(key for key in plan if before.get(key) != plan[key]))
            logger.warning("%s: pieces of another %s are thrown away", self.folder, changed)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        with atomic_file(path) as file:
            file.write(json.dumps(plan).encode())

    def there(self) -> list[int]:
        done = set(os.listdir(self.folder))
        return [piece for piece in range(len(self.starts)) if self._path(piece).name in done]

    def outdated(self, some: Sequence[int], data: Encoded) -> list[int]:
        """Those whose names and images are no longer what they were made of: reads all of these, decodes none."""
        return [piece for piece in some if self._read(piece)[1] != self.digest(piece, data)]

    def digest(self, piece: int, data: Encoded) -> bytes:
        return _digest(data, self.range_of(piece), hashlib.sha256())

    def write(self, piece: int, rows: Floats32, digest: bytes) -> None:
        with atomic_file(self._path(piece)) as file:
            np.save(file, rows, allow_pickle=False)
            file.write(digest)

    def read(self) -> Iterator[Floats32]:
        for piece in range(len(self.starts)):
            yield self._read(piece)[0]

    def _read(self, piece: int) -> tuple[Floats32, bytes]:
        with self._path(piece).open("rb") as file:
            rows: Floats32 = np.load(file, allow_pickle=False)
            return rows, file.read()

    def _path(self, piece: int) -> Path:
        return self.folder / f"{piece:06d}.npy"


def _embed_pieces(
    model: nn.Module,
    data: Encoded,
    pieces: _Pieces,
    mine: Sequence[int],
    *,
    place: torch.device,
    batch_size: int,
    flip: bool,
    workers: int,
    progress: Progress | None,
) -> None:
    """Embeds this rank's pieces; no batch reaches over the end of one, so that each is the same whoever makes it."""
    ranges = [pieces.range_of(piece) for piece in mine]
    items = [
        (0, np.arange(at, min(at + batch_size, rows.stop)))
        for rows in ranges
        for at in range(rows.start, rows.stop, batch_size)
    ]
    if not items:
        return
    source = Pipeline(data, items, ranges[0].start, batch_size, place, workers=min(workers, len(items)))
    try:
        batches, done = iter(source), 0
        for piece, rows in zip(mine, ranges, strict=True):
            found: list[Floats32] = []
            digest = pieces.digest(piece, data)  # before they are decoded: what changes meanwhile is made again
            while sum(map(len, found)) < len(rows):
                images, _ = next(batches)
                found.append(_embed_batch(model, images, flip=flip).cpu().numpy())
                done += len(images)
                if progress is not None:
                    progress(done, sum(map(len, ranges)))
            whole = np.concatenate(found)
            norms = np.linalg.norm(whole.astype(np.float64), axis=1)
            bad = np.flatnonzero(~np.isfinite(norms) | (norms == 0))
            if bad.size:
                i = rows.start + int(bad[0])
                raise ValueError(
                    f"sample {i} ({data.name(i)}): its embedding is zero or not finite, expected a direction; "
                    "has the model diverged? try an earlier checkpoint"
                )
            pieces.write(piece, whole, digest)
    finally:
        source.close()


def _join(target: Path, pieces: _Pieces, data: Encoded, digest: str, about: Mapping[str, str]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    first = next(pieces.read())
    shape = (len(data), first.shape[1])
    names, labels = _Names(data), np.asarray(data.labels)
    if target.suffix == ".parquet":
        done, norms = 0, np.empty(shape[0], np.float32)
        with EmbeddingWriter(target, shape[1], digest=digest, about=about) as writer:
            for rows in unit_rows(pieces.read(), norms):
                part = slice(done, done + len(rows))
                writer.write(np.arange(part.start, part.stop), rows, norms[part], labels[part], names[part])
                done = part.stop
    else:
        export_blocks(target, pieces.read(), shape=shape, labels=labels, digest=digest, names=names, about=about)
    shutil.rmtree(pieces.folder)


class _Names(Sequence[str]):
    """The names of a data set, made when asked for."""

    def __init__(self, data: Encoded) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._data.name(i) for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"got name {index}, expected below {len(self)}")
        return self._data.name(index)
