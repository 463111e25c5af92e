"""Random operations on a table and on a dict of rows: hypothesis looks for a sequence after which they differ."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from plsc.ps import Table

DIM = 3
KEYS = st.lists(st.one_of(st.integers(0, 40), st.sampled_from([2**63, 2**64 - 1])), max_size=60)


class TableAgainstDict(RuleBasedStateMachine):
    @initialize(stripes=st.sampled_from([1, 4]), locked=st.booleans(), half=st.booleans())
    def make(self, stripes: int, locked: bool, half: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "table"
        self.options = {"stripes": stripes, "locked": locked}
        self.half = np.float16 if half else np.float32
        self.table = Table(DIM, rule="sgd", lr=0.5, seed=9, dtype="fp16" if half else "fp32", **self.options)
        self.fresh = Table(DIM, seed=9, dtype="fp16" if half else "fp32")
        self.rows: dict[int, np.ndarray] = {}
        self.saved: dict[int, np.ndarray] | None = None

    def initial(self, key: int) -> np.ndarray:
        return self.fresh.pull(np.array([key], np.uint64), create=False)[0]

    @rule(keys=KEYS, create=st.booleans())
    def pull(self, keys: list[int], create: bool) -> None:
        got = self.table.pull(np.array(keys, np.uint64), create=create)
        expected = [self.rows.get(key, self.initial(key)) for key in keys]
        np.testing.assert_array_equal(got, np.array(expected, np.float32).reshape(-1, DIM))
        if create:
            self.rows.update({key: row for key, row in zip(keys, expected, strict=True) if key not in self.rows})

    @rule(keys=KEYS, seed=st.integers(0, 99))
    def push(self, keys: list[int], seed: int) -> None:
        grads = np.random.default_rng(seed).integers(-8, 8, (len(keys), DIM)).astype(np.float32)
        self.table.push(np.array(keys, np.uint64), grads)
        for key, grad in zip(keys, grads, strict=True):
            stepped = self.rows.get(key, self.initial(key)) - np.float32(0.5) * grad
            self.rows[key] = stepped.astype(self.half).astype(np.float32)

    @rule(keys=KEYS)
    def erase(self, keys: list[int]) -> None:
        assert self.table.erase(np.array(keys, np.uint64)) == len(set(keys) & set(self.rows))
        for key in keys:
            self.rows.pop(key, None)

    @rule(keys=KEYS)
    def contains(self, keys: list[int]) -> None:
        assert self.table.contains(np.array(keys, np.uint64)).tolist() == [key in self.rows for key in keys]

    @rule()
    def save(self) -> None:
        assert self.table.save(self.path) == len(self.rows)
        self.saved = dict(self.rows)

    @rule(stripes=st.sampled_from([1, 2, 16]))
    def load(self, stripes: int) -> None:
        if self.saved is not None:
            self.table = Table.load(self.path, stripes=stripes, locked=self.options["locked"])
            self.rows = dict(self.saved)

    @invariant()
    def same_size(self) -> None:
        if hasattr(self, "table"):
            assert len(self.table) == len(self.rows)

    def teardown(self) -> None:
        if hasattr(self, "table"):
            found = {int(k): v for keys, values in self.table.items() for k, v in zip(keys, values, strict=True)}
            assert found.keys() == self.rows.keys()
            for key, row in found.items():
                np.testing.assert_array_equal(row, self.rows[key])
            self.folder.cleanup()


TestTableAgainstDict = TableAgainstDict.TestCase
TestTableAgainstDict.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
