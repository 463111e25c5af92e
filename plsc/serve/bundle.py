"""A bundle: the folder that a service needs of a trained run, with the digest of every file in its manifest."""

from __future__ import annotations

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


class Bundle:
    """An opened bundle: its manifest, the model, and the class centres by memory map."""

    def __init__(self, folder: Path, manifest: Manifest, *, threads: int = 0) -> None:
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
        self.index = Index(centres.embeddings, scales=centres.scales)
        self.class_names = centres.names
        self._thumbnails: tuple[NDArray[np.uint8], NDArray[np.int64]] | None = None
        if manifest.thumbnails:
            tensors, _ = map_safetensors(folder / THUMBNAILS)
            self._thumbnails = tensors["images"], tensors["offsets"]
            if len(tensors["offsets"]) != manifest.num_classes + 1:
                raise ValueError(
                    f"{folder / THUMBNAILS}: got thumbnails of {len(tensors['offsets']) - 1} classes, expected "
                    f"{manifest.num_classes}; export the bundle again"
                )

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
        """Reads a bundle. verify: every byte of every file is checked against the manifest first."""
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
        return cls(where, manifest, threads=threads)

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
            _check_thumbnails(Path(thumbnails), len(found.embeddings))
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
    if not file.normalized or file.embeddings.dtype != np.float32:
        raise ValueError(f"{source}: got centres that are not float32 of unit length; export them again")
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


def _check_thumbnails(path: Path, num_classes: int) -> None:
    tensors, metadata = map_safetensors(path)
    found = len(tensors.get("offsets", ())) - 1
    if metadata.get("format") != "plsc-thumbnails" or found != num_classes:
        raise ValueError(f"{path}: got thumbnails of {found} classes, expected {num_classes}; export them again")
