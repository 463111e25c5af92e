"""What leaves the library: a backbone as ONNX, embeddings and class centres as safetensors, with the model's digest."""

import copy
import hashlib
import importlib
import io
import json
import logging
import math
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from plsc.comm import CommError, Communicator, Shard
from plsc.data.embeddings import EmbeddingFile, atomic_file, name_tensors, read_embeddings, write_safetensors
from plsc.train.evaluate import evaluating, unwrapped

if TYPE_CHECKING:
    from onnx import ModelProto

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

logger = logging.getLogger(__name__)

OPSET = 18
MAX_ONNX_BYTES = 2**31 - 2**20  # a protobuf message ends at 2 GiB
# InsightFace reads from the NAMES of the first nodes whether a model normalises its input itself, and then feeds raw
# pixels: https://github.com/deepinsight/insightface, python-package/insightface/model_zoo/arcface_onnx.py
NAME_TRAPS = ("sub", "_minus", "minus", "mul", "_mul", "div", "_div", "bn_data")
TOLERANCE = 1e-5  # greatest difference of an embedding between torch and ONNX Runtime, relative to its length
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


def model_digest(module: nn.Module) -> str:
    """SHA-256 (hex) over the names, types, shapes and bytes of the state_dict, in the order of the names.

    The same on every device and inside data-parallel wrappers; changes with any weight or statistic.
    """
    digest = hashlib.sha256()
    for name, value in sorted(unwrapped(module).state_dict().items()):
        if not isinstance(value, Tensor):
            raise ValueError(f"state_dict: got {type(value).__name__} under {name!r}, expected tensors only")
        head = json.dumps([name, str(value.dtype), list(value.shape)]).encode()
        digest.update(struct.pack("<Q", len(head)) + head)
        plain = value.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def export_onnx(
    backbone: nn.Module,
    path: str | Path,
    *,
    image_size: int,
    in_channels: int = 3,
    input_name: str = "data",
    check: bool = True,
) -> Path:
    """Writes the backbone as one ONNX file with all weights inside: [batch, C, S, S] float32 -> "embedding" [batch, D].

    The batch is free, the image size fixed. The input is an RGB image normalised as (pixel - 127.5) / 127.5 OUTSIDE the
    graph; the embedding is not normalised. Weights are float32 whatever the backbone's are. The file's metadata names
    all this and the digest. check compares with torch at batch 1 and 5 (needs onnxruntime). Nothing is left at `path`
    when anything fails. Raises ValueError where the model cannot be exported so.
    """
    size = sum(math.prod(value.shape) for value in backbone.state_dict().values()) * 4
    if size > MAX_ONNX_BYTES:
        raise ValueError(f"backbone: got {size / 2**30:.1f} GiB of float32 weights, expected < 2 GiB to fit one file")
    if image_size % 16 or image_size < 112 or image_size == 192:
        logger.info(
            "%s takes %d px images; programs of InsightFace take multiples of 16 from 112 on (not 192), others any",
            Path(path).name,
            image_size,
        )
    twin = copy.deepcopy(unwrapped(backbone)).cpu().float()
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(5, in_channels, image_size, image_size, generator=generator) * 2 - 1
    with evaluating(twin), torch.no_grad():
        model = _to_onnx(twin, images[:2], input_name)
        _clean(model)
        _describe(model, backbone, image_size=image_size, in_channels=in_channels)
        check_contract(model, image_size=image_size, in_channels=in_channels)
        data = model.SerializeToString()
        if check:
            _check_parity(twin, data, images)
    with atomic_file(path) as file:
        file.write(data)
    return Path(path)


def export_program(
    backbone: nn.Module, path: str | Path, *, image_size: int, in_channels: int = 3, check: bool = True
) -> Path:
    """Writes the backbone as a torch.export program (.pt2) with a free batch: the same input and output as the ONNX.

    Nothing in the file is a pickle, and nothing in it says where it was made.
    """
    twin = copy.deepcopy(unwrapped(backbone)).cpu().float()
    images = torch.rand(3, in_channels, image_size, image_size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with evaluating(twin), torch.no_grad():
        program = torch.export.export(twin, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        wanted = twin(images[:1])
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
        node.meta.pop("nn_module_stack", None)
    program._example_inputs = None  # would be the one pickle inside
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own internals
        torch.export.save(program, data)
        data.seek(0)
        loaded = torch.export.load(data).module() if check else None
    if loaded is not None:
        found = loaded(images[:1])
        if (found - wanted).abs().max() > TOLERANCE * wanted.norm():
            raise ValueError("backbone: the exported program gives other embeddings than the module")
    with atomic_file(path) as file:
        file.write(data.getvalue())
    return Path(path)


def export_weights(backbone: nn.Module, path: str | Path) -> Path:
    """Writes the state_dict of the backbone as safetensors, with its digest."""
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in unwrapped(backbone).state_dict().items()}
    with atomic_file(path) as file:
        file.write(save(tensors, {"model_digest": model_digest(backbone), "plsc_version": _version()}))
    return Path(path)


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


def check_contract(model: "ModelProto", *, image_size: int, in_channels: int = 3) -> None:
    """Raises ValueError where an ONNX model is not what programs that run face embedding models take.

    One float32 input [batch, C, S, S] with a free batch only, one output [batch, D], weights of 4 bytes or more, all
    inside the file, and no early node whose name says that the graph normalises its input.
    """
    import onnx

    def dims(value: "onnx.ValueInfoProto") -> list[int | str]:
        shape = value.type.tensor_type.shape
        return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in shape.dim]

    graph = model.graph
    if len(graph.input) != 1 or len(graph.output) != 1:
        raise ValueError(f"backbone: got {len(graph.input)} inputs, {len(graph.output)} outputs, expected one of each")
    batch, *image = dims(graph.input[0])
    if not isinstance(batch, str) or image != [in_channels, image_size, image_size]:
        expected = f"a free batch and {[in_channels, image_size, image_size]}"
        raise ValueError(f"backbone: got input dimensions {[batch, *image]}, expected {expected}")
    out = dims(graph.output[0])
    if len(out) != 2 or not isinstance(out[0], str) or not isinstance(out[1], int):
        raise ValueError(f"backbone: got output dimensions {out}, expected a free batch and the embedding size")
    for value in (graph.input[0], graph.output[0]):
        kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
        if kind != "FLOAT":
            raise ValueError(f"backbone: got {value.name} of ONNX type {kind}, expected FLOAT")
    for weight in graph.initializer:
        if onnx.helper.tensor_dtype_to_np_dtype(weight.data_type).itemsize < 4 or len(weight.external_data):
            raise ValueError(f"backbone: got weight {weight.name} narrower than 4 bytes or outside the file")
    trapped = [node.name for node in graph.node if _is_trap(node.name)]
    if trapped:
        raise ValueError(f"backbone: got nodes named {trapped}, expected no name that stands for input normalisation")


def _to_onnx(module: nn.Module, images: Tensor, input_name: str) -> "ModelProto":
    try:
        import onnx  # noqa: F401 (named here: torch's own message does not say what to do)
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"ONNX export needs {error.name}; remedy: pip install onnx onnxscript") from error
    # It warns of each operator of torchvision's that it skips where that is not installed: no model here has any.
    noisy = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own internals
            program = torch.onnx.export(
                module,
                (images,),
                input_names=[input_name],
                output_names=["embedding"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                opset_version=OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()
        raise ValueError(f"backbone: torch cannot export it as ONNX: {reason[0] if reason else error!r}") from error
    finally:
        noisy.setLevel(level)
    assert program is not None  # with dynamo=True
    return program.model_proto


def _is_trap(name: str) -> bool:
    return name.lower().startswith(NAME_TRAPS)


def _clean(model: "ModelProto") -> None:
    """Takes out what the exporter noted about the source (file names, stack traces), and renames misleading nodes."""
    graph = model.graph
    taken = {node.name for node in graph.node}
    for node in graph.node:
        if _is_trap(node.name):
            name = f"node_{node.name}"
            while name in taken:
                name += "_"
            taken.add(name)
            node.name = name
    _forget_source(model)


def _forget_source(message: Any) -> None:
    """Clears metadata and documentation in a protobuf message and in all those inside it."""
    for field, value in message.ListFields():
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for part in value if isinstance(value, Sequence) or hasattr(value, "__len__") else [value]:
                _forget_source(part)


def _describe(model: "ModelProto", backbone: nn.Module, *, image_size: int, in_channels: int) -> None:
    embedding = model.graph.output[0].type.tensor_type.shape.dim[-1].dim_value
    notes = {
        "plsc_version": _version(),
        "model_digest": model_digest(backbone),
        "input_mean": "127.5",
        "input_std": "127.5",
        "color_order": "RGB" if in_channels == 3 else "any",
        "input_layout": "NCHW",
        "image_size": str(image_size),
        "embedding_size": str(embedding),
        "embedding_normalized": "false",
    }
    for key, value in notes.items():
        model.metadata_props.add(key=key, value=value)
    model.producer_name, model.producer_version = "plsc", _version()


def _check_parity(module: nn.Module, data: bytes, images: Tensor) -> None:
    """Raises ValueError unless ONNX Runtime gives torch's embeddings for one image and for all."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            f"{error.name} is needed to check the export; remedy: pip install onnxruntime, or check=False"
        ) from error
    onnx.checker.check_model(data)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    (name,) = (value.name for value in session.get_inputs())
    for batch in (1, len(images)):
        wanted = module(images[:batch]).double().numpy()
        found = np.asarray(session.run(None, {name: images[:batch].numpy()})[0], dtype=np.float64)
        if found.shape != wanted.shape or not np.isfinite(found).all():
            raise ValueError(f"backbone: ONNX gives shape {found.shape} or no finite numbers, expected {wanted.shape}")
        off = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1).clip(1e-30)
        if off.max() > TOLERANCE:
            raise ValueError(
                f"backbone: ONNX differs from torch by {off.max():.1e} of the embedding's length at batch {batch}, "
                f"expected at most {TOLERANCE}"
            )


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
        "plsc_version": _version(),
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


def _version() -> str:
    """plsc's version; by name, for an import statement would be an arrow from here up to the front page."""
    return str(getattr(importlib.import_module("plsc"), "__version__", "unknown"))
