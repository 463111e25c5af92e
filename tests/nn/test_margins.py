"""Margins against formulas written with acos in float64; true gradients, monotone, finite at the ends of the range."""

import math

import pytest
import torch
from torch import Tensor

import plsc
from plsc.nn.margins import (
    MARGINS,
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    CurricularFace,
    MagFace,
    Margin,
    NormFace,
    SphereFace,
)

PI = math.pi

# every monotone margin: the defaults and the corners of the arguments
MONOTONE: list[Margin] = [
    NormFace(),
    ArcFace(),
    ArcFace(margin=0.0),
    ArcFace(margin=PI / 2),
    CosFace(),
    *(SphereFace(margin=m) for m in (1, 2, 3, 4)),
    CombinedMargin(),
    CombinedMargin(m1=0.9, m2=0.4, m3=0.15),
    CombinedMargin(m1=1.35, m2=0.0, m3=0.0),
    CombinedMargin(m1=2.5, m2=1.0, m3=0.1),
    AdaFace(),
    CurricularFace(),
    MagFace(),
]
ALL: list[Margin] = [
    *MONOTONE,
    ArcFace(gradient="straight_through"),
    CombinedMargin(gradient="straight_through"),
    CombinedMargin(m1=1.35, fallback=False),
]


def named(margin: Margin) -> str:
    return str(margin).replace(" ", "")


def target(margin: Margin, cos: Tensor, norm: float = 30.0) -> Tensor:
    if margin.needs_norms:
        return margin.target(cos, torch.full_like(cos, norm))  # type: ignore[call-arg]
    return margin.target(cos)


def grid(num: int = 20001) -> Tensor:
    """Angles from 0 to pi, both included."""
    return torch.linspace(0, PI, num, dtype=torch.float64)


@pytest.mark.parametrize("margin", MONOTONE, ids=named)
@pytest.mark.parametrize("norm", [0.0, 20.0, 200.0])
def test_monotone(margin: Margin, norm: float) -> None:
    value = target(margin, torch.cos(grid()), norm)
    assert (value.diff() <= 1e-12).all()
    assert value[0] > value[-1]


@pytest.mark.parametrize("margin", ALL, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_at_the_ends_and_beyond(margin: Margin, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    steps = torch.tensor([0, 0.5, 1, 2, 3, 4, 8, 64], dtype=dtype) * eps
    cos = torch.cat([1 - steps, 1 + steps, -1 + steps, -1 - steps]).requires_grad_()
    value = target(margin, cos)
    (gradient,) = torch.autograd.grad(value.sum(), cos)
    assert value.dtype == dtype
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    if any(margin is one for one in MONOTONE):
        assert (gradient >= 0).all()


@pytest.mark.parametrize("margin", ALL, ids=named)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(margin: Margin, dtype: torch.dtype) -> None:
    cos = torch.linspace(-1, 1, 41).to(dtype)
    value = target(margin, cos)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, target(margin, cos.float()))


@pytest.mark.parametrize("margin", [m for m in ALL if getattr(m, "gradient", "true") == "true"], ids=named)
def test_gradient_is_the_derivative(margin: Margin) -> None:
    # odd steps stay off the kinks
    cos = torch.cos(torch.linspace(0.0137, PI - 0.0171, 23, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda c: target(margin, c), cos)


@pytest.mark.parametrize("m", [0.0, 0.3, 0.5, PI / 2])
def test_arcface(m: float) -> None:
    theta = grid(1001)
    expected = torch.where(theta + m > PI, torch.cos(theta) - m * math.sin(m), torch.cos(theta + m))
    torch.testing.assert_close(ArcFace(margin=m).target(torch.cos(theta)), expected, atol=1e-7, rtol=0)


def test_arcface_steps_down_where_the_fallback_takes_over() -> None:
    theta = torch.tensor([PI - 0.5 - 1e-9, PI - 0.5 + 1e-9], dtype=torch.float64)
    before, after = ArcFace().target(torch.cos(theta)).tolist()
    assert before - after == pytest.approx(math.cos(0.5) + 0.5 * math.sin(0.5) - 1, abs=1e-6)


@pytest.mark.parametrize("m", [0.0, 0.35, 0.4])
def test_cosface(m: float) -> None:
    cos = torch.linspace(-1, 1, 101, dtype=torch.float64)
    torch.testing.assert_close(CosFace(margin=m).target(cos), cos - m)
    torch.testing.assert_close(NormFace().target(cos), cos)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7])
def test_sphereface(m: int) -> None:
    theta = grid(1001)[:-1]
    k = torch.floor(m * theta / PI)
    expected = (-1) ** k * torch.cos(m * theta) - 2 * k
    torch.testing.assert_close(SphereFace(margin=m).target(torch.cos(theta)), expected, atol=1e-12, rtol=0)
    assert SphereFace(margin=m).target(torch.tensor([-1.0, 1.0])).tolist() == pytest.approx([1 - 2 * m, 1])


@pytest.mark.parametrize(("m1", "m2", "m3"), [(0.9, 0.4, 0.15), (1.35, 0.0, 0.0), (1.0, 0.3, 0.2), (2.5, 1.0, 0.1)])
def test_combined(m1: float, m2: float, m3: float) -> None:
    theta = grid(1001)
    phi = m1 * theta + m2
    value = CombinedMargin(m1=m1, m2=m2, m3=m3).target(torch.cos(theta))
    plain = CombinedMargin(m1=m1, m2=m2, m3=m3, fallback=False).target(torch.cos(theta))
    torch.testing.assert_close(plain, torch.cos(phi) - m3, atol=2e-7, rtol=0)
    below = phi < PI - 1e-6
    torch.testing.assert_close(value[below], plain[below])
    if m1 != 1:  # continuous where the continuation takes over, and with slope
        k = torch.floor(phi / PI)
        torch.testing.assert_close(value, (-1) ** k * torch.cos(phi) - 2 * k - m3, atol=2e-7, rtol=0)
        assert value.diff().abs().max() <= 1.001 * m1 * PI / 1000


def test_combined_contains_the_others() -> None:
    cos = torch.cos(grid(1001))
    for combined, single in [
        (CombinedMargin(m1=1, m2=0.5, m3=0), ArcFace(margin=0.5)),
        (CombinedMargin(m1=1, m2=0, m3=0.35), CosFace(margin=0.35)),
        (CombinedMargin(m1=3, m2=0, m3=0), SphereFace(margin=3)),
        (CombinedMargin(m1=1, m2=0.5, m3=0, gradient="straight_through"), ArcFace(gradient="straight_through")),
    ]:
        torch.testing.assert_close(combined.target(cos), single.target(cos), atol=3e-7, rtol=0)


@pytest.mark.parametrize(
    "margin", [ArcFace(gradient="straight_through"), CombinedMargin(m1=0.9, gradient="straight_through")], ids=named
)
def test_straight_through(margin: Margin) -> None:
    theta = grid(101)
    cos = torch.cos(theta).requires_grad_()
    value = margin.target(cos)
    (gradient,) = torch.autograd.grad(value.sum(), cos)
    assert (gradient == 1).all()
    m1, m2, m3 = (getattr(margin, name, default) for name, default in (("m1", 1), ("m2", 0.5), ("m3", 0)))
    torch.testing.assert_close(value.detach(), torch.cos(m1 * theta + m2) - m3, atol=1e-7, rtol=0)
    if isinstance(margin, ArcFace):
        assert value[-1].item() == pytest.approx(-0.8776, abs=1e-4)  # InsightFace's answer at cos = -1


def test_true_gradient_of_arcface_at_one_cosine() -> None:
    cos = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(64 * ArcFace().target(cos), cos)
    theta = math.acos(0.3)
    assert gradient.item() == pytest.approx(64 * math.sin(theta + 0.5) / math.sin(theta))
    assert gradient.item() == pytest.approx(65.81, abs=0.01)


def test_adaface() -> None:
    margin = AdaFace(margin=0.4, h=0.333)
    margin.batch_mean.fill_(20.0)
    margin.batch_std.fill_(5.0)
    theta = torch.tensor([0.0, 0.1, 1.0, 1.5, 3.0, PI], dtype=torch.float64)
    for norm in (1e-5, 12.0, 20.0, 31.0, 1000.0):
        norms = torch.full_like(theta, norm, requires_grad=True)
        z = max(-1.0, min(1.0, (min(max(norm, 1e-3), 100) - 20) / (5 + 1e-3) * 0.333))
        expected = torch.cos((theta - 0.4 * z).clamp(1e-3, PI - 1e-3)) - (0.4 + 0.4 * z)
        value = margin.target(torch.cos(theta).requires_grad_(), norms)
        torch.testing.assert_close(value, expected, atol=1e-7, rtol=0)
        value.sum().backward()
        assert norms.grad is None  # quality is read, not learnt


def test_adaface_statistics() -> None:
    margin = AdaFace(t_alpha=0.1)
    assert (margin.batch_mean.item(), margin.batch_std.item()) == (20, 100)
    norms = torch.tensor([10.0, 30.0, 500.0, 0.0], requires_grad=True)
    margin.update(torch.zeros(4), norms)
    clipped = torch.tensor([10.0, 30.0, 100.0, 1e-3])
    torch.testing.assert_close(margin.batch_mean, 0.9 * 20 + 0.1 * clipped.mean())
    torch.testing.assert_close(margin.batch_std, 0.9 * 100 + 0.1 * clipped.std())
    before = margin.batch_mean.clone(), margin.batch_std.clone()
    margin.update(torch.zeros(0), torch.zeros(0))  # no valid sample
    assert (margin.batch_mean, margin.batch_std) == before
    margin.update(torch.zeros(1), torch.ones(1))  # one: a mean, no spread
    assert margin.batch_std == before[1]
    assert margin.batch_mean < before[0]
    assert set(margin.state_dict()) == {"batch_mean", "batch_std"}
    with pytest.raises(ValueError, match="got no norms"):
        margin.update(torch.zeros(4), None)


@pytest.mark.parametrize("num_valid", [0, 1, 2, 5])
@pytest.mark.parametrize("make", [AdaFace, CurricularFace])
def test_statistics_of_the_samples_that_count(make: type, num_valid: int) -> None:
    """A mask tells as much as picking the samples does; what is ignored may be anything."""
    g = torch.Generator().manual_seed(num_valid)
    own, norms = torch.rand(7, generator=g), torch.rand(7, generator=g) * 50
    valid = torch.randperm(7, generator=g) < num_valid
    picked, masked = make().double(), make().double()
    assert masked.takes_valid
    picked.update(own[valid], norms[valid])
    ignored = [torch.where(valid, values, math.nan) for values in (own, norms)]
    masked.update(*ignored, valid)
    for name, value in picked.state_dict().items():
        torch.testing.assert_close(masked.state_dict()[name], value, rtol=1e-12, atol=0)
    moved = any(value != make().state_dict()[name] for name, value in masked.state_dict().items())
    assert moved == (num_valid > 0)


def test_an_update_gets_what_it_asks_for() -> None:
    """Without `valid` the samples that count, with it all of them."""
    seen: list[tuple[int, ...]] = []

    class Plain(ArcFace):
        def update(self, own: Tensor, norms: Tensor | None) -> None:
            seen.append((len(own), len(norms)))

    class Masks(ArcFace):
        def update(self, own: Tensor, norms: Tensor | None, valid: Tensor | None = None) -> None:
            seen.append((len(own), len(norms), int(valid.sum())))

    x, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([0, -1, 2, 1, -1])
    for margin in (Plain(), Masks(), ArcFace()):
        head = plsc.ClassParallelHead(4, 3, margin=margin)
        head(x, labels)
        head(x, torch.full_like(labels, -1))
    assert seen == [(3, 3), (5, 5, 3), (5, 5, 0)]


def test_curricularface() -> None:
    margin = CurricularFace(alpha=0.25)
    margin.update(torch.tensor([0.2, 0.6]), None)
    assert margin.t.item() == pytest.approx(0.1)
    margin.update(torch.tensor([1.0, 1.0 + 1e-6]), None)
    assert margin.t.item() == pytest.approx(0.325)
    margin.update(torch.zeros(0), None)
    assert margin.t.item() == pytest.approx(0.325)

    own = torch.tensor([[0.9], [0.2], [-0.95]], dtype=torch.float64)
    cos = torch.linspace(-1, 1, 21, dtype=torch.float64).repeat(3, 1)
    limit = torch.cos(torch.acos(own) + 0.5)
    expected = torch.where(cos <= limit, cos, cos * (margin.t.double() + cos))
    torch.testing.assert_close(margin.others(cos, own), expected)
    assert margin.others(cos, own).abs().max() <= margin.bound
    theta = torch.acos(own)
    torch.testing.assert_close(margin.target(own[:2]), torch.cos(theta[:2] + 0.5))


def test_curricularface_others_has_the_true_gradient() -> None:
    margin = CurricularFace().double()
    margin.t.fill_(0.3)
    own = torch.tensor([[0.7], [-0.4]], dtype=torch.float64)
    cos = torch.linspace(-0.93, 0.97, 8, dtype=torch.float64).view(2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda c: margin.others(c, own), cos)


def test_magface() -> None:
    margin = MagFace()
    norms = torch.tensor([5.0, 10.0, 40.0, 110.0, 200.0], dtype=torch.float64)
    a = norms.clamp(10, 110)
    m = (0.8 - 0.45) / 100 * (a - 10) + 0.45
    for angle in (0.2, 1.4, 2.5, 3.1):
        theta = torch.full_like(norms, angle)
        expected = torch.where(theta + m > PI, torch.cos(theta) - m * torch.sin(m), torch.cos(theta + m))
        torch.testing.assert_close(margin.target(torch.cos(theta), norms), expected)
    regularizer = margin.regularizer(norms)
    assert regularizer is not None
    torch.testing.assert_close(regularizer, 35 * (a / 110**2 + 1 / a))


def test_magface_norms_receive_gradient() -> None:
    margin = MagFace()
    cos = torch.tensor([0.8, 0.1, -0.9, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    norms = torch.tensor([20.0, 60.0, 90.0, 8.0, 120.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(margin.target, (cos, norms))
    assert torch.autograd.gradcheck(margin.regularizer, norms)
    (gradient,) = torch.autograd.grad(margin.target(cos, norms).sum(), norms)
    assert (gradient[:3] < 0).all()  # a longer embedding has the larger margin
    assert (gradient[3:] == 0).all()  # outside the clip


def test_a_margin_of_ones_own() -> None:
    class Linear(Margin):
        def __init__(self, scale: float = 30.0, share: float = 0.3) -> None:
            super().__init__(scale)
            self.share = share

        def target(self, cos: Tensor) -> Tensor:
            return cos - self.share * torch.acos(cos.clamp(-1 + 1e-6, 1 - 1e-6)) / PI

    class Hard(Linear):
        def others(self, cos: Tensor, own: Tensor) -> Tensor:
            return cos * 3

    margin = Linear()
    assert (margin.moves_others, margin.bound, margin.needs_norms) == (False, 1.0, False)
    assert (Hard().moves_others, Hard().bound) == (True, math.inf)
    cos = torch.rand(2, 3)
    assert margin.others(cos, cos[:, :1]) is cos
    assert margin.regularizer(torch.ones(2)) is None
    margin.update(torch.ones(2), None)
    assert repr(margin) == "Linear(scale=30.0, share=0.3)"
    with pytest.raises(NotImplementedError, match="Margin does not define target"):
        Margin().target(cos)


def test_the_table_of_names() -> None:
    for name, kind in MARGINS.items():
        margin = kind()
        assert margin.scale == 64.0
        assert "scale=64.0" in repr(margin)
        assert isinstance(margin.bound, float), name
    assert [name for name, kind in MARGINS.items() if kind.needs_norms] == ["adaface", "magface"]
    assert [name for name, kind in MARGINS.items() if kind().moves_others] == ["curricularface"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArcFace(0.0), "scale is 0.0, expected"),
        (lambda: ArcFace(math.inf), "scale is inf"),
        (lambda: ArcFace(math.nan), "scale is nan"),
        (lambda: ArcFace("64"), "scale is '64'"),  # type: ignore[arg-type]
        (lambda: ArcFace(margin=2.0), "margin is 2.0, expected a finite number in"),
        (lambda: ArcFace(margin=-0.1), "margin is -0.1"),
        (lambda: ArcFace(gradient="exact"), "gradient is 'exact', expected one of true, straight_through"),
        (lambda: CosFace(margin=-0.1), "margin is -0.1"),
        (lambda: SphereFace(margin=1.35), "CombinedMargin"),  # type: ignore[arg-type]
        (lambda: SphereFace(margin=0), "margin is 0, expected a whole number"),
        (lambda: CombinedMargin(m1=0.0), "m1 is 0.0"),
        (lambda: CombinedMargin(m2=-1.0), "m2 is -1.0"),
        (lambda: CombinedMargin(m3=math.inf), "m3 is inf"),
        (lambda: AdaFace(h=-1.0), "h is -1.0"),
        (lambda: AdaFace(t_alpha=1.5), "t_alpha is 1.5"),
        (lambda: CurricularFace(alpha=-0.1), "alpha is -0.1"),
        (lambda: MagFace(lower_norm=0.0), "lower_norm is 0.0"),
        (lambda: MagFace(lower_norm=20.0, upper_norm=20.0), "upper_norm is 20.0"),
        (lambda: MagFace(upper_margin=0.2), "upper_margin is 0.2"),
    ],
)
def test_wrong_arguments_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
