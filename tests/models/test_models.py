"""Backbones: published parameter counts, shapes, gradients, sizes, names and refusals."""

import inspect
import sys
import types

import pytest
import torch
from torch import nn

from plsc.models import MODELS, ViT, build, plainnet, resnet50, smallconv

# trained, and so tested, on one core: the others are checked without storage, on the "meta" device
LIGHT = ["iresnet18", "mobilefacenet", "vit_tiny", "resnet50", "smallconv", "plainnet"]


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "embedding_size", "expected"),
    [
        ("iresnet18", 512, 24_025_600),  # arcface_torch: 24.03 M
        ("iresnet34", 512, 34_139_328),  # 34.14 M
        ("iresnet50", 512, 43_590_848),  # 43.59 M
        ("iresnet100", 512, 65_156_160),  # 65.16 M
        ("iresnet200", 512, 118_833_920),  # 118.8 M
        ("mobilefacenet", 128, 1_003_136),  # the paper: 0.99 M (0.996 without the slopes of the PReLUs)
        ("mobilefacenet", 512, 1_200_512),
        ("resnet50", 1000, 25_557_032),  # torchvision
    ],
)
def test_published_parameter_counts(name: str, embedding_size: int, expected: int) -> None:
    with torch.device("meta"):
        assert num_parameters(build(name, embedding_size, image_size=112)) == expected


@pytest.mark.parametrize(
    ("width", "depth", "heads", "expected"),
    # ViT/16 at 224 px without its classifier; ours has no class token and so one position less
    [(192, 12, 3, 5_524_416), (384, 12, 6, 21_665_664), (768, 12, 12, 85_798_656), (1024, 24, 16, 303_301_632)],
)
def test_vit_is_the_standard_one(width: int, depth: int, heads: int, expected: int) -> None:
    with torch.device("meta"):
        model = ViT(8, width=width, depth=depth, heads=heads, image_size=224, patch_size=16)
    assert num_parameters(model) - num_parameters(model.embedding) + 2 * width == expected


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("image_size", "in_channels"), [(112, 3), (48, 1), (64, 3)])
def test_shapes(name: str, image_size: int, in_channels: int) -> None:
    with torch.device("meta"):
        model = build(name, 32, image_size=image_size, in_channels=in_channels)
        assert model(torch.empty(2, in_channels, image_size, image_size)).shape == (2, 32)
    assert (model.embedding_size, model.image_size, model.in_channels) == (32, image_size, in_channels)


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize(("image_size", "in_channels"), [(112, 3), (32, 1)])
def test_forward_and_backward(name: str, image_size: int, in_channels: int) -> None:
    torch.manual_seed(0)
    model = build(name, 16, image_size=image_size, in_channels=in_channels)
    images = torch.randn(3, in_channels, image_size, image_size)
    embedding = model(images)
    assert embedding.isfinite().all()
    (embedding * torch.randn_like(embedding)).sum().backward()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key
    frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == (["features.weight"] if name.startswith("iresnet") else [])
    model.eval()
    with torch.no_grad():
        alone = model(images[:1])
        torch.testing.assert_close(alone, model(images)[:1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_recompute_blocks_are_parts_of_the_model(name: str) -> None:
    with torch.device("meta"):
        model = build(name, 16, image_size=112)
    blocks = model.recompute_blocks()
    modules = {id(module) for module in model.modules()}
    assert blocks
    assert all(id(block) in modules for block in blocks)
    assert len({id(block) for block in blocks}) == len(blocks)
    inner = {id(module) for block in blocks for module in block.modules() if module is not block}
    assert not any(id(block) in inner for block in blocks)  # none inside another
    expected = {"iresnet18": 8, "iresnet100": 49, "resnet50": 16, "vit_base": 12, "mobilefacenet": 15, "smallconv": 3}
    assert len(blocks) == expected.get(name, len(blocks))


def test_iresnet_bears_the_names_of_arcface_torch() -> None:
    with torch.device("meta"):
        names = set(build("iresnet18", 512, image_size=112).state_dict())
    assert len(names) == 187  # 8 blocks of 18, 4 shortcuts of 6, 7 in front, 12 behind
    assert {"conv1.weight", "prelu.weight", "bn2.weight", "fc.bias", "features.running_mean"} <= names
    assert {"layer1.0.downsample.0.weight", "layer1.0.downsample.1.running_var", "layer2.0.conv2.weight"} <= names
    assert {"layer3.1.bn1.weight", "layer3.1.prelu.weight", "layer4.1.bn3.bias"} <= names


def test_plainnet_treats_each_sample_alone() -> None:
    torch.manual_seed(0)
    model = plainnet(8, image_size=16, in_channels=1)
    images = torch.randn(4, 1, 16, 16)
    torch.testing.assert_close(model(images), torch.cat([model(images[:1]), model(images[1:])]))
    assert not list(model.buffers())


def test_signatures_are_alike() -> None:
    for name, make in MODELS.items():
        first, *rest = inspect.signature(make).parameters.values()
        assert first.name == "embedding_size", name
        assert [p.name for p in rest][:2] == ["image_size", "in_channels"], name
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in rest), name


def test_smallconv_width() -> None:
    assert smallconv(16, width=8).fc.in_features == 32 * 36


@pytest.mark.parametrize("name", MODELS)
def test_wrong_arguments_are_refused(name: str) -> None:
    with torch.device("meta"):
        with pytest.raises(ValueError, match="image_size is 100, expected a multiple of 16"):
            build(name, 16, image_size=100)
        with pytest.raises(ValueError, match="image_size is 0"):
            build(name, 16, image_size=0)
        with pytest.raises(ValueError, match="in_channels is 2, expected 1"):
            build(name, 16, image_size=112, in_channels=2)
        with pytest.raises(ValueError, match="embedding_size is 0"):
            build(name, 0, image_size=112)
        model = build(name, 16, image_size=112)
        with pytest.raises(ValueError, match=r"images are \[2, 1, 112, 112\], expected \[B, 3, 112, 112\]"):
            model(torch.empty(2, 1, 112, 112))


def test_wrong_image_sizes_are_refused() -> None:
    with torch.device("meta"):
        with pytest.raises(ValueError, match=r"images are \[2, 3, 112, 96\], expected \[B, 3, 112, 112\]"):
            build("iresnet18", 16, image_size=112)(torch.empty(2, 3, 112, 96))
        assert resnet50(16)(torch.empty(2, 3, 160, 160)).shape == (2, 16)  # pools whatever it is given
    with pytest.raises(ValueError, match="multiple of patch_size 9"):
        ViT(16, width=8, depth=1, heads=1, image_size=112, patch_size=9)


class Own(nn.Module):
    def __init__(self, embedding_size: int, *, image_size: int, in_channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(in_channels * image_size**2, embedding_size)


def test_a_backbone_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_backbones")
    module.Own = Own  # type: ignore[attr-defined]
    module.number = lambda embedding_size, *, image_size, in_channels: 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_backbones", module)
    model = build("own_backbones:Own", 5, image_size=10, in_channels=2)
    assert isinstance(model, Own)
    assert model.fc.weight.shape == (5, 200)
    with pytest.raises(ValueError, match=r"no function 'Owm' \(did you mean 'Own'\?\)"):
        build("own_backbones:Owm", 5, image_size=10)
    with pytest.raises(ValueError, match="gave a int, expected a"):
        build("own_backbones:number", 5, image_size=10)
    with pytest.raises(ValueError, match="cannot import 'no_such_module'"):
        build("no_such_module:Own", 5, image_size=10)
    with pytest.raises(ValueError, match="cannot import ''"):
        build(":Own", 5, image_size=10)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no model 'iresnet5' \(did you mean 'iresnet50'\?\); expected one of ires"):
        build("iresnet5", 16, image_size=112)
    with pytest.raises(ValueError, match="no model 'xyz'; expected one of"):
        build("xyz", 16, image_size=112)
