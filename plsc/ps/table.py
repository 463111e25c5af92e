"""A table of rows under 64-bit keys in this process: pull rows, push gradients, save, load; the native core's face."""

import json
import os
import threading
import uuid
import weakref
from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from plsc.ps.arrays import Array, as_floats, as_keys, as_output, empty_like_kind
from plsc.ps.checks import between, flag, number, one_of
from plsc.ps.files import atomic_path
from plsc.ps.rules import PythonRule, Rule, as_rule, core_options, describe, rule_of_save

FORMAT = 1
LARGEST = {"fp32": 3.4e38, "fp16": 65504.0, "bf16": 3.38e38}  # that a value of a dtype can hold, about
DTYPES = tuple(LARGEST)
TOO_LARGE = 2.0**50  # of a gradient's components: sums of their squares would overflow
INITS = ("uniform", "normal", "zeros", "constant")
POLICIES = ("lru", "lfu")
_TABLES: weakref.WeakSet["Table"] = weakref.WeakSet()  # all there are, for a fork


class Table:
    """Rows [dim] under uint64 keys. A row is made when its key is first pulled (pushed, with admission).

    dim          components of a row's value
    rule         a name of RULES, a Rule, or one of your own (PythonRule, NativeRule); what a push does to a row
    lr           learning rate; assign `table.lr` to follow a schedule
    init         uniform on +-init_scale, normal of that deviation, constant, zeros; depends on (seed, key) alone
    dtype        of values: fp32, fp16 (stays within +-65504), bf16. Optimizer state is fp32
    locked       False (Hogwild): threads may overwrite each other's floats, never the index. True: every update counts
    stripes      parts with a lock each, a power of two
    arena        None: rows in memory. A folder: rows in a nameless file on its disk, gone with the table
    counters     keep how often each row was shown and clicked: 8 bytes a row
    admit_after  a key gets a row at its n-th push (counted in 4 MiB, so a crowded table may admit early)
    admit_probability   each push of a key without a row makes it one with this probability
    max_rows     every stripe keeps at most max_rows / stripes rows; `policy` says which go: lru (pushed to longest
                 ago) or lfu (shown least; needs counters)

    A key that comes several times in a push takes as many steps, in order. Threads may use a table freely.
    """

    def __init__(
        self,
        dim: int,
        *,
        rule: str | Rule | PythonRule = "adagrad",
        lr: float = 0.05,
        init: str = "uniform",
        init_scale: float = 0.01,
        seed: int = 0,
        dtype: str = "fp32",
        locked: bool = False,
        stripes: int = 64,
        arena: str | PathLike[str] | None = None,
        counters: bool = False,
        admit_after: int = 1,
        admit_probability: float = 1.0,
        max_rows: int | None = None,
        policy: str = "lru",
    ) -> None:
        dim = between("dim", dim, 1, 65_536)
        stripes = between("stripes", stripes, 1, 65_536)
        seed = between("seed", seed, 0, 2**64 - 1)
        admit_after = between("admit_after", admit_after, 1, 255)
        max_rows = None if max_rows is None else between("max_rows", max_rows, 0, 2**63 - 1)
        init_scale = number("init_scale", init_scale, 0.0, LARGEST.get(dtype, np.inf))
        admit_probability = number("admit_probability", admit_probability, 0.0, 1.0, above=True)
        flag("locked", locked)
        flag("counters", counters)
        one_of("init", init, INITS)
        one_of("dtype", dtype, DTYPES)
        one_of("policy", policy, POLICIES)
        if stripes & (stripes - 1):
            raise ValueError(f"stripes: got {stripes}, expected a power of two, such as 64")
        if max_rows is not None and max_rows < 16 * stripes:
            raise ValueError(
                f"max_rows: got {max_rows}, expected at least {16 * stripes}, 16 a stripe; use fewer stripes"
            )
        if policy == "lfu" and not counters:
            raise ValueError("policy lfu counts what is shown; got counters=False, expected counters=True")
        if arena is not None and not Path(arena).is_dir():
            raise ValueError(
                f"arena: got {fspath(arena)}, expected an existing folder on the disk that is to hold the rows"
            )
        self._dim = dim
        self._rule = as_rule(rule)
        self.lr = lr
        self._config: dict[str, Any] = {
            "dim": dim,
            "dtype": dtype,
            "init": init,
            "init_scale": float(init_scale),
            "seed": seed,
            "counters": counters,
        }
        self._core = _core_class()(
            {
                **self._config,
                "rule": core_options(self._rule, dim),
                "locked": locked,
                "stripes": stripes,
                "arena": "" if arena is None else fspath(arena),
                "admit_after": admit_after,
                "admit_probability": float(admit_probability),
                "max_rows": max_rows or 0,
                "least_shown": policy == "lfu",
            }
        )
        self._locked = locked
        self._bounded = max_rows is not None
        self._admits_all = admit_after == 1 and admit_probability == 1.0
        self._decays = 0
        self._base: tuple[str, int, int, int] | None = None  # id, clock, erased rows, decays at the last full save
        self._saved_as: str | None = None
        self._renew_locks()
        _TABLES.add(self)

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def rule(self) -> Rule | PythonRule:
        return self._rule

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._lr = number("lr", lr, 0.0, LARGEST["fp32"], above=True)

    @property
    def keeps_rows(self) -> bool:
        """Whether every key that is pushed has a row from then on: no admission, no bound."""
        return self._admits_all and not self._bounded

    @property
    def last_save(self) -> str | None:
        """Tag of the last full save or of the one this table was loaded from; if it had none, its id."""
        return self._saved_as

    @property
    def keeps_counters(self) -> bool:
        return bool(self._config["counters"])

    def __len__(self) -> int:
        return len(self._core)

    def pull(self, keys: Array, *, create: bool = True, out: Array | None = None) -> Array:
        """Rows [K, dim] float32 of keys [K], in the kind that came in; into `out` where given, which saves time.

        A missing key's row is made; with create=False its initial value is answered and the table stays as it is.
        """
        flag("create", create)
        array = as_keys(keys)
        shape = (len(array), self.dim)
        if out is None:
            out, memory = empty_like_kind(keys, shape)
        else:
            memory = as_output(out, shape)
        self._core.pull(array, memory, create)
        return out

    def push(self, keys: Array, grads: Array, *, shows: Array | None = None, clicks: Array | None = None) -> int:
        """One step of the rule for every (key, gradient) of keys [K], grads [K, dim] float32.

        Gradients that hold a NaN, an infinity or, unclipped, a component of 2^50 (1e15) or more are refused, as if
        never sent; so is a step after which value or state would not be finite: the row stays. Returns how many.
        shows, clicks [K] float32 are added to the row's counters (default: 1 and 0); so are theirs.
        """
        array = as_keys(keys)
        floats = as_floats(grads, (len(array), self.dim), "grads")
        if not self._config["counters"] and (shows is not None or clicks is not None):
            raise ValueError("got shows or clicks, but this table keeps no counters; make it with counters=True")
        if isinstance(self.rule, PythonRule):
            if shows is not None or clicks is not None:
                raise ValueError("shows and clicks go with a native rule, got them with a PythonRule")
            if not self._locked:
                return self._push_python(self.rule, array, floats)
            with self._one_push:
                return self._push_python(self.rule, array, floats)
        counts = [None if x is None else as_floats(x, array.shape, "shows or clicks") for x in (shows, clicks)]
        return int(self._core.push(array, floats, *counts, self._lr))

    def _push_python(self, rule: PythonRule, keys: np.ndarray, grads: np.ndarray) -> int:
        good = (np.abs(grads) < TOO_LARGE).all(axis=1)  # false for a NaN
        refused = len(keys) - int(good.sum())
        if refused:
            keys, grads = keys[good], grads[good]
        self._core.begin_push(refused)
        for chosen in _rounds(keys):
            some = keys[chosen]
            values = np.empty((len(some), self.dim), np.float32)
            state = np.empty((len(some), self._core.state_size), np.float32)
            self._core.gather(some, values, state)
            rule.update(values, state, grads[chosen], self._lr)
            refused += self._core.scatter(some, values, state)
        return refused

    def assign(self, keys: Array, values: Array) -> None:
        """Set rows to values [K, dim] float32, optimizer state as newborn: how weights from elsewhere come in."""
        array = as_keys(keys)
        floats = as_floats(values, (len(array), self.dim), "values")
        if not np.isfinite(floats).all():
            bad = int(np.isfinite(floats).all(axis=1).argmin())
            raise ValueError(f"values: got a NaN or an infinity for key {array[bad]}, expected finite numbers")
        self._core.assign(array, floats)

    def add(self, keys: Array, deltas: Array) -> int:
        """Add deltas [K, dim] float32 to values, whatever the rule; optimizer state stays.

        Deltas that hold a NaN or an infinity, or lead to one, are refused, and their row stays; returns how many.
        """
        array = as_keys(keys)
        return int(self._core.add(array, as_floats(deltas, (len(array), self.dim), "deltas")))

    def contains(self, keys: Array) -> np.ndarray:
        """Which keys have a row, bool [K]."""
        array = as_keys(keys)
        out = np.empty(len(array), np.uint8)
        self._core.contains(array, out)
        return out.astype(bool)

    def addresses(self, keys: Array) -> np.ndarray:
        """Where the values of these rows lie, uint64 [K]: for native loops that train them in place, Hogwild.

        Missing rows are made. A row stays where it is while the table lives and the key is not erased.
        The table does not see what is written there: rows count as touched by this call alone; before a delta is saved,
        call it again.
        """
        if self._config["dtype"] != "fp32" or self._bounded:
            raise ValueError("addresses: got a table of halves or with max_rows, expected fp32 rows that stay")
        array = as_keys(keys)
        out = np.empty(len(array), np.uint64)
        self._core.addresses(array, out)
        return out

    def counters(self, keys: Array) -> np.ndarray:
        """Shows and clicks, float32 [K, 2]; zeros for keys without a row."""
        self._needs_counters("counters()")
        array = as_keys(keys)
        out = np.empty((len(array), 2), np.float32)
        self._core.read_counters(array, out)
        return out

    def decay(self, factor: float) -> None:
        """Multiply all counters: what was shown long ago counts less."""
        self._needs_counters("decay()")
        self._core.decay(number("factor", factor, 0.0, 1.0))
        self._decays += 1

    def erase(self, keys: Array) -> int:
        """Remove rows; their keys start anew when they come again. Returns how many there were."""
        return int(self._core.erase(as_keys(keys)))

    def evict(
        self,
        *,
        max_age: int | None = None,
        min_score: float | None = None,
        show_weight: float = 1.0,
        click_weight: float = 0.0,
    ) -> int:
        """Remove rows not pushed to in the last `max_age` pushes, or whose weighted counters are below `min_score`."""
        if max_age is None and min_score is None:
            raise ValueError("evict: got neither max_age nor min_score, expected at least one")
        if min_score is not None:
            self._needs_counters("min_score")
            min_score = number("min_score", min_score, -LARGEST["fp32"], LARGEST["fp32"])
        weights = [
            number(name, weight, -LARGEST["fp32"], LARGEST["fp32"])
            for name, weight in (("show_weight", show_weight), ("click_weight", click_weight))
        ]
        age = -1 if max_age is None else between("max_age", max_age, 0, 2**63 - 1)
        return int(self._core.evict(age, float("nan") if min_score is None else min_score, *weights))

    def items(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys uint64 [n] and values float32 [n, dim], a stripe at a time, in no particular order."""
        for stripe in range(self._core.num_stripes):
            keys, values, _ = self._core.stripe_rows(stripe)
            yield keys, values.reshape(len(keys), self.dim)

    def birth(self) -> dict[str, Any]:
        """What decides how rows are born, and their dtype: options for another Table."""
        return {name: value for name, value in self._config.items() if name != "counters"}

    def stats(self) -> dict[str, int]:
        """rows, born, evicted, refused (gradients), unadmitted and clock (pushes), contended (stripes found locked),
        and bytes of three kinds.
        """
        return dict(self._core.stats())

    def save(self, path: str | PathLike[str], *, delta: bool = False, tag: str | None = None) -> int:
        """Write all rows with their state (delta: those touched since the last full save) to one file; how many.

        The file appears at `path` whole or not at all. Other threads may go on training: each stripe is written as it
        is at one moment, and waits for the disk meanwhile. OSError when the disk is full; the old file then stands.
        tag: what `last_save` is to say of it; tables that are saved together get the same.
        """
        with self._saving:
            base, since = None, 0
            erased, decays = self.stats()["evicted"], self._decays
            if delta:
                if self._base is None:
                    raise ValueError("a delta needs a full save before it, got none; call save(path) first")
                base, since, erased_then, decays_then = self._base
                if erased != erased_then:
                    raise ValueError(
                        f"{erased - erased_then} rows were erased since the last full save and a delta cannot say so; "
                        "call save(path) without delta"
                    )
                if decays != decays_then:
                    raise ValueError(
                        "all counters were decayed since the last full save and a delta cannot say so; "
                        "call save(path) without delta"
                    )
            cut = self._core.tick()
            name = uuid.uuid4().hex
            header = {
                "format": FORMAT,
                **self._config,
                "lr": self._lr,
                "rule": describe(self.rule),
                "state": self._core.state_size,
                "id": name,
                "tag": tag,
                "base": base,
                "clock": cut,
            }
            with atomic_path(path) as partial:
                rows = self._core.save(partial, json.dumps(header).encode(), since)
            if not delta:
                self._base, self._saved_as = (name, cut, erased, decays), tag or name
            return int(rows)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        deltas: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
        rule: Rule | PythonRule | None = None,
        locked: bool = False,
        stripes: int = 64,
        arena: str | PathLike[str] | None = None,
        admit_after: int = 1,
        admit_probability: float = 1.0,
        max_rows: int | None = None,
        policy: str = "lru",
    ) -> "Table":
        """The table that `save` wrote, with any number of stripes; then its deltas, oldest first.

        A table with a rule of your own needs one of that name as `rule`.
        """
        header = read_header(path)
        if header["base"] is not None:
            raise ValueError(f"{fspath(path)} is a delta; give its full save as path and this file in deltas")
        try:
            chosen = rule_of_save(header["rule"], header["state"], header["dim"], rule)
        except ValueError as error:
            raise ValueError(f"{fspath(path)} {error}") from None
        table = cls(
            header["dim"],
            rule=chosen,
            lr=header["lr"],
            init=header["init"],
            init_scale=header["init_scale"],
            seed=header["seed"],
            dtype=header["dtype"],
            counters=header["counters"],
            locked=locked,
            stripes=stripes,
            arena=arena,
            admit_after=admit_after,
            admit_probability=admit_probability,
            max_rows=max_rows,
            policy=policy,
        )
        deltas = [deltas] if isinstance(deltas, str | PathLike) else deltas
        headers = [header, *map(read_header, deltas)]
        for delta, other, before in zip(deltas, headers[1:], headers, strict=False):
            if other["base"] != header["id"]:
                raise ValueError(
                    f"{fspath(delta)} is a delta to save {other['base']}, got save {header['id']} as its base"
                )
            if (other["clock"] - before["clock"]) % 2**32 >= 2**31:  # it goes round
                raise ValueError(
                    f"deltas: got {fspath(delta)} after a younger one, expected the oldest first; the last one alone "
                    "has all rows since the full save"
                )
        table.lr = headers[-1]["lr"]
        table._core.set_clock(headers[-1]["clock"])  # before rows come in: their age is told from it
        for each in (path, *deltas):
            table._read(each)
        table._base = (header["id"], header["clock"], 0, 0)  # rows that max_rows has dropped on the way are erased ones
        table._saved_as = header.get("tag") or header["id"]
        return table

    def merge(self, path: str | PathLike[str]) -> None:
        """Lays the rows of another full save, with their state, over those here: how several tables become one.

        Its table must be of the same kind. A delta cannot follow: the next save is a full one.
        """
        header = read_header(path)
        mine = {**self._config, "rule": describe(self.rule), "state": self._core.state_size, "base": None}
        if differ := [name for name, value in mine.items() if header[name] != value]:
            raise ValueError(
                f"{fspath(path)} and this table differ in {', '.join(differ)}; only full saves of tables that were "
                "made alike are merged"
            )
        # The clocks have counted different pushes: rows keep their ages.
        self._read(path, later=(self.stats()["clock"] - header["clock"]) % 2**32)
        self._base, self._saved_as, self.lr = None, header.get("tag") or header["id"], header["lr"]

    def __reduce__(self) -> Any:
        raise TypeError("a Table is not copied or pickled; save it and load the file, or let threads share it")

    def _renew_locks(self) -> None:
        self._one_push = threading.Lock()  # a PythonRule's push is several calls
        self._saving = threading.Lock()

    def _read(self, path: str | PathLike[str], later: int = 0) -> None:
        try:
            self._core.load(fspath(path), later)
        except RuntimeError as error:
            raise _foreign(path, str(error)) from None

    def _needs_counters(self, what: str) -> None:
        if not self._config["counters"]:
            raise ValueError(f"{what} reads counters, but this table keeps none; make it with counters=True")

    def __repr__(self) -> str:
        return f"Table(dim={self.dim}, rule={self.rule!r}, lr={self._lr}, rows={len(self)})"


def _after_fork() -> None:
    """In the child: locks that other threads of the parent held would never be let go of."""
    for table in _TABLES:
        table._renew_locks()


os.register_at_fork(after_in_child=_after_fork)


def read_header(path: str | PathLike[str]) -> dict[str, Any]:
    """What a saved table says of itself: dim, dtype, rule, lr, seed, id, base (of a delta), clock."""
    try:
        header = json.loads(_core_class().read_header(fspath(path)))
    except RuntimeError as error:
        raise _foreign(path, str(error)) from None
    if header["format"] != FORMAT:
        raise ValueError(f"{fspath(path)} has format {header['format']}, expected {FORMAT}; use the plsc that wrote it")
    return header


def _foreign(path: str | PathLike[str], what: str) -> ValueError:
    return ValueError(f"{fspath(path)} {what}; expected a whole file as Table.save writes it, take another copy")


def _core_class() -> Any:
    try:
        from plsc.ps._core import Core
    except ImportError as error:
        raise ImportError(
            f"plsc.ps needs its native core, which was not built when plsc was installed ({error}); "
            "install a C++17 compiler (g++), then install plsc again"
        ) from None
    return Core


def _rounds(keys: np.ndarray) -> Iterator[np.ndarray]:
    """Positions of every key's first occurrence, then of its second, and so on: in a round no key comes twice."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else np.empty(0, np.int64)
    lengths = np.diff(np.r_[starts, len(keys)])
    nth = np.empty(len(keys), np.int64)
    nth[order] = np.arange(len(keys)) - np.repeat(starts, lengths)
    by_round = np.argsort(nth, kind="stable")
    yield from np.split(by_round, np.cumsum(np.bincount(nth))[:-1]) if len(keys) else ()
