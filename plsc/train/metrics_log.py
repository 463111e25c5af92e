"""Numbers of a run as they come: metrics.jsonl, one JSON record a line, and the same in TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any


class MetricsLog:
    """Appends records of a step; a resumed run first drops what was logged after the step it resumes at."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self._folder = folder
        self._file: IO[str] | None = None
        self._board: Any = None

    def open(self, step: int) -> None:
        """Starts writing; records beyond `step` of an earlier run in the folder are dropped."""
        from torch.utils.tensorboard import SummaryWriter

        kept = []
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step and step > 0:
                        kept.append(line)
                except (ValueError, KeyError):
                    continue  # the line that a killed run was writing
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """One record; "step" says where, every other number goes to TensorBoard under its name."""
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(name, value, record["step"])
            self._board.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
