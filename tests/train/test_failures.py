"""What is said of an error: a sentence, or the frames of the user's own code."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plsc.comm import CommError, FailedTogether
from plsc.fleet import NonFiniteLoss
from plsc.train.build import build_margin
from plsc.train.failures import EXIT_DIVERGED, exit_code, told

MINE = """
import plsc

class Broken(plsc.Margin):
    def __init__(self, scale=8.0):
        super().__init__(scale)
        len(scale)

def other(embedding_size):
    raise TypeError("unexpected keyword argument of mine")

class NoTarget(plsc.Margin):
    pass

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine_failing.py").write_text(MINE)
    (tmp_path / "mine_unreadable.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("mine_failing", None)


def failure(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing failed")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("got 3"), 2, "error: got 3"),
        (FailedTogether("could not write"), 1, "error: could not write"),
        (CommError("rank 1 is gone"), 1, "error: rank 1 is gone"),
        (NonFiniteLoss("the loss is nan"), EXIT_DIVERGED, "error: the loss is nan"),
        (PermissionError(13, "Permission denied", "runs/a"), 1, "error: runs/a: permission denied"),
    ],
)
def test_what_speaks_for_itself_is_a_sentence(
    error: Exception, code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_code(error) == code and told(error) == text
    monkeypatch.setenv("PLSC_DEBUG", "1")
    assert told(error).splitlines()[-1].endswith(str(error)) and not told(error).startswith("error: ")


def test_a_failure_inside_the_users_code_shows_that_code(mine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    error = failure(lambda: build_margin("mine_failing:Broken", {"scale": 4.0}))
    text = told(error)
    assert text.startswith("Traceback") and "in __init__\n    len(scale)" in text and "build.py" not in text
    assert "TypeError: object of type 'float' has no len()" in text
    assert "(while head.margin 'mine_failing:Broken' was made with head.margin_args {'scale': 4.0})" in text
    monkeypatch.setenv("PLSC_DEBUG", "1")
    assert "build.py" in told(error) and "len(scale)" in told(error)


def test_a_failure_of_ours_keeps_all_frames() -> None:
    """Nothing of the user's comes after the last frame of ours."""
    text = told(failure(lambda: build_margin(3, {})))  # type: ignore[arg-type]
    assert text.startswith("Traceback") and "build.py" in text and Path(__file__).name in text


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("mine_failing:number", {}, "a int; expected a class or a function"),
        ("mine_failing:other", {}, r"got other\(embedding_size\), expected one that can be called \(\)"),
        ("mine_failing:other", {"embedding_size": 3, "x": 1}, "unknown 'x'; mine_failing:other takes embedding_size"),
        ("mine_failing:NoTarget", {}, "NoTarget does not define target"),
        ("mine_unreadable:f", {}, r"invalid syntax \(mine_unreadable.py, line 1\)"),
        ("cosface", {"scal": 3}, "unknown 'scal'; did you mean 'scale'"),
    ],
)
def test_a_margin_that_is_none_is_a_sentence(name: str, args: dict[str, Any], words: str, mine: None) -> None:
    with pytest.raises(ValueError, match=words):
        build_margin(name, args)
