"""Recomputation: the same gradients bit for bit, statistics updated once, less memory kept, no collective repeated."""

import copy
import io
import time

import pytest
import torch
from torch import Tensor, nn

from plsc.comm import Communicator, LocalCommunicator, run_ranks
from plsc.models import iresnet18
from plsc.strategies import SyncBatchNorm, convert_sync_bn, recompute


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return x + gain * self.drop(torch.relu(self.norm(self.conv(x))))


class Net(nn.Module):
    """Two containers of blocks, some called with keywords, one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 1)
        self.layer1 = nn.Sequential(Block(), Block(), Block())
        self.layer2 = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.stem(x))
        for block in self.layer2:
            x = block(x, gain=0.5)
        return self.layer2[0](x).mean((1, 2, 3))


class Listed(Net):
    def recompute_blocks(self) -> list[nn.Module]:
        return [self.layer1[1]]


def make(kind: type[Net] = Net, momentum: float | None = 0.1) -> Net:
    torch.manual_seed(0)
    net = kind()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    return net


X = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(1))


def wrapped(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if "forward" in vars(module)]


def train(net: nn.Module, *, amp: bool = False) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Two steps: the loss, the gradients, and the state with its running statistics."""
    torch.manual_seed(5)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            loss = net(X).square().sum()
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in net.named_parameters()}, net.state_dict()  # type: ignore[misc]


@pytest.mark.parametrize("policy", ["full", "every:2", "selective", "blocks:0", "every:2 selective:0"])
@pytest.mark.parametrize("kind", [Net, Listed])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("amp", [False, True])
def test_same_bits_with_and_without(policy: str, kind: type[Net], momentum: float | None, amp: bool) -> None:
    plain, again = make(kind, momentum), make(kind, momentum)
    assert recompute(again, policy) is again
    assert again.state_dict().keys() == plain.state_dict().keys()
    for expected, got in zip(train(plain, amp=amp)[1:], train(again, amp=amp)[1:], strict=True):
        assert expected.keys() == got.keys()
        if policy == "selective" and amp:  # a block that is called twice adds its gradients up in another order
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        else:
            assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert plain.layer1[1].norm.num_batches_tracked == 2 and plain.layer2[0].norm.num_batches_tracked == 4


def test_which_blocks() -> None:
    everything = ["layer1.0", "layer1.1", "layer1.2", "layer2.0", "layer2.1"]
    net = make()
    assert wrapped(recompute(net, "full")) == everything
    assert wrapped(recompute(net, "every:2")) == everything[::2]  # the newest choice holds
    assert wrapped(recompute(net, "every:9")) == everything[:1]
    assert wrapped(recompute(net, "none")) == []
    assert wrapped(recompute(make(Listed), "full")) == ["layer1.1"]
    assert wrapped(recompute(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), "every:2")) == ["0"]


ONE_WORD = ["all", "every:", "every:0", "every:-1", "every:two", "", "blocks:", "blocks:3-2", "blocks:a", "full:1"]
CLAUSES = [
    "selective:",
    "selective:2-1",
    "selective:a",
    "selective full",
    "full every:2",
    "none full",
    "full  selective",
]


@pytest.mark.parametrize("policy", [*ONE_WORD, *CLAUSES, "selective selective"])
def test_unknown_policy(policy: str) -> None:
    with pytest.raises(ValueError, match="every:k"):
        recompute(make(), policy)


def test_nothing_to_wrap() -> None:
    with pytest.raises(ValueError, match="no blocks in Linear"):
        recompute(nn.Linear(1, 1), "full")
    net = make()
    net.layer1[0].forward = lambda x: x
    with pytest.raises(ValueError, match=r"'layer1.0' has a forward set"):
        recompute(net, "full")


def test_keeps_less() -> None:
    def kept(net: nn.Module) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = net(X).sum()
        del loss
        return sum(sizes.values())

    full, half, none = (kept(recompute(make(), policy)) for policy in ("full", "every:2", "none"))
    assert full < half < none
    assert full < 0.3 * none


def test_copies_and_evaluation() -> None:
    net = recompute(make(), "full")
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()  # the copy must not look at the original's weights
    expected = train(make())
    assert all(torch.equal(a, b) for a, b in zip(train(twin)[1].values(), expected[1].values(), strict=True))
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)
    calls = []
    twin.layer1[0].conv.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        twin.eval()(X)
    assert len(calls) == 1


def test_a_failing_block_gets_its_buffers_back() -> None:
    net = recompute(make(), "full")
    norm = net.layer1[0].norm
    before = norm.running_mean
    out = net(X).sum()
    with torch.no_grad():
        net.layer1[0].conv.weight = nn.Parameter(torch.zeros(4, 4, 1, 1))  # the second run cannot work
    with pytest.raises(RuntimeError):
        out.backward()
    assert norm.running_mean is before


def test_collectives_must_be_asked_for() -> None:
    comm = LocalCommunicator("cpu")
    for name in ("ours", "torch"):
        net = make()
        net.layer1[2].norm = SyncBatchNorm(3, comm) if name == "ours" else nn.SyncBatchNorm(3)
        with pytest.raises(ValueError, match=r"'layer1.2' communicates in its forward \(layer1.2.norm\)"):
            recompute(net, "full")
        assert wrapped(recompute(net, "every:4")) == ["layer1.0", "layer2.1"]
        recompute(net, "full", allow_collectives=True)


def test_collectives_that_were_asked_for_give_the_same_gradients() -> None:
    base = make().double()
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # ranks that are threads share the random generator

    def rank(comm: Communicator, policy: str) -> list[Tensor]:
        net = convert_sync_bn(copy.deepcopy(base), comm)
        recompute(net, policy, allow_collectives=True)
        net(X.double().chunk(2)[comm.rank]).square().sum().backward()
        return [*(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]

    for plain, again in zip(run_ranks(2, rank, "none"), run_ranks(2, rank, "full"), strict=True):
        assert len(plain) == len(again) and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def counted(net: nn.Module, x: Tensor) -> dict[str, int]:
    """How often each operation runs in a forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: dict[str, int] = {}

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls[func._opname] = calls.get(func._opname, 0) + 1
            return func(*args, **(kwargs or {}))

    torch.manual_seed(3)
    with Counts():
        net(x).square().sum().backward()
    return calls


def test_selective_does_not_repeat_products() -> None:
    plain, full, selective = (counted(recompute(make(), policy), X) for policy in ("none", "full", "selective"))
    assert full["convolution"] == plain["convolution"] + 6 and selective["convolution"] == plain["convolution"]
    assert selective["native_batch_norm"] == full["native_batch_norm"] > plain["native_batch_norm"]


def test_selective_by_number_repeats_the_other_products() -> None:
    """Of a residual block's two convolutions and its shortcut: what is kept does not run again, the rest once each."""
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    policies = ("none", "selective:0", "selective:1", "selective:0-2", "blocks:0-6 selective:1", "full")
    plain, first, second, both, spared, full = (
        counted(recompute(iresnet18(16, image_size=32), policy), x)["convolution"] for policy in policies
    )
    blocks, shortcuts = 8, 4
    assert both == plain and full == plain + 2 * blocks + shortcuts
    assert first == second == plain + blocks + shortcuts and spared == second - 1


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("policy", ["full", "selective", "selective:1", "selective:0"])
def test_attention_with_and_without_dropout(policy: str, dropout: float) -> None:
    """Random numbers are drawn in the same order, whatever is kept."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.drop = nn.Linear(8, 24), nn.Dropout(0.4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.mix(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
            return x + self.drop(mixed.transpose(1, 2).reshape(2, 5, 8))

    def grads(chosen: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = recompute(nn.Sequential(Attends(), Attends(), Attends()), chosen)
        x = torch.randn(2, 5, 8)
        torch.manual_seed(7)
        net(x).square().sum().backward()
        return [param.grad for param in net.parameters() if param.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(grads("none"), grads(policy), strict=True))


def test_listed_blocks() -> None:
    assert wrapped(recompute(make(), "blocks:0,2-3")) == ["layer1.0", "layer1.2", "layer2.0"]
    assert wrapped(recompute(recompute(make(), "full"), "blocks:4")) == ["layer2.1"]
    assert wrapped(recompute(make(), "blocks:4 selective:0")) == ["layer2.1"]
    with pytest.raises(ValueError, match=r"got 'blocks:1,7' for 5 blocks, expected numbers below that"):
        recompute(make(), "blocks:1,7")


@pytest.mark.parametrize("name", ["iresnet18", "vit_tiny", "mobilefacenet", "resnet50"])
def test_selective_on_the_models(name: str) -> None:
    from plsc.models import build

    def grads(policy: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = recompute(build(name, 16, image_size=32), policy)
        net(torch.randn(2, 3, 32, 32)).square().sum().backward()
        return [param.grad for param in net.parameters() if param.grad is not None]

    for policy in ("selective", "selective:1", "blocks:0-2 selective:2"):
        assert all(torch.equal(a, b) for a, b in zip(grads("none"), grads(policy), strict=True)), policy


def test_a_second_backward_draws_the_same_again() -> None:
    net, x = make(), X.clone()
    recompute(net, "full")
    torch.manual_seed(3)
    loss = net(x).sum()
    drawn = torch.get_rng_state()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    loss.backward()
    assert torch.equal(torch.get_rng_state(), drawn)
    for p, grad in zip(net.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad, rtol=0, atol=0)


def test_threads_read_the_random_state_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that read it at once can wait for one another for ever: inside of it, garbage may be collected."""
    read, inside, most = torch.get_rng_state, [], []

    def slowly() -> Tensor:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()
        return read()

    def body(comm: Communicator) -> None:
        block = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
        recompute(block, "full")
        for _ in range(5):
            block(torch.ones(1, 2, requires_grad=True)).sum().backward()

    monkeypatch.setattr(torch, "get_rng_state", slowly)
    run_ranks(4, body)
    assert len(most) == 4 * 5 * 2 and max(most) == 1
