"""A bundle: the folder that a service needs of a trained run, with the digest of every file in its manifest."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.embeddings import EmbeddingFile, Names, map_safetensors, open_embeddings, write_safetensors
from plsc.serve.checks import check_kind, check_numbers, check_offsets, check_rows, check_shapes
from plsc.serve.index import Index, quantize
from plsc.serve.manifest import (
    CENTRES,
    FILES,
    MANIFEST,
    MODEL,
    STORAGES,
    THUMBNAILS,
    Manifest,
    Threshold,
    pack_manifest,
    read_manifest,
)
from plsc.serve.model import EmbeddingModel

logger = logging.getLogger(__name__)

DTYPES = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
ROWS = 65_536  # rows that are converted at once
PROBE_COSINE = 0.999  # that rounding on another machine, and in the manifest, may take an embedding off itself


class Bundle:
    """An opened bundle: its manifest, the model, and the class centres by memory map.

    What the manifest says is compared with the files; names, numbers of classes and offsets are looked at whole, and
    the network embeds one picture as it did when the bundle was written. verify: the length of every centre, too.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, threads: int = 0, verify: bool = True) -> None:
        self.folder, self.manifest = folder, manifest
        self.model = EmbeddingModel(folder / MODEL, flip=manifest.flip, threads=threads)
        centres = open_embeddings(folder / CENTRES)
        for what, found in (("model", self.model.digest), ("class centres", centres.digest)):
            if found != manifest.model_digest:
                raise ValueError(
                    f"{folder}: the {what} are of digest {found[:12]}, the manifest says {manifest.model_digest[:12]}; "
                    "export the bundle again"
                )
        self._check_agreement(centres)
        _check_centres(centres, folder / CENTRES)
        if verify:
            check_rows(centres, folder / CENTRES)
        _check_probe(self.model, manifest.probe, folder / MODEL)
        self.index = Index(centres.embeddings, scales=centres.scales)
        self.class_names = centres.names
        self._thumbnails = _read_thumbnails(folder / THUMBNAILS, manifest.num_classes) if manifest.thumbnails else None

    def _check_agreement(self, centres: EmbeddingFile) -> None:
        """Raises ValueError where the manifest says something else than its files: requests would fail, or lie."""
        about, model, rows = self.manifest, self.model, centres.embeddings
        if rows.shape[-1] != about.embedding_size or model.dim != about.embedding_size:
            raise ValueError(
                f"{self.folder}: model {model.dim} and centres {rows.shape[-1]} wide, the manifest says "
                f"{about.embedding_size}; export the bundle again"
            )
        for what, found in (
            ("image_size", model.image_size),
            ("channels", model.channels),
            ("mean", model.mean),
            ("std", model.std),
            ("num_classes", len(rows)),
            ("named", centres.names is not None),
            ("storage", {kind: name for name, kind in DTYPES.items()}.get(str(rows.dtype))),
        ):
            if found != (said := getattr(about, what)):
                raise ValueError(
                    f"{self.folder}: the files have {what} {found}, the manifest says {said}; export the bundle again"
                )

    @classmethod
    def open(cls, folder: str | Path, *, threads: int = 0, verify: bool = True) -> Bundle:
        """Reads a bundle. verify: every byte of every file is checked against the manifest first, and every centre."""
        where = Path(folder)
        manifest = read_manifest(where)
        for name, about in manifest.files.items():
            path = where / name
            size = path.stat().st_size if path.is_file() else -1
            if size != about["bytes"]:
                got = "no such file" if size < 0 else f"{size} bytes"
                raise ValueError(f"{path}: got {got}, the manifest says {about['bytes']} bytes; copy the bundle again")
            if verify and (found := sha256(path)) != about["sha256"]:
                raise ValueError(
                    f"{path}: got SHA-256 {found[:12]}..., the manifest says {about['sha256'][:12]}...; the file was "
                    "damaged or exchanged; copy or export the bundle again"
                )
        return cls(where, manifest, threads=threads, verify=verify)

    def class_name(self, number: int) -> str | None:
        return None if self.class_names is None else self.class_names[number]

    def thumbnail(self, number: int) -> bytes | None:
        """A small JPEG of the class, if the bundle has one."""
        if self._thumbnails is None:
            return None
        images, offsets = self._thumbnails
        return images[offsets[number] : offsets[number + 1]].tobytes() or None


def write_bundle(
    folder: str | Path,
    *,
    onnx: str | Path,
    centres: str | Path,
    name: str,
    plsc_version: str,
    flip: bool,
    thresholds: Sequence[Threshold] = (),
    storage: str = "fp32",
    thumbnails: str | Path | None = None,
) -> Path:
    """Writes a bundle of an exported model and its class centres; whole, or what was there stays.

    storage: "fp32", "fp16" (half the size) or "int8" (a quarter). thumbnails: a file of one small JPEG a class. Files
    are linked where nothing changes in them. flip: whether thresholds were measured on sums with mirror images.
    """
    if storage not in STORAGES:
        raise ValueError(f"storage: got {storage!r}, expected one of {', '.join(STORAGES)}")
    target = check_target(folder)
    model, found = EmbeddingModel(onnx, flip=flip, threads=1), open_embeddings(centres)
    if model.digest != found.digest:
        raise ValueError(
            f"{onnx} and {centres} are of different models ({model.digest[:12]}, {found.digest[:12]}); export both"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    draft.mkdir()
    try:
        _take(onnx, draft / MODEL)
        _write_centres(Path(centres), draft / CENTRES, storage)
        if thumbnails is not None:
            _read_thumbnails(Path(thumbnails), len(found.embeddings))
            _take(thumbnails, draft / THUMBNAILS)
        manifest = Manifest(
            name=name,
            plsc_version=plsc_version,
            model_digest=found.digest,
            image_size=model.image_size,
            channels=model.channels,
            color_order="RGB" if model.channels == 3 else "grey",
            mean=model.mean,
            std=model.std,
            embedding_size=model.dim,
            flip=flip,
            metric="cosine",
            num_classes=len(found.embeddings),
            storage=storage,
            named=found.names is not None,
            thumbnails=thumbnails is not None,
            thresholds=tuple(sorted(thresholds, key=lambda one: -one.far)),
            files={p.name: {"sha256": sha256(p), "bytes": p.stat().st_size} for p in sorted(draft.iterdir())},
            probe=pack_probe(model),
        )
        with (draft / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(pack_manifest(manifest))
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def check_target(folder: str | Path) -> Path:
    """Where a bundle is to be; ValueError for what is there and is no bundle, or more: it would be deleted."""
    target = Path(folder)
    if not os.path.lexists(target):
        return target
    if not target.is_dir() or (not (target / MANIFEST).is_file() and any(target.iterdir())):
        raise ValueError(f"{target} exists and is not a bundle; expected a new folder or an old bundle to replace")
    strangers = sorted(path.name for path in target.iterdir() if path.name not in FILES)
    if strangers:
        raise ValueError(
            f"{target}: got {', '.join(strangers[:5])}{' and more' if len(strangers) > 5 else ''} beside a bundle's "
            "files, expected none that replacing it would delete; move them elsewhere (a gallery with plsc-serve "
            "stopped)"
        )
    return target


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _take(source: str | Path, target: Path) -> None:
    """A second name for a file that is never written in place, or a copy on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _put_in_place(draft: Path, target: Path) -> None:
    old = draft.with_suffix(".old")
    if target.exists():
        os.rename(target, old)
    os.rename(draft, target)
    if not old.exists():
        return
    for name in FILES:
        (old / name).unlink(missing_ok=True)
    try:
        old.rmdir()
    except OSError:  # something came into the old bundle meanwhile: it is not ours to delete
        logger.warning("%s: kept, for it holds more than a bundle's files", old)


def _write_centres(source: Path, target: Path, storage: str) -> None:
    file = open_embeddings(source)
    _check_centres(file, source)
    check_rows(file, source)
    if file.embeddings.dtype != np.float32:
        raise ValueError(f"{source}: got centres that are {file.embeddings.dtype}, expected float32; export them again")
    if storage == "fp32":
        _take(source, target)
        return
    rows = file.embeddings
    scales = np.empty(rows.shape[:-1], np.float32)

    def blocks() -> Iterator[NDArray[Any]]:
        for start in range(0, len(rows), ROWS):
            codes, factors = quantize(rows[start : start + ROWS], storage)
            if factors is not None:
                scales[start : start + len(codes)] = factors
            yield codes

    tensors: list[Any] = [("labels", "int64", file.labels.shape, [file.labels])]
    tensors.append(("ids", "int64", file.ids.shape, [file.ids]))
    blob, offsets = (file.names.blob, file.names.offsets) if isinstance(file.names, Names) else (None, None)
    if offsets is not None:
        tensors.append(("name_offsets", "int64", offsets.shape, [offsets]))
    tensors.append(("norms", "float32", file.norms.shape, [file.norms]))
    tensors.append(("embeddings", DTYPES[storage], rows.shape, blocks()))
    if storage == "int8":
        tensors.append(("scales", "float32", scales.shape, [scales]))  # full once the rows before it are written
    if blob is not None:
        tensors.append(("names", "uint8", blob.shape, [blob]))
    write_safetensors(target, tensors, {**file.metadata, "storage": storage})


def _check_centres(file: EmbeddingFile, path: Path) -> None:
    """Raises ValueError for anything but class centres 0, 1, 2 and so on, each with its name or none with any."""
    check_kind(file, path, centres=True)
    check_shapes(file, path)
    for what, numbers in (("label", file.labels), ("class number", file.ids)):
        check_numbers(numbers, path, what=what)


def _read_thumbnails(path: Path, num_classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of one small picture a class, and where each begins."""
    tensors, metadata = map_safetensors(path)
    if metadata.get("format") != "plsc-thumbnails" or not {"images", "offsets"} <= tensors.keys():
        raise ValueError(f"{path}: got no thumbnails of plsc, expected images and offsets; export them again")
    images, offsets = tensors["images"], tensors["offsets"]
    if len(offsets) != num_classes + 1:
        raise ValueError(
            f"{path}: got thumbnails of {len(offsets) - 1} classes, expected {num_classes}; export the bundle again"
        )
    check_offsets(offsets, images, num_classes, path, what="thumbnails")
    return images, offsets


def pack_probe(model: EmbeddingModel) -> str:
    """The embedding of a picture of noise, in half precision and base64: what is expected of the same network."""
    found = _probe(model)
    if not (np.isfinite(found).all() and found.any()):
        raise ValueError("model: gives no direction to a picture of noise, expected one; has its training diverged?")
    return base64.b64encode(found.astype("<f2").tobytes()).decode()


def _check_probe(model: EmbeddingModel, probe: str, path: Path) -> None:
    """Raises ValueError where the network does not embed a picture as it did when the bundle was written, or fails."""
    try:
        found = _probe(model)
    except Exception as error:  # ONNX Runtime's own kinds, by what is wrong in the graph
        raise ValueError(f"{path}: ONNX Runtime cannot run it ({error}); export the bundle again") from error
    if not probe:
        return
    try:
        wanted = np.frombuffer(base64.b64decode(probe, validate=True), "<f2").astype(np.float32)
    except ValueError as error:
        raise ValueError(
            f"{path.parent / MANIFEST}: got a probe that cannot be read ({error}); export it again"
        ) from None
    if wanted.shape != found.shape or not np.dot(wanted, found) > PROBE_COSINE:
        raise ValueError(
            f"{path}: the network embeds the picture that bundles are tried with otherwise than when it was exported; "
            "its weights were exchanged, or this machine computes wrongly; export the bundle again"
        )


def _probe(model: EmbeddingModel) -> NDArray[np.float32]:
    """The unit embedding of one picture, run in a batch of two; not finite where the network gives no direction."""
    shape = (2, model.image_size, model.image_size, model.channels)
    return model.embed(np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8))[0][0]
