"""Models by name: the ones of this package, and any of the user's own as "module:function"."""

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from plsc.models.iresnet import iresnet18, iresnet34, iresnet50, iresnet100, iresnet200
from plsc.models.mobilefacenet import mobilefacenet
from plsc.models.resnet import resnet50
from plsc.models.small import plainnet, smallconv
from plsc.models.vit import vit_base, vit_large, vit_small, vit_tiny

__all__ = ["MODELS", "build", "check_call"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "iresnet18": iresnet18,
    "iresnet34": iresnet34,
    "iresnet50": iresnet50,
    "iresnet100": iresnet100,
    "iresnet200": iresnet200,
    "mobilefacenet": mobilefacenet,
    "vit_tiny": vit_tiny,
    "vit_small": vit_small,
    "vit_base": vit_base,
    "vit_large": vit_large,
    "resnet50": resnet50,
    "smallconv": smallconv,
    "plainnet": plainnet,
}


def build(name: str, embedding_size: int, *, image_size: int, in_channels: int = 3) -> nn.Module:
    """The model of that name, or of the user's "package.module:function" with the same three arguments.

    Such a function is called f(embedding_size, image_size=..., in_channels=...) and returns a module that takes
    images [B, C, S, S] to embeddings [B, D]. Raises ValueError for a name that is neither.
    """
    make = _imported(name) if ":" in name else MODELS.get(name)
    if make is None:
        raise ValueError(
            f"no model {name!r}{_did_you_mean(name, list(MODELS))}; expected one of {', '.join(MODELS)}, "
            'or "package.module:function" for one of your own'
        )
    if ":" in name:
        check_call(make, f"model {name!r}", embedding_size, image_size=image_size, in_channels=in_channels)
    model = make(embedding_size, image_size=image_size, in_channels=in_channels)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} gave a {type(model).__name__}, expected a torch.nn.Module")
    return model


def check_call(make: Callable[..., Any], what: str, *args: Any, **options: Any) -> None:
    """ValueError unless the user's `make` takes these arguments; an error inside of it stays the user's to see."""
    try:
        signature = inspect.signature(make)
    except ValueError:  # of what is written in C there may be none
        return
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        call = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in options.items())])
        name = getattr(make, "__name__", str(make))
        raise ValueError(f"{what}: got {name}{signature}, expected one that can be called ({call}): {error}") from error


def _imported(name: str) -> Callable[..., nn.Module]:
    """What "package.module:attribute" names."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"cannot import {module_name!r} of model {name!r}: {error}; expected a module on the Python path"
        ) from error
    make = getattr(module, attribute, None)
    if not callable(make):
        names = [key for key in vars(module) if callable(getattr(module, key))]
        raise ValueError(
            f"module {module_name!r} has no function {attribute!r}{_did_you_mean(attribute, names)}; expected a "
            "function or class f(embedding_size, *, image_size, in_channels) that gives a torch.nn.Module"
        )
    return make


def _did_you_mean(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
