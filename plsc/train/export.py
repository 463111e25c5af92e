"""What leaves the library: embeddings and class centres as safetensors, with the digest of the model they are of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from plsc.comm import CommError, Communicator, Shard
from plsc.data.embeddings import EmbeddingFile, atomic_file, name_tensors, read_embeddings, write_safetensors
from plsc.train.export_model import (
    check_contract,
    export_onnx,
    export_program,
    export_weights,
    model_digest,
    plsc_version,
)

__all__ = [
    "EmbeddingFile",
    "atomic_file",
    "check_contract",
    "export_blocks",
    "export_centres",
    "export_embeddings",
    "export_head_centres",
    "export_onnx",
    "export_program",
    "export_weights",
    "gather_centres",
    "model_digest",
    "read_embeddings",
    "unit_rows",
]

BLOCK_ROWS = 65_536  # rows that are normalised, sent and written at once

Floats32 = NDArray[np.float32]
Array = NDArray[Any]


class SplitHead(Protocol):
    """What an export of centres needs of a head: its rows of all classes, which they are, and who has the others."""

    shard: Shard
    comm: Communicator

    @property
    def weight(self) -> Tensor:
        """[C_local, D] or [C_local, K, D]."""
        ...


def export_embeddings(
    path: str | Path,
    embeddings: ArrayLike,
    *,
    labels: ArrayLike,
    digest: str,
    ids: ArrayLike | None = None,
    names: Sequence[str] | None = None,
    normalize: bool = True,
) -> Path:
    """Writes embeddings [N, D] with their labels [N], ids [N] (row numbers unless given), names and the model's digest.

    Unit length unless normalize=False; `norms` keeps the lengths from before. Raises ValueError for embeddings that are
    not finite, or have no direction.
    """
    rows = np.asarray(embeddings)
    if rows.ndim != 2:
        raise ValueError(f"embeddings: got shape {rows.shape}, expected [N, D]")
    blocks = (rows[start : start + BLOCK_ROWS] for start in range(0, len(rows), BLOCK_ROWS))
    numbers = np.arange(len(rows)) if ids is None else np.asarray(ids)
    _write(
        path,
        blocks,
        rows.shape,
        kind="embeddings",
        labels=np.asarray(labels),
        ids=numbers,
        names=names,
        digest=digest,
        normalize=normalize,
    )
    return Path(path)


def export_blocks(
    path: str | Path,
    blocks: Iterable[Array],
    *,
    shape: tuple[int, int],
    labels: Array,
    digest: str,
    names: Sequence[str] | None = None,
    about: Mapping[str, str] | None = None,
) -> Path:
    """The same of rows that come in blocks [n, D], in order, `shape` in all: one block is held at a time.

    about: further metadata.
    """
    _write(
        path,
        blocks,
        shape,
        kind="embeddings",
        labels=labels,
        ids=np.arange(shape[0]),
        names=names,
        digest=digest,
        normalize=True,
        about=about,
    )
    return Path(path)


def export_centres(
    path: str | Path,
    centres: Tensor | NDArray[np.generic],
    *,
    digest: str,
    class_names: Sequence[str] | None = None,
) -> Path:
    """Writes class centres [C, D], or [C, K, D] with K sub-centres a class, at unit length, labels 0 to C - 1.

    The centres are whole in this process; export_head_centres takes those of a head that is spread over ranks.
    """
    rows = centres.detach().float().cpu().numpy() if isinstance(centres, Tensor) else np.asarray(centres)
    if rows.ndim not in (2, 3):
        raise ValueError(f"centres: got shape {rows.shape}, expected [C, D] or [C, K, D]")
    blocks = (rows[start : start + BLOCK_ROWS] for start in range(0, len(rows), BLOCK_ROWS))
    _write_centres(path, blocks, rows.shape, digest=digest, class_names=class_names)
    return Path(path)


def export_head_centres(
    path: str | Path, head: SplitHead, *, digest: str, class_names: Sequence[str] | None = None
) -> Path:
    """Writes the class centres of a head spread over ranks, as export_centres does; collective.

    Rank 0 writes, and holds one block of rows at a time. An error there is raised on all ranks.
    """
    blocks = gather_centres(head, block=BLOCK_ROWS)
    failure: Exception | None = None
    if head.comm.rank == 0:
        shape = (head.shard.total, *head.weight.shape[1:])
        try:
            _write_centres(path, blocks, shape, digest=digest, class_names=class_names)
        except Exception as error:  # the other ranks still send: their blocks are taken, then all hear of it
            failure = error
    for _ in blocks:
        pass
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    message = head.comm.gather_objects(message)[0]
    if failure is not None:
        raise failure
    if message is not None:
        raise CommError(f"export failed on rank 0: {message}")
    return Path(path)


def gather_centres(head: SplitHead, *, block: int = BLOCK_ROWS) -> Iterator[Floats32]:
    """The rows of a head spread over ranks, in class order, as blocks [n, D] or [n, K, D] on rank 0; collective.

    Every rank must run the iterator to its end; the others get empty blocks. Rows are as they are, not normalised.
    """
    weight, comm = head.weight.detach(), head.comm
    read = getattr(head, "rows", lambda start, stop: weight[start:stop])  # a weight may be kept in fewer bits
    for source, size in enumerate(head.shard.sizes()):
        for start in range(0, size, block):
            count = min(block, size - start)
            mine = read(start, start + count) if comm.rank == source else read(0, 0)
            if source != 0:  # rank 0 has its own
                send, receive = [0] * comm.world_size, [0] * comm.world_size
                send[0] = len(mine)
                receive[source] = count if comm.rank == 0 else 0
                mine = comm.all_to_all(mine, send_sizes=send, recv_sizes=receive).wait()
            yield (mine if comm.rank == 0 else mine[:0]).float().cpu().numpy()


def _write_centres(
    path: str | Path,
    blocks: Iterable[Array],
    shape: tuple[int, ...],
    *,
    digest: str,
    class_names: Sequence[str] | None,
) -> None:
    ids = np.arange(shape[0])
    _write(path, blocks, shape, kind="centres", labels=ids, ids=ids, names=class_names, digest=digest, normalize=True)


def _write(
    path: str | Path,
    blocks: Iterable[Array],
    shape: tuple[int, ...],
    *,
    kind: str,
    labels: Array,
    ids: Array,
    names: Sequence[str] | None,
    digest: str,
    normalize: bool,
    about: Mapping[str, str] | None = None,
) -> None:
    """Writes one file of embeddings; `blocks` are its rows in order and are taken one at a time."""
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"digest: got {digest!r}, expected the 64 hex digits of model_digest(backbone)")
    for what, column in (("labels", labels), ("ids", ids)):
        if column.shape != shape[:1] or not np.issubdtype(column.dtype, np.integer):
            raise ValueError(f"{what}: got {column.dtype} of shape {column.shape}, expected integers [{shape[0]}]")
    norms = np.empty(shape[:-1], dtype=np.float32)
    tensors: list[tuple[str, str, tuple[int, ...], Iterable[Array]]] = [  # widest type first: all stay aligned
        ("labels", "int64", shape[:1], [labels]),
        ("ids", "int64", shape[:1], [ids]),
    ]
    blob = None
    if names is not None:
        if len(names) != shape[0]:
            raise ValueError(f"names: got {len(names)}, expected {shape[0]}, one a row")
        offsets, blob = name_tensors(names)
        tensors.append(("name_offsets", "int64", offsets.shape, [offsets]))
    tensors.append(("embeddings", "float32", shape, unit_rows(blocks, norms, normalize=normalize)))
    tensors.append(("norms", "float32", norms.shape, [norms]))  # full once the rows before it are written
    if blob is not None:
        tensors.append(("names", "uint8", blob.shape, [blob]))
    metadata = {
        "format": f"plsc-{kind}",
        "format_version": "1",
        "plsc_version": plsc_version(),
        "model_digest": digest,
        "normalized": "true" if normalize else "false",
        "num_rows": str(shape[0]),
        "embedding_size": str(shape[-1]),
        "sub_centers": str(shape[1] if len(shape) == 3 else 1),
        **(about or {}),
    }
    write_safetensors(path, tensors, metadata)


def unit_rows(blocks: Iterable[Array], norms: Floats32, *, normalize: bool = True) -> Iterator[Floats32]:
    """Blocks of rows at unit length (or as they are), their lengths noted in `norms`."""
    done = 0
    for block in blocks:
        rows = block.astype(np.float64)
        lengths = np.linalg.norm(rows, axis=-1)  # [n] or [n, K]
        bad = np.flatnonzero(~np.isfinite(lengths).reshape(len(rows), -1).all(axis=-1))
        if normalize and bad.size == 0:
            bad = np.flatnonzero((lengths == 0).reshape(len(rows), -1).any(axis=-1))
        if bad.size:
            raise ValueError(f"embeddings: row {done + bad[0]} is zero or not finite, expected a direction in each row")
        norms[done : done + len(rows)] = lengths
        done += len(rows)
        yield (rows / lengths[..., None] if normalize else rows).astype(np.float32)
