"""Verbs between processes that fail name the rank to blame; run as a script, this file is one rank of such a world."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from plsc.comm import CommError, connect

pytestmark = pytest.mark.slow

# What befalls which rank, the words every other rank reads, and whether that rank ends by itself.
FAULTS = (
    pytest.param("killed", 2, r"rank 2 stopped responding", id="killed"),
    pytest.param("stopped", 1, r"rank 1 stopped responding", id="stopped"),
    pytest.param("raises", 2, r"rank 2 ended and took no more part", id="raises"),
    pytest.param("late", 1, r"all ranks are alive; rank 1 behind, .*last verb of rank 1: all_reduce", id="late"),
    pytest.param("killed", 0, r"rank 0, which holds it, is gone or hangs", id="killed-holder"),
    pytest.param("stopped", 0, r"rank 0, which holds it, is gone or hangs", id="stopped-holder"),
)


@pytest.mark.parametrize(("fault", "culprit", "words"), FAULTS)
def test_names_the_culprit(fault: str, culprit: int, words: str, start_ranks: Any, finish_ranks: Any) -> None:
    processes = start_ranks(Path(__file__), 3, fault, str(culprit))
    others = [process for rank, process in enumerate(processes) if rank != culprit]
    texts = finish_ranks(others, 90.0)
    for text in texts:
        last = next((line for line in reversed(text.splitlines()) if line.startswith("CommError")), text)
        assert re.search(words, last), "\n".join(texts)
        assert re.search(r"all_reduce sum of float32 \(4,\) \(verb 5 of rank \d\)", last), last
    for process in others:
        assert process.returncode == 3


def main(fault: str, culprit: int) -> None:
    torch.set_num_threads(1)
    comm = connect("gloo", timeout=4.0)
    for _ in range(5):
        comm.all_reduce(torch.ones(4)).wait()
    if comm.rank == culprit:
        if fault == "raises":
            raise KeyError("of the user's own")
        if fault == "late":
            time.sleep(20.0)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    try:
        comm.all_reduce(torch.ones(4)).wait()
    except CommError as error:
        print("CommError", error, flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
