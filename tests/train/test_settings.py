"""Settings that tensors do not hold: plsc.load says once where they differ, and says nothing where they do not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plsc
from plsc.comm import Communicator, run_ranks
from plsc.strategies import convert_sync_bn
from plsc.train.settings import differences, settings_of


class Linear(plsc.Margin):
    def __init__(self, scale: float = 64.0, width: float = 0.3) -> None:
        super().__init__(scale)
        self.width = width

    def target(self, cos: Tensor) -> Tensor:
        return cos - self.width


class Counts(nn.Module):
    """A user's module whose words change while it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def extra_repr(self) -> str:
        self.calls += 1
        return f"calls={self.calls}"


def head(**options: object) -> nn.Module:
    return plsc.ClassParallelHead(4, 6, **options)  # type: ignore[arg-type]


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), *layers, nn.Flatten(), nn.Linear(64, 4))


def said(caplog: pytest.LogCaptureFixture, path: Path, **parts: object) -> list[str]:
    """The warnings of a load."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "plsc"):
        plsc.load(path, **parts)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


CASES = {
    "margin's argument": (
        head(margin=plsc.ArcFace(margin=0.5)),
        head(margin=plsc.ArcFace(margin=0.3)),
        "part/margin: got ArcFace(scale=64.0, margin=0.3, gradient='true'), "
        "saved ArcFace(scale=64.0, margin=0.5, gradient='true')",
    ),
    "scale": (
        head(margin=plsc.CosFace(scale=16.0)),
        head(margin=plsc.CosFace()),
        "part/margin: got CosFace(scale=64.0, margin=0.35), saved CosFace(scale=16.0, margin=0.35)",
    ),
    "kind of margin": (
        head(margin=plsc.CosFace(margin=0.3)),
        head(margin=Linear()),
        "part/margin: got Linear(scale=64.0, width=0.3), saved CosFace(scale=64.0, margin=0.3)",
    ),
    "sampling": (
        head(sample_rate=0.5, seed=3),
        head(),
        "part: got ClassParallelHead(sample_rate=1.0, filter_threshold=None), "
        "saved ClassParallelHead(sample_rate=0.5, seed=3, filter_threshold=None)",
    ),
    "row optimizer": (
        head(head_optimizer=plsc.SGD(0.1, 5e-4, momentum=0.9)),
        head(head_optimizer=plsc.SGD(0.2, 1e-4, momentum=0.9)),
        "part: got ClassParallelHead(sample_rate=1.0, filter_threshold=None, head_optimizer=SGD(weight_decay=0.0001, "
        "momentum=0.9, nesterov=False, state_dtype='fp32', unsampled='still')), saved ClassParallelHead(sample_rate="
        "1.0, filter_threshold=None, head_optimizer=SGD(weight_decay=0.0005, momentum=0.9, nesterov=False, "
        "state_dtype='fp32', unsampled='still'))",
    ),
    "activation": (net(nn.ReLU()), net(nn.Tanh()), "part/2: got Tanh(), saved ReLU()"),
    "stride": (
        nn.Conv2d(1, 2, 3, stride=2),
        nn.Conv2d(1, 2, 3),
        "part: got Conv2d(1, 2, kernel_size=(3, 3), stride=(1, 1)), "
        "saved Conv2d(1, 2, kernel_size=(3, 3), stride=(2, 2))",
    ),
    "kind of backbone": (
        nn.Sequential(nn.Linear(2, 2)),
        nn.ModuleList([nn.Linear(2, 2)]),
        "part: got ModuleList(), saved Sequential()",
    ),
    "a layer less": (
        nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Dropout(0.4)}),
        nn.ModuleDict({"a": nn.Linear(2, 2)}),
        "part/b: got nothing, saved Dropout(p=0.4, inplace=False)",
    ),
}


@pytest.mark.parametrize(("old", "new", "text"), CASES.values(), ids=CASES)
def test_what_differs_is_a_sentence(
    old: nn.Module, new: nn.Module, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plsc.save(tmp_path / "c", part=old)
    where = tmp_path / "c"
    assert said(caplog, where, part=new) == [f"{where} was saved with other settings: {text}; right if meant"]
    assert said(caplog, where, part=old) == []
    for name, value in new.state_dict().items():  # training may go on: it is loaded all the same
        assert torch.equal(value, old.state_dict()[name])


def test_what_trains_alike_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Batch statistics of all ranks or of one, a rate that a schedule moved, a seed that nothing draws from."""
    moved = plsc.SGD(0.1, momentum=0.9)
    moved.lr = 0.01
    saved = {
        "norm": convert_sync_bn(net(nn.ReLU()), plsc.world()),
        "head": head(head_optimizer=moved, seed=1),
        "own": nn.Sequential(Counts()),
    }
    plsc.save(tmp_path / "c", **saved)
    live = {
        "norm": net(nn.ReLU()),
        "head": head(head_optimizer=plsc.SGD(0.5, momentum=0.9), seed=2),
        "own": nn.Sequential(Counts()),
    }
    assert said(caplog, tmp_path / "c", **live) == []


def test_rank_0_says_it_and_many_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def save(comm: Communicator) -> None:
        layers = nn.Sequential(*(nn.Dropout(0.1) for _ in range(7)))
        plsc.save(tmp_path / "c", comm=comm, net=layers, head=plsc.ClassParallelHead(4, 6, comm=comm))

    def load(comm: Communicator) -> None:
        layers = nn.Sequential(*(nn.Dropout(0.2) for _ in range(7)))
        plsc.load(tmp_path / "c", comm=comm, net=layers, head=plsc.ClassParallelHead(4, 6, comm=comm))

    run_ranks(2, save)
    with caplog.at_level(logging.WARNING, "plsc"):
        run_ranks(3, load)  # other rows of the head on each rank: no other settings
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.count("got Dropout(p=0.2, inplace=False)") == 4 and "; and 3 more; right if meant" in text


def test_another_torch_may_use_other_words() -> None:
    old, new = settings_of(nn.Sequential(nn.Dropout(0.1))), settings_of(nn.Sequential(nn.Dropout(0.2)))
    assert differences(old, new, words=False) == {}
    assert differences(old, new, words=True) == {
        "0": ["Dropout(p=0.1, inplace=False)", "Dropout(p=0.2, inplace=False)"]
    }
    assert list(differences(old, settings_of(nn.Sequential(nn.ReLU())), words=False)) == ["0"]


@pytest.mark.parametrize(("old", "new"), [("fp32", "bf16"), ("bf16", "split"), ("split", "bf16"), ("split", "fp32")])
def test_another_type_of_weight_is_refused(old: str, new: str, tmp_path: Path) -> None:
    """What is not in the words of a head is in its tensors."""
    kinds = (head(head_optimizer=plsc.SGD(0.1), weight_dtype=kind) for kind in (old, new))
    plsc.save(tmp_path / "c", head=next(kinds))
    with pytest.raises(ValueError, match=r"row_low|torch\.bfloat16"):
        plsc.load(tmp_path / "c", head=next(kinds))
