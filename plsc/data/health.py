"""What training on a data set would meet: label gaps, broken images, repeated pictures, sizes, reading speed."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from plsc.data.convert import Encoded
from plsc.data.decoding import jpeg_warning, read_pixels
from plsc.data.reading import most_bad

_SHOWN = 10  # examples of each kind kept
Progress = Callable[[int, int], None]


@dataclass
class Report:
    """Numbers of a data set; the lists hold the first few of what `num_...` counts."""

    num_images: int
    num_classes: int
    num_ignored: int
    num_empty: int  # classes without an image
    num_single: int  # classes with one image
    images_per_class: tuple[int, float, int]  # least (of those that have any), median, most
    num_read: int = 0
    num_bytes: int = 0
    num_broken: int = 0
    broken: list[str] = field(default_factory=list)
    num_odd: int = 0  # JPEGs that libjpeg decodes with a warning
    odd: list[str] = field(default_factory=list)
    num_repeats: int = 0  # pictures that an earlier sample of the same label shows
    repeats: list[str] = field(default_factory=list)
    num_conflicts: int = 0  # pictures that an earlier sample of another label shows
    conflicts: list[str] = field(default_factory=list)
    sizes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    read_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Nothing that spoils training: no broken image, no picture under two labels."""
        return not (self.num_broken or self.num_conflicts)

    def lines(self) -> list[str]:
        """The report in words."""
        least, median, most = self.images_per_class
        text = [
            f"{self.num_images} images, {self.num_classes} classes; a class has {least} to {most}, median {median:g}",
        ]
        if self.num_ignored:
            text.append(f"{self.num_ignored} samples are ignored (label -1)")
        if self.num_empty:
            text.append(f"{self.num_empty} labels have no image: their centres take memory and learn nothing")
        if self.num_single:
            text.append(f"{self.num_single} classes have one image only: their centres learn little")
        if self.num_read:
            read, decode = max(self.read_seconds, 1e-9), max(self.decode_seconds, 1e-9)
            text += [
                f"sizes: {_most_common(self.sizes)}; kinds: {_most_common(self.kinds)}",
                f"read {self.num_bytes / 1e6:.1f} MB: {self.num_read / read:.0f} images/s, "
                f"{self.num_bytes / 1e6 / read:.0f} MB/s; decoded {self.num_read / decode:.0f} images/s on one core",
            ]
        for number, examples, words in (
            (self.num_broken, self.broken, self._about_broken()),
            (self.num_conflicts, self.conflicts, "pictures stand under two labels: training is told both"),
            (self.num_odd, self.odd, "JPEGs are decoded with a warning and may be damaged: look at some"),
            (self.num_repeats, self.repeats, "pictures are repeated within their class: they count double"),
        ):
            if number:
                text.append(f"{number} {words}")
                text += [f"  {example}" for example in examples]
                text += [f"  ... and {number - len(examples)} more"] if number > len(examples) else []
        if self.num_read and self.sound and not self.num_odd:
            text.append("nothing that would stop or spoil training")
        return text

    def _about_broken(self) -> str:
        most = most_bad(self.num_read)
        stops = self.num_broken > most
        others = "draws others in their place, unless data.on_bad_image is raise"
        return f"images cannot be read: training {f'stops, it takes {most} of {self.num_read}' if stops else others}"


def count(data: Encoded) -> Report:
    """What the labels alone say."""
    labels = np.asarray(data.labels)
    known = labels[labels >= 0]
    counts = np.unique(known, return_counts=True)[1]
    some = counts if len(counts) else np.zeros(1, np.int64)
    return Report(
        num_images=len(labels),
        num_classes=data.num_classes,
        num_ignored=len(labels) - len(known),
        num_empty=data.num_classes - len(counts),
        num_single=int((counts == 1).sum()),
        images_per_class=(int(some.min()), float(np.median(some)), int(some.max())),
    )


def verify(data: Encoded, *, limit: int = 0, progress: Progress | None = None) -> Report:
    """Reads and decodes every image (or `limit` of them, evenly spaced) at its own size and compares them all.

    Pictures are equal when their pixels are; 16 bytes an image are kept for that.
    """
    report = count(data)
    total = len(data)
    chosen = np.arange(total) if not limit or limit >= total else np.linspace(0, total - 1, limit).astype(np.int64)
    seen: dict[bytes, int] = {}
    for done, i in enumerate(chosen.tolist(), 1):
        name, label = data.name(i), int(data.labels[i])
        start = time.perf_counter()
        try:
            encoded = data.encoded(i)
            middle = time.perf_counter()
            pixels, kind = read_pixels(encoded, name=name)
        except (OSError, ValueError) as error:
            _note(report, "broken", f"{error}" if name in str(error) else f"{name}: {error}")
        else:
            report.num_bytes += len(encoded)
            report.read_seconds += middle - start
            report.decode_seconds += time.perf_counter() - middle
            report.sizes[f"{pixels.shape[1]} x {pixels.shape[0]}"] += 1
            report.kinds[kind] += 1
            if kind.startswith("JPEG") and (warning := jpeg_warning(encoded)):
                _note(report, "odd", f"{name}: {warning}")
            digest = blake2b(pixels.tobytes() + str(pixels.shape).encode(), digest_size=16).digest()
            first = seen.setdefault(digest, i)
            if first != i and label >= 0 and data.labels[first] >= 0:
                other = int(data.labels[first])
                if other == label:
                    _note(report, "repeats", f"{name} shows what {data.name(first)} shows (label {label})")
                else:
                    _note(
                        report,
                        "conflicts",
                        f"{name} (label {label}) shows what {data.name(first)} does (label {other})",
                    )
        report.num_read += 1
        if progress is not None and (done % 256 == 0 or done == len(chosen)):
            progress(done, len(chosen))
    return report


def _note(report: Report, what: str, example: str) -> None:
    setattr(report, f"num_{what}", getattr(report, f"num_{what}") + 1)
    examples = getattr(report, what)
    if len(examples) < _SHOWN:
        examples.append(ascii(example)[1:-1] if not example.isprintable() else example)


def _most_common(counted: Counter[Any]) -> str:
    shown = ", ".join(f"{what} ({number})" for what, number in counted.most_common(5))
    return shown + (", ..." if len(counted) > 5 else "")
