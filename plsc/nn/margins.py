"""Margins: how a head makes the cosine between a sample and its own class harder to satisfy.

A margin sees only the cosines of samples with their own class, one number a sample, never the matrix of all classes.
Below, theta is the angle between an embedding and its own class centre and cos its cosine. Every margin keeps three
promises unless it says otherwise:

- the true gradient: what autograd returns is the derivative of the value returned;
- monotone: a larger theta never gives a larger cosine, also where theta plus the margin exceeds pi (cos(theta + m)
  would rise again there, and pull the worst samples away from their class);
- finite values and gradients for every cos, -1, 1 and rounding beyond them included. The sine is
  sqrt(max((1 - cos)(1 + cos), 4 eps)) with eps that of the dtype: within a few roundings of +-1 the sine is held still,
  and its derivative, infinite in the limit, is taken as 0 there (the embedding's own gradient vanishes there anyway).

Half precision input is computed and returned in float32.
"""

import contextlib
import copy
import inspect
import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from plsc.ops.checks import checked

__all__ = [
    "MARGINS",
    "AdaFace",
    "ArcFace",
    "CombinedMargin",
    "CosFace",
    "CurricularFace",
    "MagFace",
    "Margin",
    "NormFace",
    "SphereFace",
]

GRADIENTS = ("true", "straight_through")


Self = TypeVar("Self", bound="Margin")


class Margin(nn.Module):
    """What a head does to own-class cosines; subclass it and write `target`.

    `scale` multiplies all cosines before the softmax (the head does it, `target` does not).
    """

    needs_norms: bool = False  # True: target(cos, norms), with the norms of the embeddings before normalisation

    def __init__(self, scale: float = 64.0) -> None:
        super().__init__()
        self.scale = checked("scale", scale, 0.0, math.inf, open_low=True)

    def target(self, cos: Tensor) -> Tensor:  # [K] -> [K]
        """The cosines with the own class, modified and not scaled; autograd differentiates it."""
        raise NotImplementedError(f"{type(self).__name__} does not define target(cos)")

    def others(self, cos: Tensor, own: Tensor) -> Tensor:  # [N, n], [N, 1] -> [N, n]
        """The cosines with all other classes, elementwise, beside the (detached) own-class one. Default: unchanged."""
        return cos

    @property
    def moves_others(self) -> bool:
        """Whether this margin overrides `others`; a head skips the call where it does not."""
        return type(self).others is not Margin.others

    @property
    def bound(self) -> float:
        """Upper bound of |others(cos, own)|; inf where it is unknown (an `others` that states no bound)."""
        return math.inf if self.moves_others else 1.0

    def update(self, own: Tensor, norms: Tensor | None) -> None:  # [N], [N]
        """Called once a training forward, before `target`, with the global batch: for moving averages.

        Ignored samples are left out, for which the host waits where the head is on a GPU. An update with a third
        argument, `valid` [N] bool, gets all samples, of which these count, and nothing has to wait.
        """

    @property
    def takes_valid(self) -> bool:
        """Whether this margin's `update` tells ignored samples by itself."""
        return "valid" in inspect.signature(type(self).update).parameters

    def frozen(self: Self) -> Self:
        """A copy that no later change of this one reaches; made in each forward where `others` is overridden.

        It shares what cannot be copied, such as a communicator.
        """
        twin = copy.copy(self)
        memo = {id(self): twin}
        for name, value in self.__dict__.items():
            with contextlib.suppress(TypeError, RuntimeError):  # the latter of tensors that autograd made
                twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin

    def regularizer(self, norms: Tensor) -> Tensor | None:  # [B] -> [B]
        """A term added to the loss of each sample, or None."""
        return None

    def extra_repr(self) -> str:
        names = [name for name in inspect.signature(type(self).__init__).parameters if hasattr(self, name)]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class NormFace(Margin):
    """No margin: the plain softmax over scaled cosines.

    Source: Wang et al. 2017, NormFace.
    """

    def target(self, cos: Tensor) -> Tensor:
        return _wide(cos)


class ArcFace(Margin):
    """cos(theta + margin), and cos - margin * sin(margin) where theta + margin > pi.

    The second line is the usual linear fallback; it steps down by cos(m) + m sin(m) - 1 (0.117 at 0.5) where it takes
    over. `margin` is in radians, in [0, pi/2].
    gradient="straight_through" reproduces InsightFace's arcface_torch since December 2022: the value
    cos(theta + margin) for every theta, without the fallback (so not monotone), and a derivative of 1 by cos.
    Source: Deng et al. 2019, ArcFace.
    """

    def __init__(self, scale: float = 64.0, margin: float = 0.5, *, gradient: str = "true") -> None:
        super().__init__(scale)
        self.margin = checked("margin", margin, 0.0, math.pi / 2)
        self.gradient = _checked_gradient(gradient)

    def target(self, cos: Tensor) -> Tensor:
        cos = _wide(cos)
        if self.gradient == "straight_through":
            return _straight_through(cos, _added_angle(cos, self.margin))
        return _arc(cos, self.margin)


class CosFace(Margin):
    """cos - margin. (Its derivative is 1: straight-through and true gradient are the same.)

    Source: Wang et al. 2018, CosFace, and Wang et al. 2018, Additive Margin Softmax.
    """

    def __init__(self, scale: float = 64.0, margin: float = 0.35) -> None:
        super().__init__(scale)
        self.margin = checked("margin", margin, 0.0, math.inf)

    def target(self, cos: Tensor) -> Tensor:
        return _wide(cos) - self.margin


class SphereFace(Margin):
    """psi(theta) = (-1)^k cos(m theta) - 2k, with k = floor(m theta / pi) and m a whole number; from 1 to 1 - 2m.

    cos(m theta) is the Chebyshev polynomial T_m(cos), so the derivative is exact up to cos = +-1. The original works
    on |x| instead of a fixed scale and blends psi in slowly; here it is on `scale`, from the first step on.
    For m that is not whole take CombinedMargin(m1=m, m2=0, m3=0), the same function for whole m.
    Source: Liu et al. 2017, SphereFace (A-Softmax).
    """

    def __init__(self, scale: float = 64.0, margin: int = 4) -> None:
        super().__init__(scale)
        if not isinstance(margin, int | float) or margin % 1 != 0 or not 1 <= margin <= 16:
            raise ValueError(
                f"margin is {margin!r}, expected a whole number from 1 to 16; other multiples: CombinedMargin(m1=...)"
            )
        self.margin = int(margin)

    def target(self, cos: Tensor) -> Tensor:
        cos = _wide(cos)
        before, power = torch.ones_like(cos), cos  # T_0, T_1
        for _ in range(self.margin - 1):
            before, power = power, 2 * cos * power - before
        k = torch.zeros_like(cos)
        for j in range(1, self.margin):
            k = k + (cos < math.cos(j * math.pi / self.margin)).to(cos.dtype)
        return (1 - 2 * (k % 2)) * power - 2 * k


class CombinedMargin(Margin):
    """cos(m1 theta + m2) - m3: ArcFace (1, m, 0), CosFace (1, 0, m), SphereFace (m, 0, 0) and all between.

    Where m1 theta + m2 exceeds pi: with m1 = 1 the fallback of ArcFace, less m3; else SphereFace's continuation, with
    phi = m1 theta + m2 and k = floor(phi / pi) the cosine of phi becomes (-1)^k cos(phi) - 2k, continuous with its
    derivative. So each of the three is reproduced for every theta.
    fallback=False: cos(m1 theta + m2) - m3 for every theta (not monotone), as Paddle's margin operator.
    gradient="straight_through": that value too, and a derivative of 1 by cos, as InsightFace.
    Source: Deng et al. 2019, ArcFace, formula 4.
    """

    def __init__(
        self,
        scale: float = 64.0,
        *,
        m1: float = 1.0,
        m2: float = 0.3,
        m3: float = 0.2,
        fallback: bool = True,
        gradient: str = "true",
    ) -> None:
        super().__init__(scale)
        self.m1 = checked("m1", m1, 0.0, 16.0, open_low=True)
        self.m2 = checked("m2", m2, 0.0, math.pi / 2)
        self.m3 = checked("m3", m3, 0.0, math.inf)
        self.fallback = fallback
        self.gradient = _checked_gradient(gradient)

    def target(self, cos: Tensor) -> Tensor:
        cos = _wide(cos)
        fallback = self.fallback and self.gradient == "true"
        if self.m1 == 1.0:
            value = (_arc(cos, self.m2) if fallback else _added_angle(cos, self.m2)) if self.m2 else cos
        else:
            phi = self.m1 * _angle(cos) + self.m2
            value = torch.cos(phi)
            if fallback:
                k = torch.floor(phi.detach() / math.pi)
                value = (1 - 2 * (k % 2)) * value - 2 * k
        value = value - self.m3
        return value if self.gradient == "true" else _straight_through(cos, value)


class AdaFace(Margin):
    """A margin that follows image quality, read from the embedding's norm: angular for low norms, additive for high.

    z = clip((norm - batch_mean) / (batch_std + 1e-3) * h, -1, 1), norms clipped to [0.001, 100] and without gradient;
    the value is cos(clip(theta - m z, 1e-3, pi - 1e-3)) - (m + m z): monotone, and flat where the clip holds.
    batch_mean and batch_std are moving averages over the global batch, with weight t_alpha for the new one.
    Source: Kim et al. 2022, AdaFace; the constants are those of its authors' code.
    """

    needs_norms = True
    batch_mean: Tensor
    batch_std: Tensor

    def __init__(self, scale: float = 64.0, margin: float = 0.4, *, h: float = 0.333, t_alpha: float = 0.01) -> None:
        super().__init__(scale)
        self.margin = checked("margin", margin, 0.0, math.pi / 2)
        self.h = checked("h", h, 0.0, math.inf)
        self.t_alpha = checked("t_alpha", t_alpha, 0.0, 1.0)
        self.register_buffer("batch_mean", torch.tensor(20.0))
        self.register_buffer("batch_std", torch.tensor(100.0))

    @torch.no_grad()
    def update(self, own: Tensor, norms: Tensor | None, valid: Tensor | None = None) -> None:
        if norms is None:
            raise ValueError("AdaFace got no norms, expected those of the global batch, [N]")
        norms = _clipped_norms(norms).to(self.batch_mean.dtype)
        mean, count = _mean(norms, valid)
        variance = _mean((norms - mean).square(), valid)[0] * count / (count - 1).clamp_min(1)
        _follow(self.batch_mean, mean, self.t_alpha, count > 0)
        _follow(self.batch_std, variance.sqrt(), self.t_alpha, count > 1)  # the spread of one sample is not defined

    def target(self, cos: Tensor, norms: Tensor) -> Tensor:  # type: ignore[override]  # needs_norms
        cos = _wide(cos)
        norms = _clipped_norms(norms).to(cos.dtype)
        z = ((norms - self.batch_mean) / (self.batch_std + 1e-3) * self.h).clamp(-1, 1).to(cos.dtype)
        theta = (_angle(cos) - self.margin * z).clamp(1e-3, math.pi - 1e-3)
        return torch.cos(theta) - (self.margin + self.margin * z)


class CurricularFace(Margin):
    """ArcFace whose hard negatives count more as training goes on.

    A negative with cos_j > cos(theta + margin) becomes cos_j (t + cos_j); t is the moving average (weight alpha for
    the new batch) of the own-class cosines of the global batch, so hard negatives are damped first and raised later.
    Source: Huang et al. 2020, CurricularFace.
    """

    t: Tensor

    def __init__(self, scale: float = 64.0, margin: float = 0.5, *, alpha: float = 0.01) -> None:
        super().__init__(scale)
        self.margin = checked("margin", margin, 0.0, math.pi / 2)
        self.alpha = checked("alpha", alpha, 0.0, 1.0)
        self.register_buffer("t", torch.tensor(0.0))

    @property
    def bound(self) -> float:
        return 2.0  # |cos (t + cos)| with |t| <= 1

    @torch.no_grad()
    def update(self, own: Tensor, norms: Tensor | None, valid: Tensor | None = None) -> None:
        mean, count = _mean(own.to(self.t.dtype).clamp(-1, 1), valid)
        _follow(self.t, mean, self.alpha, count > 0)

    def target(self, cos: Tensor) -> Tensor:
        return _arc(_wide(cos), self.margin)

    def others(self, cos: Tensor, own: Tensor) -> Tensor:
        limit = _added_angle(_wide(own), self.margin)  # [N, 1]
        return torch.where(cos <= limit, cos, cos * (self.t.to(cos.dtype) + cos))


class MagFace(Margin):
    """ArcFace whose margin grows with the embedding's norm, which thereby learns to tell quality.

    With a = clip(norm, lower_norm, upper_norm) the margin rises linearly from lower_margin to upper_margin, and
    weight * (a / upper_norm^2 + 1 / a) is added to each sample's loss. The norms receive gradient from both
    (none outside the clip). `weight` is 35, the paper's lambda_g; some re-implementations use 20.
    Source: Meng et al. 2021, MagFace.
    """

    needs_norms = True

    def __init__(
        self,
        scale: float = 64.0,
        *,
        lower_norm: float = 10.0,
        upper_norm: float = 110.0,
        lower_margin: float = 0.45,
        upper_margin: float = 0.8,
        weight: float = 35.0,
    ) -> None:
        super().__init__(scale)
        self.lower_norm = checked("lower_norm", lower_norm, 0.0, math.inf, open_low=True)
        self.upper_norm = checked("upper_norm", upper_norm, self.lower_norm, math.inf, open_low=True)
        self.lower_margin = checked("lower_margin", lower_margin, 0.0, math.pi / 2)
        self.upper_margin = checked("upper_margin", upper_margin, self.lower_margin, math.pi / 2)
        self.weight = checked("weight", weight, 0.0, math.inf)

    def target(self, cos: Tensor, norms: Tensor) -> Tensor:  # type: ignore[override]  # needs_norms
        cos = _wide(cos)
        return _arc(cos, self.margin_of(norms.to(cos.dtype)))

    def margin_of(self, norms: Tensor) -> Tensor:  # [K] -> [K]
        """The margin, in radians, of embeddings with these norms."""
        slope = (self.upper_margin - self.lower_margin) / (self.upper_norm - self.lower_norm)
        return self.lower_margin + slope * (norms.clamp(self.lower_norm, self.upper_norm) - self.lower_norm)

    def regularizer(self, norms: Tensor) -> Tensor | None:
        a = _wide(norms).clamp(self.lower_norm, self.upper_norm)
        return self.weight * (a / self.upper_norm**2 + 1 / a)


MARGINS: dict[str, type[Margin]] = {
    "cosine": NormFace,
    "arcface": ArcFace,
    "cosface": CosFace,
    "sphereface": SphereFace,
    "combined": CombinedMargin,
    "adaface": AdaFace,
    "curricularface": CurricularFace,
    "magface": MagFace,
}


def _mean(values: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean of values [N] over the valid ones, 0 of none, and how many they are; on the device, without a wait."""
    valid = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
    count = valid.sum()
    return torch.where(valid, values, 0.0).sum() / count.clamp_min(1), count


def _follow(average: Tensor, new: Tensor, weight: float, defined: Tensor) -> None:
    """Moves an average by that weight towards a new value, where this is defined."""
    average.lerp_(new, defined.to(average.dtype) * weight)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _sine(cos: Tensor) -> Tensor:
    """sin(theta), from below never quite 0: see the top of this file."""
    return ((1 - cos) * (1 + cos)).clamp(min=4 * torch.finfo(cos.dtype).eps).sqrt()


def _angle(cos: Tensor) -> Tensor:
    """theta, by atan2: accurate near 0 and pi where acos is not, and with a finite derivative."""
    return torch.atan2(_sine(cos), cos)


def _added_angle(cos: Tensor, margin: float | Tensor) -> Tensor:
    """cos(theta + margin) for every theta, without computing theta."""
    if isinstance(margin, Tensor):
        return cos * torch.cos(margin) - _sine(cos) * torch.sin(margin)
    return cos * math.cos(margin) - _sine(cos) * math.sin(margin)


def _arc(cos: Tensor, margin: float | Tensor) -> Tensor:
    """cos(theta + margin), and the linear fallback cos - margin sin(margin) where theta + margin > pi."""
    if isinstance(margin, Tensor):
        return torch.where(cos < -torch.cos(margin), cos - margin * torch.sin(margin), _added_angle(cos, margin))
    return torch.where(cos < -math.cos(margin), cos - margin * math.sin(margin), _added_angle(cos, margin))


def _straight_through(cos: Tensor, value: Tensor) -> Tensor:
    """`value`, to the bit, with the derivative 1 with respect to `cos`."""
    return value.detach() + (cos - cos.detach())


def _clipped_norms(norms: Tensor) -> Tensor:
    return _wide(norms.detach()).clamp(1e-3, 100.0)


def _checked_gradient(gradient: str) -> str:
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient is {gradient!r}, expected one of {', '.join(GRADIENTS)}")
    return gradient
