"""The figures of IJB-B and IJB-C, or of a protocol laid out alike, from a file of embeddings and the lists."""

import importlib
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plsc.data.embeddings import open_embeddings
from plsc.train.metrics import Floats, Ints
from plsc.train.templates import (
    Identification,
    TemplateVerification,
    average,
    identify_templates,
    pool,
    read_landmarks,
    read_template_media,
    read_template_pairs,
    read_template_subjects,
    verify_templates,
)

_SHOWN = 3  # missing images named in an error


@dataclass(frozen=True)
class TemplateFigures:
    """What was asked for of one protocol; None for what was not."""

    num_images: int
    num_templates: int
    verification: TemplateVerification | None
    identification: Identification | None

    def lines(self) -> list[str]:
        """The figures in words."""
        text = [f"{self.num_images} images in {self.num_templates} templates"]
        if (one := self.verification) is not None:
            text.append(f"1:1, {one.num_pairs} pairs: area under the curve {one.auc:.6f}")
            for point in one.tar:
                share = "too few pairs to tell" if math.isnan(point.tar) else f"{100 * point.tar:.2f} %"
                nearest = 100 * one.tar_nearest[point.far]
                text.append(f"  TAR at FAR {point.far:g}: {share} (at the nearest rate, even above: {nearest:.2f} %)")
        if (many := self.identification) is not None:
            text.append(f"1:N, {many.num_enrolled} probes enrolled, {many.num_strangers} not")
            text += [f"  rank-{k}: {100 * share:.2f} %" for k, share in many.rank.items()]
            text += [f"  TPIR at FPIR {point.fpir:g}: {100 * point.tpir:.2f} %" for point in many.open_set]
        return text

    def as_json(self) -> dict[str, Any]:
        """In JSON's types; null for what cannot be measured."""
        made: dict[str, Any] = _plain(asdict(self))
        return made


def template_figures(
    embeddings: str | os.PathLike[str],
    media: str | os.PathLike[str],
    *,
    pairs: str | os.PathLike[str] | None = None,
    galleries: Sequence[str | os.PathLike[str]] = (),
    probes: str | os.PathLike[str] | None = None,
    landmarks: str | os.PathLike[str] | None = None,
) -> TemplateFigures:
    """Verification of `pairs` and identification of `probes` in `galleries` (the mean over these).

    embeddings: what plsc-embed wrote (.safetensors or .parquet), whose names end in the image names of `media`. An
    image counts by its norm and, with `landmarks`, by the detector's score there: the setting of published figures, if
    the embeddings are sums over the image and its mirror image (eval.flip). ValueError: images or templates that are
    missing, lists of another layout.
    """
    if pairs is None and not galleries:
        raise ValueError("got neither pairs nor galleries, expected a list of pairs, or galleries and probes")
    if bool(galleries) != (probes is not None):
        raise ValueError("got galleries or probes alone, expected both or none")
    found = read_template_media(media)
    names, vectors, norms = _read(embeddings)
    rows = _rows_of(found.names, names, embeddings, media)
    weights: Floats = norms[rows].astype(np.float64)
    if landmarks is not None:
        scored, _, scores = read_landmarks(landmarks)
        weights *= scores[_rows_of(found.names, scored, landmarks, media)]
    templates = pool(vectors[rows], found.templates, found.media, weights=weights)
    identified: list[Identification] = []
    if probes is not None:
        wanted, subjects = read_template_subjects(probes)
        queries = templates.chosen(wanted)
        for gallery in galleries:
            entries, people = read_template_subjects(gallery)
            identified.append(identify_templates(templates.chosen(entries), people, queries, subjects))
    return TemplateFigures(
        num_images=len(rows),
        num_templates=len(templates.ids),
        verification=None if pairs is None else verify_templates(templates, read_template_pairs(pairs)),
        identification=average(identified) if identified else None,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {f"{key:g}" if isinstance(key, float) else str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(path: str | os.PathLike[str]) -> tuple[Sequence[str], NDArray[Any], NDArray[np.float32]]:
    """Names [N], embeddings of unit length [N, D] and their norms [N]."""
    if os.fspath(path).endswith(".parquet"):
        try:
            table = importlib.import_module("pyarrow.parquet").read_table(path, columns=["name", "embedding", "norm"])
        except (ImportError, OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise ValueError(f"{path}: cannot be read ({error}); expected a file that plsc-embed wrote") from error
        flat = table["embedding"].combine_chunks().flatten().to_numpy()
        return table["name"].to_pylist(), flat.reshape(len(table), -1), table["norm"].to_numpy()
    file = open_embeddings(Path(path))
    if file.names is None or file.embeddings.ndim != 2 or file.scales is not None:
        raise ValueError(f"{path}: got no embeddings of images with names, expected a file that plsc-embed wrote")
    return file.names, file.embeddings, file.norms


def _rows_of(
    images: Sequence[str], names: Sequence[str], path: str | os.PathLike[str], media: str | os.PathLike[str]
) -> Ints:
    """Where each image of the protocol stands among names, of which the last part counts  [N]."""
    row_of: dict[str, int] = {}
    for row, name in enumerate(names):
        if row_of.setdefault(PurePosixPath(name).name, row) != row:
            raise ValueError(f"{path}: got two images called {PurePosixPath(name).name}, expected each name once")
    rows = np.array([row_of.get(PurePosixPath(image).name, -1) for image in images], np.int64)
    if (missing := np.flatnonzero(rows < 0)).size:
        shown = ", ".join(images[i] for i in missing[:_SHOWN].tolist())
        raise ValueError(
            f"{path}: lacks {missing.size} of the {len(images)} images of {media}, such as {shown}; it has "
            f"{names[0]!r} and so on: expected the names of that list"
        )
    return rows
