"""Mixed precision: the loss scale, norms that count each weight once, and finding the tensor that went wrong."""

import copy
import json
import math

import pytest
import torch
from torch import Tensor, nn

from plsc.comm import Communicator, LocalCommunicator, Shard, mark, run_ranks
from plsc.strategies import (
    LossScaler,
    any_nonfinite,
    autocast,
    clip_grad_norm_,
    first_nonfinite,
    grad_norm,
    nonfinite_names,
)

ALONE = LocalCommunicator("cpu")


@pytest.mark.parametrize(("amp", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_by_name(amp: str, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast(amp, "cpu"):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype
    with pytest.raises(ValueError, match="expected one of fp32, bf16, fp16"):
        autocast("half", "cpu")


def params_with(*grads: Tensor | None) -> list[nn.Parameter]:
    params = []
    for grad in grads:
        param = nn.Parameter(torch.zeros(2 if grad is None else grad.shape))
        param.grad = grad
        params.append(param)
    return params


def test_unscaling_undoes_scaling_exactly() -> None:
    scaler, param = LossScaler(), nn.Parameter(torch.tensor([1.1, -3.7]))
    (expected,) = torch.autograd.grad(param.square().sum(), param)
    scaler.scale(param.square().sum()).backward()
    assert param.grad is not None and (param.grad == expected * 2**16).all()
    found = scaler.unscale_([param, *params_with(None)])
    assert torch.equal(param.grad, expected) and found.shape == () and found.dtype == torch.float32 and found == 0
    with pytest.raises(RuntimeError, match="twice"):
        scaler.unscale_([param])
    scaler.update(bool(found))
    scaler.unscale_([param])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_gradient_is_found(bad: float) -> None:
    params = params_with(torch.ones(3), torch.zeros(0, 4), torch.tensor([0.0, bad]), None, torch.full((2,), 3e38))
    assert LossScaler().unscale_(params) == 1
    assert any_nonfinite([torch.ones(3), torch.tensor(bad)]) == 1
    assert any_nonfinite([torch.full((9,), 3e38), torch.zeros(0)]) == 0
    assert any_nonfinite([]) == 0


def test_scale_grows_after_the_interval_and_shrinks_at_an_overflow() -> None:
    scaler = LossScaler(init=8.0, interval=3)
    scales = []
    for found in (False, False, False, False, False, True, False, False, False):
        scaler.update(found)
        scales.append(scaler.loss_scale)
    assert scales == [8, 8, 16, 16, 16, 8, 8, 8, 16]
    with pytest.raises(FloatingPointError, match="bf16"):
        for _ in range(5):
            scaler.update(True)
    assert scaler.loss_scale == 0.5


def test_scaler_resumes_from_json() -> None:
    first = LossScaler(init=4.0, interval=2)
    first.update(False)
    second = LossScaler(interval=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.update(False)
    assert second.loss_scale == 8
    with pytest.raises(ValueError, match="expected loss_scale"):
        second.load_state_dict({"scale": 1.0})
    with pytest.raises(ValueError, match="backoff"):
        LossScaler(backoff=1.0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_norm_counts_replicated_weights_once_and_cut_ones_over_ranks(world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    cut = torch.randn(5, 2, generator=generator, dtype=torch.float64)  # 4 ranks: 2, 2, 1, 0 rows
    expected = torch.cat([whole.flatten(), cut.flatten()]).norm()

    def rank(comm: Communicator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shard = Shard.of(5, comm)
        params = [nn.Parameter(torch.zeros_like(whole)), nn.Parameter(torch.zeros_like(cut[shard.start : shard.stop]))]
        mark(params[1], shard)
        params[0].grad = whole.clone()
        if shard.size:  # an empty shard may well have no gradient
            params[1].grad = cut[shard.start : shard.stop].clone()
        norm = grad_norm(params, comm)
        assert torch.equal(clip_grad_norm_(params, 1.0, comm), norm)
        return norm, grad_norm(params, comm), params[0].grad, clip_grad_norm_(params, 99.0, comm, norm=norm)

    for norm, clipped, first, given in run_ranks(world_size, rank):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(clipped, torch.ones_like(norm), rtol=1e-6, atol=0)
        torch.testing.assert_close(first, whole / (expected + 1e-6), rtol=1e-12, atol=0)
        assert given is norm


def test_norm_of_half_precision_gradients_does_not_overflow() -> None:
    param = nn.Parameter(torch.zeros(100, dtype=torch.float16))
    param.grad = torch.full_like(param, 6e4)
    assert grad_norm([param], ALONE) == pytest.approx(6e5, rel=1e-3)
    assert grad_norm([], ALONE) == 0


def test_a_norm_that_is_not_finite_is_seen_on_all_ranks_and_clips_nothing() -> None:
    def rank(comm: Communicator) -> tuple[float, float]:
        cut, whole = params_with(torch.full((1,), math.inf if comm.rank == 1 else 1.0), torch.full((2,), 7.0))
        mark(cut, Shard.of(3, comm))
        norm = clip_grad_norm_([cut, whole], 1.0, comm)
        assert whole.grad is not None
        return float(norm), float(whole.grad[0])

    assert run_ranks(3, rank) == [(math.inf, 7.0)] * 3


def test_norm_refuses_the_wrong_communicator() -> None:
    with pytest.raises(ValueError, match="cut over 4 ranks"):
        grad_norm([mark(nn.Parameter(torch.ones(1)), Shard(4, 0, 4))], ALONE)
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_([], 0.0, ALONE)


def test_nonfinite_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.grad = torch.tensor([[1.0, math.nan], [0.0, 0.0]])
    with torch.no_grad():
        model[1].bias[0] = math.inf
    assert nonfinite_names(model.named_parameters()) == ["0.weight (gradient)", "1.bias (parameter)"]


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.layer2 = nn.Linear(3, 2)
        self.spare = nn.Linear(1, 1)

    def forward(self, x: Tensor, *, add: Tensor | None = None) -> Tensor:
        x = self.layer1(x)
        return self.layer2(x if add is None else x + add)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("", None),
        ("layer1.0.weight", "backbone.layer1.0.weight (parameter)"),
        ("layer2.bias", "backbone.layer2.bias (parameter)"),
        ("layer1.1.running_mean", "backbone.layer1.1.running_mean (buffer)"),
        ("spare.weight", "backbone.spare.weight (parameter)"),
        ("x", "backbone input"),
        ("add", "backbone input"),
        ("overflow", "backbone.layer2 output"),
    ],
)
def test_first_nonfinite(place: str, name: str | None) -> None:
    torch.manual_seed(0)
    model, head = Backbone(), nn.ModuleDict({"loss": nn.CrossEntropyLoss()})
    x, add = torch.randn(4, 2), torch.zeros(3)
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if key == place:
                value.view(-1)[0] = math.nan
        if place in ("x", "add"):
            {"x": x, "add": add}[place].view(-1)[0] = math.inf
        if place == "overflow":
            model.layer2.weight.mul_(1e38).mul_(5)
            model.layer1[1].weight.mul_(1e6)
    before = copy.deepcopy(model.state_dict())

    def run() -> Tensor:
        loss: Tensor = head["loss"](model(x, add=add), torch.zeros(4, dtype=torch.long))
        return loss

    assert first_nonfinite({"backbone": model, "head": head}, run) == name
    after = model.state_dict()
    assert all(torch.equal(before[key].nan_to_num(), after[key].nan_to_num()) for key in before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_first_nonfinite_survives_a_forward_that_breaks_only_if_it_has_an_answer() -> None:
    model = nn.Linear(1, 1)

    def run() -> None:
        model(torch.tensor([[value]]))
        raise RuntimeError("broken")

    value = math.nan
    assert first_nonfinite({"m": model}, run) == "m input"
    value = 1.0
    with pytest.raises(RuntimeError, match="broken"):
        first_nonfinite({"m": model}, run)
