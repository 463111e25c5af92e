"""The commands plsc-train, -eval, -export, -embed, -data, -ps and -serve. Only the cli modules print and read flags."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plsc import cli_data, cli_ps, cli_serve
from plsc.cli_common import (
    ARTIFACTS,
    Bar,
    guarded,
    logging_to_stdout,
    say_how_to_serve,
    say_result,
    say_written,
    until_unheard,
)
from plsc.cli_flags import parse, taken
from plsc.comm import LocalCommunicator, connect
from plsc.comm.torch_distributed import Launch
from plsc.serve.bundle import STORAGES
from plsc.train.checkpoint import Checkpoints
from plsc.train.config import Config, dump, list_recipes, load_recipe
from plsc.train.elastic import run_again
from plsc.train.failures import (
    EXIT_DIVERGED,
    EXIT_FAILURE,
    EXIT_USAGE,
)
from plsc.train.launch import (
    EXIT_INTERRUPTED,
    Outcome,
    answer_launcher,
    die_with_parent,
    launch,
    scratch_folder,
)
from plsc.train.preflight import check_folder

BUNDLED = ("all", "bundle")  # values of plsc-export --to that end with a bundle
EXPORTED = {Path(name).name for name in ARTIFACTS if name.startswith("export/")} | {"thumbnails.safetensors"}
MEASURED = ("result.json", "loss.png", "roc.png")  # what an evaluation writes of them


@until_unheard
def train(argv: Sequence[str] | None = None) -> int:
    """plsc-train RECIPE [flags]."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0].startswith("-"):
        print(
            "usage: plsc-train RECIPE [--nproc N] [--out DIR] [--epochs N] [--data.path PATH] ...\n\n"
            f"RECIPE is a TOML file or a shipped recipe: {', '.join(list_recipes())}.\n"
            "plsc-train RECIPE --help lists every flag with the recipe's values."
        )
        return 0 if args and args[0] in ("-h", "--help") else EXIT_USAGE
    return guarded(lambda: _start("train", parse(f"plsc-train {args[0]}", args)))


@until_unheard
def evaluate(argv: Sequence[str] | None = None) -> int:
    """plsc-eval RUN [--report DIR] [flags]: measures the newest checkpoint of a run; DIR gets a page of pictures."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] in (["-h"], ["--help"]):
        print(
            "usage: plsc-eval RUN [--report DIR] [--nproc N] [--eval.path PATH] [--eval.pairs LIST] ...\n\n"
            "RUN is the folder that plsc-train wrote (its --out). DIR gets report.html, one page with its pictures "
            "inside.\nAll is as RUN/config.toml says but for the flags; plsc-eval RUN --help lists those of the "
            "recipe."
        )
        return 0
    asked = any(arg.partition("=")[0] == "--report" for arg in args)
    args, report = taken(args, "--report", "")

    def check() -> None:
        if asked and (not report or report.startswith("-")):
            raise ValueError(f"got --report {report!r}, expected a folder for the page")
        if asked:
            check_folder(report, "--report")

    return _again("plsc-eval", "evaluate", args, [report], check)


@until_unheard
def export(argv: Sequence[str] | None = None) -> int:
    """plsc-export RUN [--to PART] [flags]: ONNX, class centres, embeddings and a bundle of a run's checkpoint."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] in (["-h"], ["--help"]):
        print(
            "usage: plsc-export RUN [--to all|bundle|onnx|safetensors|pt2] [--storage fp32|fp16|int8] [--thumbnails]\n"
            "\nRUN is the folder that plsc-train wrote. What is asked for is written into RUN/export; for `all` (the\n"
            "default) and `bundle` it is put together as RUN/bundle, which plsc-serve serves: its class centres as\n"
            "--storage says, with --thumbnails also the first training image of each class."
        )
        return 0
    args, to = taken(args, "--to", "all")
    args, storage = taken(args, "--storage", "fp32")
    thumbnails = "--thumbnails" in args

    def check() -> None:
        from plsc.train.artifacts import PARTS

        for flag, value, known in (("--to", to, PARTS), ("--storage", storage, STORAGES)):
            if value not in known:
                raise ValueError(f"got {flag} {value}, expected one of {', '.join(known)}")
        for flag, given in ((f"--storage {storage}", storage != "fp32"), ("--thumbnails", thumbnails)):
            if given and to not in BUNDLED:
                raise ValueError(f"got {flag} with --to {to}, expected it with --to {' or '.join(BUNDLED)} only")
        if args and to in BUNDLED:
            cli_serve.check_bundle(args[0])

    args = [arg for arg in args if arg != "--thumbnails"]
    return _again("plsc-export", "export", args, [to, storage, "thumbnails" if thumbnails else ""], check)


@until_unheard
def serve(argv: Sequence[str] | None = None) -> int:
    """plsc-serve BUNDLE [flags]: embeddings and nearest classes over HTTP, with a page."""
    args = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: cli_serve.run(args))


@until_unheard
def embed(argv: Sequence[str] | None = None) -> int:
    """plsc-embed RUN DATA [--out FILE] [flags]: embeddings of a data set by a run's newest checkpoint."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) < 2 or args[0].startswith("-") or args[1].startswith("-"):
        print(
            "usage: plsc-embed RUN DATA [--out FILE] [--overwrite] [--nproc N] [--eval.batch-size B] ...\n\n"
            "RUN is the folder that plsc-train wrote. DATA: a folder, .zip, list, .rec, .tar, .parquet, .lmdb or\n"
            ".bin. FILE (.safetensors or .parquet; default RUN/export/NAME-OF-DATA.safetensors) gets one row an\n"
            "image; one of another model or data is refused, or replaced with --overwrite."
        )
        return 0 if args and args[0] in ("-h", "--help") else EXIT_USAGE
    folder, source, *flags = args
    name = os.path.splitext(os.path.basename(os.path.normpath(source)))[0].replace("*", "") or "embeddings"
    target = os.path.join(folder, "export", f"{name}.safetensors")
    flags = [word for flag in flags for word in (flag.split("=", 1) if flag.startswith("--out=") else [flag])]
    out = "--out" in flags
    if out:
        at = flags.index("--out")
        target, flags = (flags[at + 1 : at + 2] or [""])[0], flags[:at] + flags[at + 2 :]

    overwrite = "overwrite" if "--overwrite" in flags else ""
    flags = [flag for flag in flags if flag != "--overwrite"]

    def check() -> None:
        if not out and os.path.basename(target) in EXPORTED:
            raise ValueError(
                f"{source}: embeddings of it would be {target}, which is a name of plsc-export's; give another as --out"
            )
        if not target.endswith((".safetensors", ".parquet")):
            raise ValueError(f"got --out {target!r}, expected a file .safetensors or .parquet")
        check_folder(os.path.dirname(target) or ".", "the folder of --out")

    return _again("plsc-embed", "embed", [folder, *flags], [source, target, overwrite], check)


@until_unheard
def data(argv: Sequence[str] | None = None) -> int:
    """plsc-data verify | stats | convert | split | pairs | templates | align: data sets looked at and changed."""
    return guarded(lambda: cli_data.run(sys.argv[1:] if argv is None else argv))


@until_unheard
def ps(argv: Sequence[str] | None = None) -> int:
    """plsc-ps train RECIPE [flags]: what learns rows of a sparse table."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands = {"train": cli_ps.train}
    if args and args[0] in cli_ps.COMMANDS:
        return guarded(lambda: cli_ps.run(args))
    if not args or args[0] not in commands:
        print(
            "usage: plsc-ps train RECIPE [--out DIR] [--epochs N] [--threads N] [--data.train FILES] ...\n"
            "       plsc-ps train word2vec [corpus.txt] ...\n\n"
            f"RECIPE is a TOML file or a shipped recipe: {', '.join(list_recipes(cli_ps.PS_TASKS))}.\n"
            "plsc-ps train RECIPE --help lists every flag with the recipe's values.\n"
            f"Servers: plsc-ps {' | '.join(cli_ps.COMMANDS)}, each with --help."
        )
        return 0 if args and args[0] in ("-h", "--help") else EXIT_USAGE
    if len(args) < 2 or args[1].startswith("-"):
        return ps(["--help"]) if args[1:2] in (["-h"], ["--help"]) else ps([])
    return guarded(lambda: commands[args[0]](args[1], args[2:]))


def work(command: str, config_file: str, *extra: str) -> int:
    """What each rank runs that `_launch` started: the command with the config that was resolved once, there."""
    return guarded(lambda: _work(command, load_recipe(config_file), extra))


def end(code: int) -> None:
    """Ends a rank's process with this status, after what was registered for its end.

    Not by sys.exit: there Python ends threads that are inside of C++, such as a store whose holder has gone, and that
    aborts the process in place of its status.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---- inside


def _again(
    prog: str, command: str, args: Sequence[str], extra: Sequence[str] = (), check: Callable[[], None] | None = None
) -> int:
    if not args or args[0].startswith("-"):
        print(
            f"usage: {prog} RUN [--nproc N] [--eval.path PATH] [--eval.pairs LIST] ...\n\n"
            "RUN is the folder that plsc-train wrote (its --out). All is as RUN/config.toml says but for the flags;\n"
            f"{prog} RUN --help lists them."
        )
        return 0 if args and args[0] in ("-h", "--help") else EXIT_USAGE

    def run() -> int:
        if check is not None:
            check()
        folder, config_file = args[0], Path(args[0]) / "config.toml"
        if not config_file.is_file():
            name = folder or "an empty name"
            raise ValueError(f"{name} is not a run: it has no config.toml; expected the --out folder of plsc-train")
        if any(flag.partition("=")[0] == "--out" for flag in args[1:]):
            raise ValueError(f"--out is for plsc-train; {prog} reads and writes {folder}")
        if _newest(folder) is None:
            raise ValueError(f"{folder} has no whole checkpoint; train it first with plsc-train")
        config = replace(parse(f"{prog} {folder}", [str(config_file), *args[1:]]), out=folder)
        return _start(command, config, extra)

    return guarded(run)


def _plan(config: Config) -> int:
    """What fits, said by one rank alone."""
    from plsc.train import run  # noqa: F401  what a training process has loaded counts
    from plsc.train.plan import plan

    started = Launch.read()
    if started is not None:
        if started.rank > 0:
            return 0
        config = replace(config, nproc=started.world_size)  # the ranks that a launcher started are those to plan for
    return 0 if plan(config, say=print) else EXIT_FAILURE


def _start(command: str, config: Config, extra: Sequence[str] = ()) -> int:
    """In this process, or in `nproc` ranks of it where no launcher has started this one."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for "module:attr" in recipes
    if command == "train" and config.plan:
        return _plan(config)
    started = Launch.read()
    if command == "train":
        check_folder(config.out, "--out")
        if config.export:
            cli_serve.check_bundle(config.out)
    if config.nproc > 1 and (started is None or started.world_size == 1):
        return _launch(command, config, extra)
    if started is not None and started.rank == 0 and config.nproc not in (1, started.world_size):
        print(f"nproc is {config.nproc}, but a launcher has started {started.world_size} ranks: those are the ranks")
    return _work(command, config, extra)


def _launch(command: str, config: Config, extra: Sequence[str]) -> int:
    """The command on the ranks of this machine; what one of them fails with is said once, here."""
    with scratch_folder() as folder:
        config_file = folder / "config.toml"
        config_file.write_text(dump(config), encoding="utf-8")
        start = f"import sys; sys.path[:] = {sys.path!r}; from plsc.cli import end, work; end(work(*sys.argv[1:]))"
        ranks = [
            sys.executable,
            "-P",
            "-c",
            start,
            command,
            str(config_file),
            *extra,
        ]  # modules are found as they are here

        def launch_ranks(nproc: int) -> Outcome:
            return launch(ranks, nproc, folder=Path(tempfile.mkdtemp(prefix="reports-", dir=folder)))

        outcome = run_again(
            launch_ranks,
            config.nproc,
            max_restarts=config.max_restarts if command == "train" and not config.check else 0,
            final_codes=(EXIT_USAGE, EXIT_DIVERGED, EXIT_INTERRUPTED),
            newest=lambda: _newest(config.out),
            batch_parts=config.batch_size // config.strategy.accumulate,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    if outcome.message:
        print(outcome.message, file=sys.stderr)
    if outcome.code not in (0, EXIT_USAGE, EXIT_DIVERGED) and command == "train" and not config.check:
        newest = _newest(config.out)
        hint = f"newest checkpoint: {newest}; the same command continues from it" if newest else "no checkpoint yet"
        print(hint, file=sys.stderr)
    return outcome.code


def _work(command: str, config: Config, extra: Sequence[str]) -> int:
    """This process's part of a command, as one rank of a world or alone."""
    if Launch.read() is not None:
        die_with_parent()
        answer_launcher()
    if config.check and command == "train":
        from plsc.train.check import check

        return 0 if check(config, say=print) else EXIT_FAILURE
    comm = connect(timeout=config.timeout)
    from plsc.train import run  # matplotlib and all: only where they are needed

    result: dict[str, Any] | None
    with logging_to_stdout(comm):
        if command == "train":
            result = run.train(config, comm=comm, progress=Bar("drawing glyphs") if comm.rank == 0 else None)
        elif command == "evaluate":
            result = run.evaluate(config, report=extra[0], comm=comm)
            if comm.rank == 0 and extra[0]:
                print(f"report: {Path(extra[0]) / 'report.html'}")
        elif command == "embed":
            bar = Bar("embedding") if comm.rank == 0 else None
            source, target, overwrite = extra
            run.embed_images(config, source, target, overwrite=bool(overwrite), comm=comm, progress=bar)
            result = None
        else:
            to, storage, thumbnails = extra
            written = list(run.export(config, to=to, thumbnails=bool(thumbnails), comm=comm).values())
            result = None
            if comm.rank == 0:
                bundles = [cli_serve.bundle_run(config.out, storage=storage)] if to in BUNDLED else []
                say_written([*written, *bundles])
                if bundles:
                    say_how_to_serve(Path(config.out))
        if command == "train" and result is not None and config.export and comm.rank == 0:
            cli_serve.bundle_run(config.out)
    if comm.rank == 0 and result is not None:
        say_result(Path(config.out), result, MEASURED if command == "evaluate" else ARTIFACTS)
    comm.close()
    return 0


def _newest(out: str) -> Path | None:
    """The newest whole checkpoint of a run."""
    return Checkpoints(Path(out) / "checkpoints", comm=LocalCommunicator()).latest()


COMMANDS = {"train": train, "eval": evaluate, "export": export, "embed": embed, "data": data, "ps": ps, "serve": serve}


def main(argv: Sequence[str] | None = None) -> int:
    """python -m plsc.cli COMMAND ...: the commands where they are not on the PATH."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in COMMANDS:
        return COMMANDS[args[0]](args[1:])
    print(
        f"usage: python -m plsc.cli {' | '.join(COMMANDS)} ...\n\nthe same as plsc-train and so on, each with --help."
    )
    return 0 if args and args[0] in ("-h", "--help") else EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
