"""Recipes: what is wrong in one is named with its key, and a resolved run reads back as the same run."""

import dataclasses
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.strategies import Strategy
from plsc.train.config import (
    OPTIMIZERS,
    SCHEDULES,
    Config,
    DataConfig,
    EvalConfig,
    HeadConfig,
    ModelConfig,
    OptimConfig,
    dump,
    from_dict,
    list_recipes,
    load_recipe,
)

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
COUNT = st.integers(1, 10**9)
REAL = st.floats(0, 1e6, allow_subnormal=False)
VALUES = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6), st.booleans(), TEXT)
BY_TYPE = {
    str: TEXT,
    int: COUNT,
    float: REAL,
    bool: st.booleans(),
    float | None: st.none() | REAL,
    tuple[float, float]: st.tuples(REAL, REAL),
    tuple[float, ...]: st.lists(REAL, max_size=4).map(tuple),
    tuple[str, ...]: st.lists(TEXT, max_size=2).map(tuple),
    dict[str, typing.Any]: st.dictionaries(TEXT, VALUES, max_size=4),
}
CHOICES: dict[str, st.SearchStrategy] = {
    "name": st.sampled_from(OPTIMIZERS),
    "schedule": st.sampled_from(SCHEDULES),
    "task": st.sampled_from(["verification", "classification", "none"]),
    "augment": st.sampled_from(["none", "light", "strong"]),
    "on_bad_image": st.sampled_from(["redraw", "raise"]),
    "weight_dtype": st.sampled_from(["fp32", "split", "bf16"]),
    "state_dtype": st.sampled_from(["fp32", "bf16", "int8"]),
    "unsampled": st.sampled_from(["still", "decayed"]),
    "cache_dtype": st.sampled_from(["fp32", "bf16"]),
    "product_dtype": st.sampled_from(["auto", "fp32", "bf16"]),
    "sample_rate": st.floats(0, 1, allow_subnormal=False),
    "momentum": st.floats(0, 0.999, allow_subnormal=False),
    "betas": st.tuples(*[st.floats(0, 0.999, allow_subnormal=False)] * 2),
    "sub_centers": st.integers(1, 9),
    "amp": st.sampled_from(["fp32", "bf16", "fp16"]),
    "recompute": st.sampled_from(["none", "full", "selective", "every:2", "blocks:0-3,7"]),
    "reduce_dtype": st.sampled_from(["fp32", "bf16"]),  # fp16 does not go with dgc
    "reduce_accumulate": st.just("native"),
    "topology": st.sampled_from(["flat", "ring", "hierarchical:2", "grid:2x3", "auto", "mine.net:Way"]),
    "compress": st.just("dgc"),
    "compress_args": st.fixed_dictionaries({}, optional={"density": st.floats(0.01, 1), "masking": st.booleans()}),
    "local_sgd": st.just(0),
    "local_sgd_args": st.just({}),
    "ps": st.just("async"),
    "servers": st.lists(TEXT, max_size=2).map(tuple),
    "ps_args": st.fixed_dictionaries({}, optional={"merge": st.integers(1, 9), "wire": st.just("fp16")}),
    "out": TEXT.filter(bool),
    "folds": st.integers(2, 100),
    "bucket_mb": st.floats(0.5, 100),
    "timeout": st.floats(0.5, 1e6),
}


def tables(kind: type) -> st.SearchStrategy:
    """Any instance of a config dataclass that its own checks let pass."""
    types = typing.get_type_hints(kind)
    fields = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(types[field.name]):
            fields[field.name] = tables(types[field.name])
        else:
            fields[field.name] = CHOICES.get(field.name, BY_TYPE.get(types[field.name]))
    return st.builds(kind, **fields)


@settings(max_examples=30, deadline=None)
@given(config=tables(Config))
def test_a_resolved_run_reads_back_as_the_same_run(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "resolved.toml"
    path.write_text(dump(config), encoding="utf-8")
    assert load_recipe(str(path)) == config


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes_load_by_name(name: str, tmp_path: Path) -> None:
    config = load_recipe(name)
    (tmp_path / "again.toml").write_text(dump(config), encoding="utf-8")
    assert load_recipe(str(tmp_path / "again.toml")) == config
    assert config.out == f"runs/{name}"


def refused(text: str | bytes, tmp_path: Path) -> str:
    """The message a recipe is refused with."""
    path = tmp_path / "recipe.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError) as caught:
        load_recipe(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batchsize = 4", ["batchsize", "did you mean 'batch_size'", "known:"]),
        ("[data]\nimagesize = 4", ["[data]", "imagesize", "did you mean 'image_size'"]),
        ("[dta]\n", ["dta", "did you mean 'data'"]),
        ("zzz = 1", ["zzz", "known: seed, epochs"]),
        ("epochs == 3", ["not valid TOML", "line 1"]),
        (b"out = '\xff'", ["not valid TOML", "utf-8"]),
        ("epochs = 1.5", ["epochs is 1.5, expected int"]),
        ("epochs = true", ["epochs is True, expected int"]),
        ("resume = 1", ["resume is 1, expected bool"]),
        ("data = 3", ["data is 3, expected a table"]),
        ("[optim]\nlr = 'fast'", ["[optim]: lr is 'fast', expected float"]),
        ("[optim]\nlr = true", ["lr is True, expected float"]),
        ("[optim]\nbetas = [0.9]", ["betas is [0.9], expected a list of 2"]),
        ("[optim]\nmilestones = 3", ["milestones is 3, expected a list"]),
        ("[optim]\nmilestones = ['a']", ["milestones is 'a', expected float"]),
        ("[head]\nmargin_args = 3", ["margin_args is 3, expected a table"]),
        ("[head]\nfilter_threshold = 'x'", ["filter_threshold is 'x', expected float"]),
        ("batch_size = 0", ["batch_size is 0, expected at least 1"]),
        ("nproc = -1", ["nproc is -1, expected at least 1"]),
        ("seed = -1", ["seed is -1, expected at least 0"]),
        ("timeout = 0", ["timeout is 0.0, expected seconds, more than 0"]),
        ("timeout = nan", ["timeout is nan"]),
        ("out = ''", ["out is empty"]),
        ("[optim]\nlr = -0.1", ["optim.lr is -0.1, expected at least 0"]),
        ("[optim]\nmomentum = 1.0", ["optim.momentum is 1.0, expected a finite number in [0, 1)"]),
        ("[optim]\nbetas = [0.9, 1.5]", ["optim.betas[1] is 1.5, expected a finite number in [0, 1)"]),
        ("[head]\nsample_rate = 10.0", ["head.sample_rate is 10.0, expected a finite number in [0, 1]"]),
        ("[head]\nsub_centers = 0", ["head.sub_centers is 0, expected at least 1"]),
        ("[optim]\nlr = nan", ["optim.lr is nan"]),
        ("[optim]\nlr = inf", ["optim.lr is inf"]),
        ("[optim]\nname = 'adam'", ["optim.name is 'adam'", "did you mean 'adamw'"]),
        ("[optim]\nschedule = 'cosin'", ["optim.schedule is 'cosin'", "did you mean 'cosine'"]),
        ("[model]\nembedding_size = 0", ["model.embedding_size is 0, expected at least 1"]),
        ("[eval]\ntask = 'verify'", ["eval.task is 'verify'", "verification, classification, none"]),
        ("[data]\non_bad_image = 'skip'", ["data.on_bad_image is 'skip'", "redraw, raise"]),
        ("[data]\naugment = 'light '", ["data.augment is 'light '", "none, light, strong"]),
        ("[eval]\nbatch_size = 0", ["eval.batch_size is 0, expected at least 1"]),
        ("[strategy]\namp = 'fp8'", ["amp 'fp8', expected one of fp32, bf16, fp16"]),
        ("[strategy]\naccumulate = 0", ["accumulate=0"]),
        ("[strategy]\ntopology = 'star'", ["topology: got 'star'", "flat, ring, hierarchical"]),
        (
            "[strategy]\nlocal_sgd = 4\nlocal_sgd_args = { evry = 1 }",
            ["local_sgd_args: unknown 'evry'", "every, begin"],
        ),
        ("[strategy]\ncompress = 'dgc'\nlocal_sgd = 8", ["do not go together", "DGC sends gradients in every step"]),
    ],
)
def test_what_is_wrong_is_named(text: str | bytes, words: list[str], tmp_path: Path) -> None:
    message = refused(text, tmp_path)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("glyph", ["no recipe 'glyph'", "did you mean 'glyphs'", "glyphs"]),
        ("glyph.toml", ["recipe file glyph.toml does not exist", "did you mean 'glyphs'"]),
        ("mine.tml", ["no recipe 'mine.tml'", "did you mean 'mine.toml'"]),
        ("zzzzzz", ["no recipe 'zzzzzz'; expected a TOML file or a shipped recipe", "glyphs"]),
        ("gone/mine.toml", ["gone/mine.toml does not exist"]),
    ],
)
def test_a_missing_recipe_gets_a_suggestion(
    recipe: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_recipe(recipe)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_numbers_are_converted_and_defaults_kept(tmp_path: Path) -> None:
    path = tmp_path / "whole.toml"
    path.write_text("timeout = 5\n[optim]\nlr = 1\nbetas = [0, 0.5]\n[head]\nfilter_threshold = 1\n")
    config = load_recipe(str(path))
    assert config == Config(
        timeout=5.0,
        optim=OptimConfig(lr=1.0, betas=(0.0, 0.5)),
        head=HeadConfig(filter_threshold=1.0),
        data=DataConfig(),
        model=ModelConfig(),
        eval=EvalConfig(),
        strategy=Strategy(),
    )
    assert isinstance(config.timeout, float) and isinstance(config.optim.betas[0], float)


def test_from_dict_names_where_it_reads() -> None:
    with pytest.raises(ValueError, match=r"there: unknown key 'lrr'; did you mean 'lr'"):
        from_dict(OptimConfig, {"lrr": 1}, where="there")
