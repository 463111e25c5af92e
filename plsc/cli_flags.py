"""Flags of the commands: a recipe, and what the command line changes of it."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from typing import Any, TypeVar

from plsc.nn import MARGINS
from plsc.train.config import Config, load_recipe

T = TypeVar("T")


def parse(prog: str, args: Sequence[str]) -> Config:
    """The recipe, overridden by flags."""
    recipe = load_recipe(args[0])
    config = override(prog, recipe, plan_here(args[1:]))
    asked = any(arg.partition("=")[0].replace("_", "-") == "--head.margin-args" for arg in args)
    known = ":" in config.head.margin or config.head.margin in (*MARGINS, "linear")  # else build_margin says so
    if known and recipe.head.margin_args and config.head.margin != recipe.head.margin and not asked:
        inherited = " ".join(f"{name} {value}" for name, value in recipe.head.margin_args.items())
        raise ValueError(
            f"--head.margin {config.head.margin}: the recipe's margin_args ({inherited}) are those of "
            f"{recipe.head.margin}; say which it takes: --head.margin-args NAME VALUE ..., with nothing after it for "
            "its defaults"
        )
    return config


def override(prog: str, config: T, flags: Sequence[str]) -> T:
    """A config dataclass with the values that flags give."""
    import tyro

    rules = tyro.constructors.ConstructorRegistry()
    rules.primitive_rule(_named_values)
    with rules:
        changed = tyro.cli(type(config), prog=prog, args=list(flags), default=config, description="One run of plsc.")
    assert isinstance(changed, type(config))
    return changed


def _named_values(info: Any) -> Any:
    """tyro's rule for a dict: one flag that takes names and values in turn, and replaces what the recipe says."""
    import tyro

    if info.type_origin is not dict:
        return None

    def read(words: list[str]) -> dict[str, Any]:
        if len(words) % 2:
            raise ValueError(f"got {' '.join(words)}, expected names and values in turn, as in `scale 32 margin 0.3`")
        return {name: _toml_value(text) for name, text in zip(words[::2], words[1::2], strict=True)}

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME VALUE [NAME VALUE ...]]",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [word for name, each in value.items() for word in (name, str(each))],
    )


def _toml_value(text: str) -> Any:
    """A word of the command line as TOML would read it: a number, true or false; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def plan_here(args: Sequence[str]) -> list[str]:
    """--plan without a word after it is --plan here."""
    alone = [arg == "--plan" and after.startswith("-") for arg, after in itertools.pairwise([*args, "-"])]
    return ["--plan=here" if bare else arg for arg, bare in zip(args, alone, strict=True)]


def taken(args: list[str], flag: str, default: str) -> tuple[list[str], str]:
    """The arguments without a flag and its value, and that value."""
    words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith(f"{flag}=") else [arg])]
    if flag not in words:
        return words, default
    at = words.index(flag)
    return words[:at] + words[at + 2 :], (words[at + 1 : at + 2] or [""])[0]
