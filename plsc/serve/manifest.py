"""What a bundle says of itself: read, checked field by field, and with a digest of its own content."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FORMAT, FORMAT_VERSION = "plsc-bundle", 2
UNSEALED = 1  # the version whose manifest may lack its digest, and has no probe
MANIFEST, MODEL, CENTRES, THUMBNAILS = "manifest.json", "model.onnx", "centres.safetensors", "thumbnails.safetensors"
FILES = (MANIFEST, MODEL, CENTRES, THUMBNAILS)  # all that a bundle may hold
STORAGES = ("fp32", "fp16", "int8")
DEFAULT_FAR = 1e-3
DIGEST = "manifest_sha256"  # of the rest of the manifest
RATE_SLACK = 1e-6
COSINE_SLACK = 1e-3  # that rounding may take a cosine beyond 1


@dataclass(frozen=True)
class Threshold:
    """A cosine from which on two images count as one person, with the rates measured at it."""

    threshold: float
    far: float  # false accept rate asked for
    measured_far: float  # <= far
    tar: float  # true accept rate


@dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself."""

    name: str
    plsc_version: str
    model_digest: str  # of the backbone's weights, as all embeddings made by it carry
    image_size: int
    channels: int
    color_order: str
    mean: float  # of the pixels 0 to 255: (pixel - mean) / std is what the network is given
    std: float
    embedding_size: int
    flip: bool  # an embedding is the sum of those of the image and its mirror image: as the thresholds were measured
    metric: str
    num_classes: int
    storage: str  # of the class centres
    named: bool
    thumbnails: bool
    thresholds: tuple[Threshold, ...]  # by falling rate; none where no pairs were measured
    files: Mapping[str, Mapping[str, Any]]  # sha256 and bytes of each
    probe: str = ""  # embedding of a picture that every bundle is tried with, float16 in base64; "": an older bundle

    def threshold_at(self, far: float | None = None) -> Threshold | None:
        """The threshold measured for that false accept rate; by default the one nearest to 0.001, if there is any."""
        if far is None:
            near = sorted(self.thresholds, key=lambda one: abs(math.log(one.far / DEFAULT_FAR)))
            return near[0] if near else None
        for one in self.thresholds:
            if math.isclose(one.far, far, rel_tol=1e-6):
                return one
        known = ", ".join(f"{one.far:g}" for one in self.thresholds) or "none"
        raise ValueError(f"far: got {far:g}, expected a rate that was measured: {known}")


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError where the folder is no bundle, one of another version, or its manifest is not as written."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is not a bundle: it has no {MANIFEST}; write one with plsc-export RUN --to bundle")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, expected an object with the fields of a bundle")
        whole = {name: value for name, value in found.items() if name != DIGEST}
        version = found.pop("format_version")
        if found.pop("format") != FORMAT or type(version) is not int or version not in (UNSEALED, FORMAT_VERSION):
            raise ValueError(f"format {whole['format']!r}, version {version!r}, expected {FORMAT!r}, {FORMAT_VERSION}")
        sealed = version != UNSEALED or DIGEST in found
        digest = found.pop(DIGEST) if sealed else None
        thresholds = tuple(Threshold(**one) for one in found.pop("thresholds"))
        manifest = Manifest(thresholds=thresholds, **found)
        check(manifest)
        if sealed and digest != _digest(whole):
            raise ValueError(f"{DIGEST} {str(digest)[:12]}..., expected {_digest(whole)[:12]}...: it was edited")
        if version != UNSEALED and not manifest.probe:
            raise ValueError("no probe, expected the embedding of the picture that bundles are tried with")
    except KeyError as error:
        raise ValueError(f"{path}: got no {error}; export the bundle again with this version of plsc") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: got {error}; export the bundle again with this version of plsc") from error
    if not sealed:
        logger.warning("%s is of an older version, without a digest of itself: edits of it are not seen", path)
    return manifest


def check(manifest: Manifest) -> None:
    """Raises ValueError for fields that contradict themselves or each other."""
    for words in _faults(manifest):
        raise ValueError(words)


def pack_manifest(manifest: Manifest) -> str:
    """As read_manifest reads it; ValueError where it would not."""
    check(manifest)
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)}
    return json.dumps({**content, DIGEST: _digest(content)}, indent=2, allow_nan=False) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    """Of the values, however they are laid out in the file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _faults(about: Manifest) -> Iterator[str]:
    """What is wrong with the fields, each by itself; whether the files agree is seen when they are opened."""
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
    for field in fields(about):
        value = getattr(about, field.name)
        if str(field.type) in kinds and type(value) not in kinds[str(field.type)]:
            yield f"{field.name} {value!r}, expected {field.type}"
    for name in ("image_size", "embedding_size", "num_classes"):
        if not 1 <= getattr(about, name) < 2**62:
            yield f"{name} {getattr(about, name)}, expected at least 1"
    order = {3: "RGB", 1: "grey"}.get(about.channels)
    if order is None or about.color_order != order:
        yield f"channels {about.channels} in order {about.color_order!r}, expected 3 in 'RGB' or 1 in 'grey'"
    if not (math.isfinite(about.mean) and math.isfinite(about.std) and about.std > 0):
        yield f"mean {about.mean} and std {about.std}, expected finite numbers and std above 0"
    if about.metric != "cosine":
        yield f"metric {about.metric!r}, expected 'cosine'"
    if about.storage not in STORAGES:
        yield f"storage {about.storage!r}, expected one of {', '.join(STORAGES)}"
    for one in about.thresholds:
        yield from _threshold_faults(one)
    for higher, lower in pairwise(about.thresholds):
        if not (higher.far > lower.far and higher.threshold <= lower.threshold and higher.tar >= lower.tar):
            yield (
                f"thresholds {higher.threshold:g} at far {higher.far:g}, then {lower.threshold:g} at {lower.far:g}, "
                "expected falling rates, each at a threshold no lower, with a tar no higher"
            )
    yield from _file_faults(about)


def _threshold_faults(one: Threshold) -> Iterator[str]:
    for field in fields(one):
        value = getattr(one, field.name)
        if type(value) not in (int, float) or not math.isfinite(value):
            yield f"{field.name} {value!r} among the thresholds, expected a finite number"
    if abs(one.threshold) > 1 + COSINE_SLACK:
        yield f"threshold {one.threshold}, expected a cosine, -1 to 1"
    if not 0 < one.far <= 1:
        yield f"far {one.far} among the thresholds, expected above 0 and at most 1"
    if not (0 <= one.measured_far <= one.far * (1 + RATE_SLACK) and 0 <= one.tar <= 1):
        yield (
            f"measured_far {one.measured_far} and tar {one.tar} at far {one.far}, expected a measured rate of at most "
            "that, and 0 to 1"
        )


def _file_faults(about: Manifest) -> Iterator[str]:
    wanted = {MODEL, CENTRES} | ({THUMBNAILS} if about.thumbnails else set())
    if set(about.files) != wanted:
        yield f"files {sorted(about.files)}, expected {', '.join([MODEL, *sorted(wanted - {MODEL})])}"
    for name, facts in about.files.items():
        digest, size = facts.get("sha256"), facts.get("bytes")
        if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
            yield f"sha256 {digest!r} of {name}, expected 64 hexadecimal digits"
        if type(size) is not int or size < 0:
            yield f"bytes {size!r} of {name}, expected a whole number"
