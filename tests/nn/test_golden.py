"""Margin softmax cross-entropy against recorded vectors of Paddle's formula, forward and backward."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from plsc.nn.margins import ArcFace, CombinedMargin, CosFace, Margin, NormFace

NAMES = ("softmax", "arcface", "cosface035", "cosface040", "sphereface", "combined")
SCALES = (1, 16, 64)


@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, np.ndarray]:
    path = shared / "reference" / "golden" / "composed_margin_ce_paddlecpu.npz"
    if not path.is_file():
        pytest.skip(f"needs {path.name}")
    with np.load(path) as file:
        return dict(file)


def cross_entropy(margin: Margin, cosines: Tensor, labels: Tensor) -> Tensor:  # [N, C], [N] -> [N]
    """The plain way: all logits at once, the own-class one replaced."""
    own = cosines.gather(1, labels[:, None])  # [N, 1]
    logits = margin.scale * cosines.scatter(1, labels[:, None], margin.target(own[:, 0])[:, None])
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def single(name: str, scale: float) -> tuple[Margin, float]:
    """The margin a user would take for that name, and the largest theta at which it has no fallback."""
    return {
        "softmax": (NormFace(scale), np.pi),
        "arcface": (ArcFace(scale, 0.5), np.pi - 0.5),
        "cosface035": (CosFace(scale, 0.35), np.pi),
        "cosface040": (CosFace(scale, 0.40), np.pi),
        "sphereface": (CombinedMargin(scale, m1=1.35, m2=0.0, m3=0.0), np.pi / 1.35),
        "combined": (CombinedMargin(scale, m1=0.9, m2=0.4, m3=0.15), (np.pi - 0.4) / 0.9),
    }[name]


def compare(golden: dict[str, np.ndarray], key: str, margin: Margin, rows: np.ndarray, dtype: torch.dtype) -> None:
    cosines = torch.tensor(golden["logits"], dtype=dtype, requires_grad=True)
    loss = cross_entropy(margin, cosines, torch.tensor(golden["label"]))
    loss.backward(torch.tensor(golden["grad_loss"][:, 0], dtype=dtype))
    double = dtype == torch.float64
    bits, limits = ("f64", (1e-12, 1e-12)) if double else ("f32", (1e-5, 1e-4))
    assert cosines.grad is not None
    for value, name in ((loss.detach(), "loss"), (cosines.grad, "dlogits")):
        recorded = golden[f"{key}_{bits}_{name}"].reshape(value.shape)
        np.testing.assert_allclose(value.numpy()[rows], recorded[rows], rtol=limits[0], atol=limits[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_without_fallback_every_row(golden: dict[str, np.ndarray], name: str, scale: int, dtype: torch.dtype) -> None:
    key = f"{name}_s{scale}"
    m1, m2, m3, s = golden[f"{key}_margins"].tolist()
    margin = CombinedMargin(s, m1=m1, m2=m2, m3=m3, fallback=False)
    compare(golden, key, margin, np.ones(8, dtype=bool), dtype)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_named_margins_below_their_fallback(golden: dict[str, np.ndarray], name: str, scale: int) -> None:
    margin, limit = single(name, float(scale))
    theta = np.arccos(golden["logits"][np.arange(8), golden["label"]])
    rows = theta < limit
    assert rows.sum() >= 6  # the file has own-class cosines from -0.98 to 0.98
    compare(golden, f"{name}_s{scale}", margin, rows, torch.float64)


@pytest.mark.parametrize("name", ["arcface", "sphereface", "combined"])
def test_straight_through_leaves_the_margin_out_of_the_gradient(golden: dict[str, np.ndarray], name: str) -> None:
    m1, m2, m3, s = golden[f"{name}_s16_margins"].tolist()
    labels = torch.tensor(golden["label"])
    grads, losses = [], []
    for gradient in ("true", "straight_through"):
        margin = CombinedMargin(s, m1=m1, m2=m2, m3=m3, fallback=False, gradient=gradient)
        cosines = torch.tensor(golden["logits"], requires_grad=True)
        loss = cross_entropy(margin, cosines, labels)
        loss.sum().backward()
        assert cosines.grad is not None
        grads.append(cosines.grad)
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1])
    own = cosines.detach().gather(1, labels[:, None])
    theta = torch.acos(own)
    slope = torch.ones_like(grads[0])
    slope.scatter_(1, labels[:, None], m1 * torch.sin(m1 * theta + m2) / torch.sin(theta))  # d target / d cos
    torch.testing.assert_close(grads[1] * slope, grads[0])
