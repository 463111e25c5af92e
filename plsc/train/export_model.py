"""What leaves the library of a backbone: ONNX, a torch.export program, its weights, and the digest that names it."""

import copy
import hashlib
import importlib
import io
import json
import logging
import math
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from plsc.data.embeddings import atomic_file
from plsc.train.evaluate import evaluating, unwrapped

if TYPE_CHECKING:
    from onnx import ModelProto

logger = logging.getLogger(__name__)

OPSET = 18
MAX_ONNX_BYTES = 2**31 - 2**20  # a protobuf message ends at 2 GiB
# InsightFace reads from the NAMES of the first nodes whether a model normalises its input itself, and then feeds raw
# pixels: https://github.com/deepinsight/insightface, python-package/insightface/model_zoo/arcface_onnx.py
NAME_TRAPS = ("sub", "_minus", "minus", "mul", "_mul", "div", "_div", "bn_data")
TOLERANCE = 1e-5  # greatest difference of an embedding between torch and ONNX Runtime, relative to its length


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
        file.write(save(tensors, {"model_digest": model_digest(backbone), "plsc_version": plsc_version()}))
    return Path(path)


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
        "plsc_version": plsc_version(),
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
    model.producer_name, model.producer_version = "plsc", plsc_version()


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


def plsc_version() -> str:
    """plsc's version; by name, for an import statement would be an arrow from here up to the front page."""
    return str(getattr(importlib.import_module("plsc"), "__version__", "unknown"))
