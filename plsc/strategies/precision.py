"""Mixed precision: autocast by name, the loss scale of fp16, gradient norms over cut weights, the search for NaNs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from plsc.comm import Communicator, shard_of

AMP_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(amp: str, device: torch.device | str) -> torch.autocast:
    """The context to run a forward pass in: "bf16" and "fp16" are torch's autocast, "fp32" switches it off."""
    if amp not in AMP_DTYPES:
        raise ValueError(f"amp: got {amp!r}, expected one of {', '.join(AMP_DTYPES)}")
    kind = torch.device(device).type
    if amp == "fp32":
        return torch.autocast(kind, enabled=False)
    return torch.autocast(kind, dtype=AMP_DTYPES[amp])


class LossScaler:
    """The dynamic loss scale of fp16 training. Whether a step overflowed is told from outside, for ranks must agree.

    A step: scale(loss).backward(); found = unscale_(params); found agreed over ranks (max); optimizer.step() only if
    nothing was found; update(found). Source: Micikevicius et al. 2018, section 3.2.
    """

    def __init__(
        self, *, init: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        """The scale grows by `growth` after `interval` good steps in a row and shrinks by `backoff` at an overflow."""
        if not init >= 1.0 or not growth > 1.0 or not 0.0 < backoff < 1.0 or interval < 1:
            raise ValueError(
                f"LossScaler: got init={init}, growth={growth}, backoff={backoff}, interval={interval}; "
                "expected init >= 1, growth > 1, backoff in (0, 1), interval >= 1"
            )
        self.loss_scale = init
        self.good_steps = 0
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self._unscaled: set[int] = set()  # parameters whose gradients were unscaled since the last update

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.loss_scale

    def unscale_(self, params: Iterable[nn.Parameter]) -> Tensor:
        """Divides the gradients by the scale, in place.

        Returns: 0-d float32, 1.0 if a gradient of this rank is not finite, else 0.0; stays on the device.
        """
        with_grad = [param for param in params if param.grad is not None]
        ids = {id(param) for param in with_grad}
        if len(ids) != len(with_grad) or ids & self._unscaled:
            raise RuntimeError("unscale_ was called twice on a gradient; call it once a step, then update()")
        self._unscaled |= ids
        grads = _grads(with_grad)
        if grads:
            torch._foreach_mul_(grads, 1.0 / self.loss_scale)
        return any_nonfinite(grads)

    def update(self, found_nonfinite: bool) -> None:
        """Moves the scale; found_nonfinite must be the same on every rank.

        Raises FloatingPointError once the scale has fallen below 1: then the loss itself is not finite.
        """
        self._unscaled.clear()
        if not found_nonfinite:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.loss_scale *= self.growth
                self.good_steps = 0
            return
        self.loss_scale *= self.backoff
        self.good_steps = 0
        if self.loss_scale < 1.0:
            raise FloatingPointError(
                f"the loss scale fell to {self.loss_scale:g}: gradients overflow at any scale, so the loss or a weight "
                'is not finite or the run diverges; use amp="bf16", lower the rate, or look with first_nonfinite'
            )

    def state_dict(self) -> dict[str, float | int]:
        """JSON-able."""
        return {"loss_scale": self.loss_scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        if set(state) != {"loss_scale", "good_steps"}:
            raise ValueError(f"LossScaler: got keys {sorted(state)}, expected loss_scale and good_steps")
        self.loss_scale, self.good_steps = float(state["loss_scale"]), int(state["good_steps"])


def any_nonfinite(tensors: Iterable[Tensor]) -> Tensor:
    """0-d float32: 1.0 if an element of any of the tensors is inf or NaN, else 0.0; on their device, without a sync."""
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]  # a maximum over nothing is an error in torch
    if all(tensor.device.type == "cpu" for tensor in filled):  # there aminmax takes a twentieth of a norm's time
        return torch.tensor(float(any(not bool(torch.isfinite(end)) for x in filled for end in torch.aminmax(x))))
    return (~torch.isfinite(get_total_norm(filled, float("inf")))).float()


def grad_norm(params: Iterable[nn.Parameter], comm: Communicator) -> Tensor:
    """The L2 norm of the whole model's gradient: replicated parameters once, cut ones summed over the ranks.

    Collective where a parameter is cut. Replicated gradients must have been averaged before; then all ranks get the
    same bits, so that isfinite(norm) is a decision they agree on.
    Returns: 0-d, float32 or wider.
    """
    whole: list[nn.Parameter] = []
    cut: list[nn.Parameter] = []
    device = comm.device
    for param in params:
        shard = shard_of(param)
        if shard is not None and shard.world_size != comm.world_size:
            raise ValueError(
                f"grad_norm: got a parameter cut over {shard.world_size} ranks and a communicator of "
                f"{comm.world_size}; pass the communicator that the parameter was cut for"
            )
        device = param.device
        (whole if shard is None else cut).append(param)
    dtype = torch.float32  # by the parameters, not the gradients: a rank may have none of a cut parameter
    for param in [*whole, *cut]:
        dtype = torch.promote_types(dtype, param.dtype)
    square = _norm(whole, device).to(device, dtype) ** 2
    if cut:
        square = square + comm.all_reduce(_norm(cut, device).to(device, dtype) ** 2).wait()
    return square.sqrt()


def clip_grad_norm_(
    params: Iterable[nn.Parameter], max_norm: float, comm: Communicator, *, norm: Tensor | None = None
) -> Tensor:
    """Scales the gradients so that their joint norm is at most max_norm; returns the norm they had.

    norm: what grad_norm gave, where it is known already. A norm that is not finite leaves the gradients as they are:
    the caller sees it and skips the step.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: got max_norm {max_norm}, expected > 0")
    params = list(params)
    norm = grad_norm(params, comm) if norm is None else norm
    factor = torch.where(torch.isfinite(norm), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    for grad in _grads(params):
        grad.mul_(factor.to(grad.device))
    return norm


def nonfinite_names(named_params: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Which parameters and gradients hold an inf or NaN, as "name (parameter)" and "name (gradient)"; syncs."""
    found = []
    for name, param in named_params:
        if not _is_finite(param):
            found.append(f"{name} (parameter)")
        if param.grad is not None and not _is_finite(param.grad):
            found.append(f"{name} (gradient)")
    return found


def first_nonfinite(modules: Mapping[str, nn.Module], run: Callable[[], object]) -> str | None:
    """Runs a forward pass again, watching every submodule, and names the first tensor that is not finite.

    In order of execution: a module's inputs, its own parameters and buffers, its output; last what no call came by.
    Buffers (running statistics) are put back as they were. Slow: one sync a tensor. On several ranks all must call it.

    Args:
        modules: by the name that the answer begins with.
        run: the forward pass, for instance lambda: head(backbone(images), labels).
    Returns:
        such as "backbone.layer1.0.conv1.weight (parameter)" or "backbone.layer3 output"; None if all is finite.
    """
    found: list[str] = []
    named = {module: _join(top, name) for top, whole in modules.items() for name, module in whole.named_modules()}
    saved = [(buffer, buffer.clone()) for module in named for buffer in module.buffers(recurse=False)]

    def note(name: str, value: object) -> None:
        if not found and not all(_is_finite(tensor) for tensor in _tensors(value)):
            found.append(name)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note(f"{named[module]} input", (args, kwargs))
        _note_own(module, named[module], note)

    def after(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        note(f"{named[module]} output", output)

    handles: list[Any] = []
    try:
        for module in named:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        run()
    except Exception:
        if not found:  # a forward pass that breaks on bad values has already shown them
            raise
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
    for module, name in named.items():
        _note_own(module, name, note)
    return found[0] if found else None


def _note_own(module: nn.Module, name: str, note: Callable[[str, object], None]) -> None:
    for own, param in module.named_parameters(recurse=False):
        note(f"{name}.{own} (parameter)", param)
    for own, buffer in module.named_buffers(recurse=False):
        note(f"{name}.{own} (buffer)", buffer)


def _grads(params: Iterable[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _norm(params: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """The L2 norm of this rank's gradients, 0-d, and 0 on the device of none; half types are squared in float32."""
    grads = [grad for grad in _grads(params) if grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    return get_total_norm([g.float() if g.dtype in (torch.float16, torch.bfloat16) else g for g in grads])


def _is_finite(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(x.detach()).all())


def _tensors(value: object) -> Iterator[Tensor]:
    """Every tensor inside nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _join(top: str, name: str) -> str:
    return f"{top}.{name}" if name else top
