"""The commands plsc-train, plsc-eval and plsc-export; the only place that prints and that reads flags."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plsc.train.config import Config, dump, list_recipes, load_recipe

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
SAVE_SECONDS = 600  # time that ranks told to stop get to finish their step and save
STOPPED = "PLSC_STOPPED_FILE"  # where rank 0 notes that the run was stopped and saved, for the process that launched it


def train(argv: Sequence[str] | None = None) -> int:
    """plsc-train RECIPE [flags]."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: plsc-train RECIPE [--nproc N] [--out DIR] [--epochs N] [--data.path PATH] ...\n\n"
            f"RECIPE is a TOML file or a shipped recipe: {', '.join(list_recipes())}.\n"
            "plsc-train RECIPE --help lists every flag with the recipe's values."
        )
        return 0 if args else EXIT_USAGE
    return _guarded(lambda: _start("train", _parse("plsc-train", args)))


def evaluate(argv: Sequence[str] | None = None) -> int:
    """plsc-eval RUN [flags]: measures the newest checkpoint of a run."""
    return _again("plsc-eval", "evaluate", sys.argv[1:] if argv is None else argv)


def export(argv: Sequence[str] | None = None) -> int:
    """plsc-export RUN [flags]: writes ONNX, class centres and embeddings of a run's newest checkpoint."""
    return _again("plsc-export", "export", sys.argv[1:] if argv is None else argv)


def work(command: str, config_file: str) -> int:
    """What each rank runs that `_launch` started: the command with the config that was resolved once, there."""
    return _guarded(lambda: _work(command, load_recipe(config_file)))


# ---- inside


def _again(prog: str, command: str, args: Sequence[str]) -> int:
    if not args or args[0].startswith("-"):
        print(f"usage: {prog} RUN [flags]\n\nRUN is the folder that plsc-train wrote (its --out).")
        return 0 if args and args[0] in ("-h", "--help") else EXIT_USAGE

    def run() -> int:
        config_file = Path(args[0]) / "config.toml"
        if not config_file.is_file():
            raise ValueError(f"{args[0]} is not a run: it has no config.toml; expected the --out folder of plsc-train")
        config = replace(_parse(prog, [str(config_file), *args[1:]]), out=str(args[0]))
        return _start(command, config)

    return _guarded(run)


def _start(command: str, config: Config) -> int:
    """In this process, or in `nproc` ranks of it where no launcher has started this one."""
    return _launch(command, config) if config.nproc > 1 and "RANK" not in os.environ else _work(command, config)


def _work(command: str, config: Config) -> int:
    comm = _join(config)
    from plsc.train import run

    if command == "train":
        result = run.train(config, comm=comm, progress=_Bar("drawing glyphs") if comm.rank == 0 else None)
    else:
        result = run.evaluate(config, comm=comm, export=command == "export")
    if comm.rank == 0:
        if result is not None:
            _report(Path(config.out), result)
        elif STOPPED in os.environ:
            Path(os.environ[STOPPED]).write_text("saved", encoding="utf-8")
    comm.close()
    return 0


def _parse(prog: str, args: Sequence[str]) -> Config:
    """The recipe, overridden by flags."""
    import tyro

    recipe = load_recipe(args[0])
    config = tyro.cli(
        Config, prog=f"{prog} {args[0]}", args=list(args[1:]), default=recipe, description="One run of plsc."
    )
    assert isinstance(config, Config)
    return config


def _join(config: Config) -> Any:
    """Connects to the other ranks and sets up logging; a rank dies with the process that launched it."""
    from plsc.comm import connect

    if "RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    comm = connect(timeout=config.timeout)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if comm.rank == 0 else f"rank {comm.rank}: %(message)s"))
    log = logging.getLogger("plsc")
    log.addHandler(handler)
    log.setLevel(logging.INFO if comm.rank == 0 else logging.WARNING)
    return comm


def _launch(command: str, config: Config) -> int:
    """Starts the ranks of this machine through torchrun and waits for them."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.nproc)))
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a restart reads the addresses of dead ranks
    with tempfile.TemporaryDirectory(prefix="plsc-") as folder:
        note, config_file = Path(folder) / "stopped", Path(folder) / "config.toml"
        config_file.write_text(dump(config), encoding="utf-8")
        environment[STOPPED] = str(note)
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={config.nproc}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--shutdown-timeout={SAVE_SECONDS}"),
        ]
        child = subprocess.Popen([*launcher, "-m", "plsc.cli", command, str(config_file)], env=environment)
        interrupted = False

        def forward(number: int, _: object) -> None:
            nonlocal interrupted
            interrupted = interrupted or number == signal.SIGINT
            child.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if note.is_file():
            return EXIT_INTERRUPTED if interrupted else 0
        return code if code >= 0 else 128 - code


def _report(out: Path, result: dict[str, Any]) -> None:
    """Where everything is; the one figure people look for comes last."""
    names = [
        "config.toml",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "result.json",
        "loss.png",
        "roc.png",
        "export/model.onnx",
        "export/centres.safetensors",
        "export/embeddings.safetensors",
    ]
    print("\nwritten:")
    for name in names:
        if (out / name).exists():
            print(f"  {out / name}")
    for name in ("top1", "top5"):
        if name in result:
            print(f"{name} accuracy: {result[name] * 100:.2f} %")
    if "accuracy" in result:
        print(f"verification accuracy: {result['accuracy'] * 100:.2f} %")
    sys.stdout.flush()


class _Bar:
    """A progress bar on a terminal, a line every tenth elsewhere."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if sys.stdout.isatty():
            print(f"\r{self.what} [{'#' * tenth}{'.' * (10 - tenth)}] {done}/{total}", end="", flush=True)
            if done >= total:
                print()
        elif tenth != self._shown:
            print(f"{self.what}: {done}/{total}", flush=True)
        self._shown = tenth


def _guarded(run: Any) -> int:
    """Errors of the user in one sentence; everything else with its traceback."""
    try:
        return int(run())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(work(*sys.argv[1:]))
