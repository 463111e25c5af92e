"""What a service counts, in the text format that Prometheus reads."""

from __future__ import annotations

import bisect
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

Labels = tuple[tuple[str, str], ...]


class Counter:
    """A number that only grows, one for each set of labels."""

    kind = "counter"

    def __init__(self, name: str, words: str) -> None:
        self.name, self.words = name, words
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float = 1, **labels: str) -> None:
        key = tuple(labels.items())
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def total(self) -> float:
        with self._lock:
            return sum(self._values.values())

    def lines(self) -> Iterator[str]:
        with self._lock:
            found = sorted(self._values.items())
        for labels, value in found:
            yield f"{self.name}{_braces(labels)} {value:g}"


class Gauge:
    """A number as it is when asked for."""

    def __init__(self, name: str, words: str, read: Callable[[], float], *, kind: str = "gauge") -> None:
        self.name, self.words, self.kind, self._read = name, words, kind, read

    def lines(self) -> Iterator[str]:
        yield f"{self.name} {self._read():.17g}"


class Histogram:
    """How many observations were at most so large, one row of counts for each set of labels."""

    kind = "histogram"

    def __init__(self, name: str, words: str, bounds: Sequence[float]) -> None:
        self.name, self.words, self._bounds = name, words, tuple(bounds)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def observe(self, value: float, **labels: str) -> None:
        key = tuple(labels.items())
        with self._lock:
            counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
            counts[bisect.bisect_left(self._bounds, value)] += 1
            self._sums[key] = self._sums.get(key, 0) + value

    def lines(self) -> Iterator[str]:
        with self._lock:
            found = sorted((labels, list(counts), self._sums[labels]) for labels, counts in self._counts.items())
        for labels, counts, total in found:
            seen = 0
            for bound, count in zip([*map("{:g}".format, self._bounds), "+Inf"], counts, strict=True):
                seen += count
                yield f"{self.name}_bucket{_braces((*labels, ('le', bound)))} {seen}"
            yield f"{self.name}_sum{_braces(labels)} {total:.9g}"
            yield f"{self.name}_count{_braces(labels)} {seen}"


Metric = Counter | Gauge | Histogram


def exposition(metrics: Sequence[Metric]) -> str:
    """All metrics as text, version 0.0.4 of the format."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.words}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
    return "\n".join(lines) + "\n"


def process_metrics() -> list[Metric]:
    """CPU seconds and resident memory of this process, under the names that are customary."""
    return [
        Gauge("process_cpu_seconds_total", "CPU time, user and system.", _cpu_seconds, kind="counter"),
        Gauge("process_resident_memory_bytes", "Memory in RAM.", _resident_bytes),
    ]


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident_bytes() -> float:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux: the most there ever was
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
