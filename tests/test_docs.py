"""The pages a reader trusts: Python blocks run, commands and make targets exist, links lead somewhere."""

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from plsc import cli, cli_flags
from plsc.train.config import list_recipes

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if path.exists())
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)``` *$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: \S(?:(?!-->).)*-->\s*\Z", re.S)
SHELLS = {"console", "bash", "sh", "shell"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def program(text: str) -> str:
    """The page's Python blocks as one program, each line at its own line number.

    A block that follows `<!-- not run: reason -->` is left out.
    """
    lines = [""] * (text.count("\n") + 1)
    for block in FENCE.finditer(text):
        if block["language"] == "python" and not NOT_RUN.search(text, 0, block.start()):
            first = text.count("\n", 0, block.start("body"))
            body = textwrap.dedent(block["body"]).splitlines()
            lines[first : first + len(body)] = body
    return "\n".join(lines) if any(lines) else ""


def commands(text: str) -> list[list[str]]:
    """Shell lines of the page, split into words, continued lines joined, comments and prompts dropped."""
    found = []
    for block in FENCE.finditer(text):
        if block["language"] in SHELLS:
            for line in block["body"].replace("\\\n", " ").splitlines():
                words = re.split(r"(?:^|\s)#", line)[0].strip().removeprefix("$ ").split()
                found.extend([words] if words else [])
    return found


RUNNABLE = [path for path in PAGES if program(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", RUNNABLE, ids=relative)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    """Blocks of a page share one namespace, in order, as a reader would type them into one session."""
    script = tmp_path / "page.py"
    script.write_text(program(path.read_text(encoding="utf-8")), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    run = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, f"{relative(path)} (line numbers are the page's)\n{run.stdout}{run.stderr}"


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_commands_exist(path: Path) -> None:
    """Every plsc command is installed, and every make target is in the Makefile."""
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(" ".join(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)).split())
    for words in commands(path.read_text(encoding="utf-8")):
        name = words[0].rpartition("/")[2]
        if name.startswith("plsc-"):
            assert name in installed, words
        if name == "make":
            assert {word for word in words[1:] if "=" not in word and not word.startswith("-")} <= targets, words


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_recipes_and_flags_of_plsc_train_exist(path: Path) -> None:
    """Of shipped recipes; the others are the reader's own."""
    for words in commands(path.read_text(encoding="utf-8")):
        if words[0] == "plsc-train" and words[1] in list_recipes():
            config = cli_flags.parse("plsc-train", words[1:])
            # Faces that are drawn into pairs need more of them than a reader may have: the list is named.
            assert words[1] != "faces" or config.eval.pairs, words


def test_the_run_of_ones_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/training.md as it is written: its recipe, its backbone and folders as it draws them."""
    blocks = {block["language"]: block["body"] for block in FENCE.finditer((ROOT / "docs/training.md").read_text())}
    (tmp_path / "mine.toml").write_text(blocks["toml"])
    (tmp_path / "nets.py").write_text(blocks["python"])
    random = np.random.default_rng(0)
    for split, classes, images in (("train", 8, 12), ("val", 40, 8)):
        for number in range(classes):
            folder = tmp_path / "photos" / split / f"N{number}"
            folder.mkdir(parents=True)
            for i in range(images):
                pixels = random.integers(0, 256, (24, 20, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i:04d}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.train(["mine.toml", "--max-steps", "2", "--data.workers", "0", "--no-export"]) == 0
    assert 0 <= json.loads((tmp_path / "runs/mine/result.json").read_text())["accuracy"] <= 1
    sys.modules.pop("nets", None)


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_links_lead_to_files(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text)
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_files_and_names_it_speaks_of_exist(path: Path) -> None:
    """tests/x.py, plsc/ops/core and so on wherever they stand; `plsc.x.y` in backticks, outside of blocks."""
    text = path.read_text(encoding="utf-8")
    files = re.findall(
        r"(?<![\w./-])(?:tests|benchmarks|tools|plsc|cuda|docs)/[\w./]*\w\.(?:py|cu|cuh|md|h|cc)\b", text
    )
    assert [file for file in files if not (ROOT / file).exists()] == []
    names = set(re.findall(r"`(plsc(?:\.\w+)+)", FENCE.sub("", text))) - {"plsc.checkpoint"}  # of a file format
    assert [name for name in sorted(names) if not exists(name)] == []


def exists(name: str) -> bool:
    """Whether a module, or an attribute of one, or of a class in it, is called so."""
    module, rest = name, list[str]()
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for attribute in rest:
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


def test_program_keeps_line_numbers_and_leaves_marked_blocks_out() -> None:
    page = textwrap.dedent(
        """\
        # Title
        ```python
        a = 1
        ```
        <!-- not run: needs eight GPUs -->

        ```python
        raise SystemExit
        ```
        - item
          ```python
          b = a + 1
          ```
        ```console
        $ plsc-train glyphs \\
            --nproc 2   # two ranks
        ```
        """
    )
    assert program(page).splitlines() == ["", "", "a = 1", *[""] * 8, "b = a + 1", *[""] * 5]
    assert commands(page) == [["plsc-train", "glyphs", "--nproc", "2"]]
