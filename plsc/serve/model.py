"""The network of a bundle under ONNX Runtime: pixels in, embeddings of unit length out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # [B, S, S, C]


class EmbeddingModel:
    """An ONNX file as plsc.train.export writes it; all else that is needed is in the file's metadata.

    flip: the embedding is the sum of those of the image and its mirror image. threads: 0 for all cores.
    """

    def __init__(self, path: str | Path, *, flip: bool = False, threads: int = 0) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError("serving needs onnxruntime; remedy: pip install 'plsc-torch[serve]'") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # Threads that spin while they wait take cores from decoding, and seconds from whoever pays for them.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its own kinds of error, by the kind of damage
            raise ValueError(f"{path}: ONNX Runtime cannot load it ({error}); export it again") from error
        notes: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        try:
            self.digest = notes["model_digest"]
            self.mean, self.std = float(notes["input_mean"]), float(notes["input_std"])
            self.dim, self.image_size = int(notes["embedding_size"]), int(notes["image_size"])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: no metadata of plsc ({error}); expected an export of plsc-export") from error
        self._input, self.channels = self._read_graph(path, notes.get("color_order", "none"))
        self.flip = flip

    def _read_graph(self, path: str | Path, order: str) -> tuple[str, int]:
        """Name and channels of the input. Raises ValueError for a graph that takes or gives anything else."""
        given, made = self._session.get_inputs(), self._session.get_outputs()
        shapes = [list(one.shape) for one in (*given, *made)]
        free = not any(isinstance(shape[0], int) for shape in shapes if shape)
        for channels, name in ((3, "RGB"), (1, "any")):
            wanted = [[channels, self.image_size, self.image_size], [self.dim]]
            if len(given) == 1 and [shape[1:] for shape in shapes] == wanted and free and order == name:
                return given[0].name, channels
        raise ValueError(
            f"{path}: got inputs {shapes[: len(given)]} in order {order} and outputs {shapes[len(given) :]}, expected "
            f"one input, a free batch of {self.image_size} px, 3 channels in RGB or 1 in any order, and embeddings of "
            f"{self.dim}; export it again"
        )

    def embed(self, images: Pixels) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Embeddings [B, D] at unit length and their lengths [B] before, of uint8 images [B, S, S, C].

        An embedding without direction (zero, or not finite) is left as it is: its length says so.
        """
        shape = (self.image_size, self.image_size, self.channels)
        if images.ndim != 4 or images.shape[1:] != shape or images.dtype != np.uint8:
            raise ValueError(f"images: got {images.dtype} {list(images.shape)}, expected uint8 {['B', *shape]}")
        x = np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32)
        x -= self.mean
        x /= self.std
        rows = self._run(x)
        if self.flip:
            rows = rows + self._run(np.ascontiguousarray(x[..., ::-1]))
        norms = np.linalg.norm(rows.astype(np.float64), axis=1)
        directed = np.isfinite(norms) & (norms > 0)
        rows[directed] = (rows[directed] / norms[directed, None]).astype(np.float32)
        return rows, norms.astype(np.float32)

    def _run(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        (rows,) = self._session.run(None, {self._input: x})
        return np.asarray(rows, np.float32)
