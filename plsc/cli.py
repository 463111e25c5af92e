"""The commands plsc-train, -eval, -export, -embed, -data and -ps; the only place that prints and that reads flags."""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import functools
import itertools
import json
import logging
import os
import select
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from plsc import cli_ps, cli_serve
from plsc.comm import CommError, Communicator, LocalCommunicator, connect
from plsc.comm.torch_distributed import Launch
from plsc.data import align, convert, health, make_pairs, open_images, split, write_pairs
from plsc.data.convert import check_free
from plsc.data.embeddings import atomic_file
from plsc.nn import MARGINS
from plsc.serve.bundle import STORAGES
from plsc.train.checkpoint import Checkpoints
from plsc.train.config import Config, dump, from_dict, list_recipes, load_recipe, read_recipe
from plsc.train.elastic import run_again
from plsc.train.failures import (
    EXIT_DIVERGED,
    EXIT_FAILURE,
    EXIT_USAGE,
    Stopped,
    exit_code,
    opening,
    stopped_by_signals,
    told,
)
from plsc.train.launch import (
    EXIT_INTERRUPTED,
    Outcome,
    answer_launcher,
    die_with_parent,
    launch,
    report,
    scratch_folder,
)
from plsc.train.preflight import check_folder

EXIT_UNHEARD = 141  # as a shell has it for a program that SIGPIPE ended
PS_TASKS = ("ctr", "word2vec")
BUNDLED = ("all", "bundle")  # values of plsc-export --to that end with a bundle
ARTIFACTS = (  # of a run, as far as they are there
    "config.toml",
    "metrics.jsonl",
    "tensorboard",
    "data",
    "checkpoints",
    "result.json",
    "loss.png",
    "vocab.txt",
    "vectors.bin",
    "vectors.txt",
    "roc.png",
    "export/model.onnx",
    "export/table.safetensors",
    "export/dense.safetensors",
    "export/centres.safetensors",
    "export/embeddings.safetensors",
    "export/backbone.safetensors",
    "export/model.pt2",
    "bundle",
)
EXPORTED = {Path(name).name for name in ARTIFACTS if name.startswith("export/")} | {"thumbnails.safetensors"}
MEASURED = ("result.json", "loss.png", "roc.png")  # what an evaluation writes of them
T = TypeVar("T")
Command = Callable[[Sequence[str] | None], int]


def _until_unheard(command: Command) -> Command:
    """The command, ended without a word where nobody reads what it prints any more, as by `| head`."""

    @functools.wraps(command)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return command(argv)
        except BrokenPipeError:
            if not _is_unheard():
                raise
            return EXIT_UNHEARD
        finally:
            try:
                sys.stdout.flush()
            except BrokenPipeError:  # what still waits to be printed would be a traceback at the very end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return run


def _is_unheard() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    try:
        asked = select.poll()
        asked.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in asked.poll(0))
    except (AttributeError, OSError, ValueError):  # none, closed, or no file of the system
        return False


@_until_unheard
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
    return _guarded(lambda: _start("train", _parse(f"plsc-train {args[0]}", args)))


@_until_unheard
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
    args, report = _taken(args, "--report", "")

    def check() -> None:
        if asked and (not report or report.startswith("-")):
            raise ValueError(f"got --report {report!r}, expected a folder for the page")
        if asked:
            check_folder(report, "--report")

    return _again("plsc-eval", "evaluate", args, [report], check)


@_until_unheard
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
    args, to = _taken(args, "--to", "all")
    args, storage = _taken(args, "--storage", "fp32")
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


@_until_unheard
def serve(argv: Sequence[str] | None = None) -> int:
    """plsc-serve BUNDLE [flags]: embeddings and nearest classes over HTTP, with a page."""
    args = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: cli_serve.run(args))


@_until_unheard
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


@_until_unheard
def data(argv: Sequence[str] | None = None) -> int:
    """plsc-data verify | stats | convert | split | pairs | templates | align: data sets looked at and changed."""
    parser = argparse.ArgumentParser(
        prog="plsc-data",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="PATH: a folder NAME/*.jpg, .zip of it, list (.txt), .rec, .tar, .parquet, .lmdb or .bin.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words, places in (
        ("verify", "read every image: broken ones, repeats, one picture under two labels, sizes, speed", ["path"]),
        ("stats", "what the labels say, in seconds", ["path"]),
        (
            "convert",
            "write PATH as TARGET (folder, .txt, .rec, .tar, x-{}.tar, .parquet, .lmdb), bytes kept",
            ["path", "target"],
        ),
        ("split", "write most classes of PATH to TRAIN and the others to TEST", ["path", "train", "test"]),
        ("pairs", "draw verification pairs, in LFW's format", ["path", "target"]),
        (
            "templates",
            "figures of IJB-B, IJB-C and the like: EMBEDDINGS of plsc-embed, MEDIA lines `image template medium`",
            ["embeddings", "media"],
        ),
        ("align", "cut the faces out of photographs, by five landmarks, and write them as TARGET", ["path", "target"]),
    ):
        command = commands.add_parser(
            name, help=words, description=words, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        for place in places:
            command.add_argument(place, metavar=place.upper())
        if name == "verify":
            command.add_argument("--limit", type=_count, default=0, help="look at so many images only, evenly spaced")
        if name == "split":
            command.add_argument("--share", type=float, default=0.1, help="of the classes, for TEST")
        if name == "pairs":
            command.add_argument("--num-pairs", type=_count, default=6000, help="half of them same, half different")
            command.add_argument("--folds", type=_count, default=10, help="stretches of the list, as LFW's ten")
        if name == "align":
            command.add_argument("--image-size", type=_count, default=112, help="of the squares")
            command.add_argument("--quality", type=_count, default=95, help="of the JPEGs; 0 writes PNG")
            command.add_argument("--landmarks", help="a file of `name x1 y1 ... x5 y5`; else faces are detected")
            command.add_argument("--save-landmarks", metavar="FILE", help="where to write those that were detected")
        if name in ("split", "pairs"):
            command.add_argument("--seed", type=_count, default=0, help="another one draws others")
        if name == "templates":
            command.add_argument("--pairs", metavar="FILE", help="lines `template template 0/1`: 1:1")
            command.add_argument("--gallery", metavar="FILE", nargs="+", default=[], help="lists of templates: 1:N")
            command.add_argument("--probes", metavar="FILE", help="what is searched for in each --gallery")
            command.add_argument("--landmarks", metavar="FILE", help="lines `image x1 .. y5 score`: weigh by scores")
            command.add_argument("--out", metavar="FILE", help="where the figures go as JSON")
            continue
        command.add_argument("--root", help="of a list: the folder that relative paths start at, if not its own")
        command.add_argument("--cache", help="of a .rec or .tar: a file to keep the index in")
        command.add_argument("--rebuild-index", action="store_true", help="of a .rec: make the .idx anew")
        command.add_argument("--image-column", metavar="NAME", help="of Parquet, if it is not `image`")
        command.add_argument("--label-column", metavar="NAME", help="of Parquet, if it is not `label`")
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    return _guarded(lambda: _data(args))


@_until_unheard
def ps(argv: Sequence[str] | None = None) -> int:
    """plsc-ps train RECIPE [flags]: what learns rows of a sparse table."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands = {"train": _ps_train}
    if args and args[0] in cli_ps.COMMANDS:
        return _guarded(lambda: cli_ps.run(args))
    if not args or args[0] not in commands:
        print(
            "usage: plsc-ps train RECIPE [--out DIR] [--epochs N] [--threads N] [--data.train FILES] ...\n"
            "       plsc-ps train word2vec [corpus.txt] ...\n\n"
            f"RECIPE is a TOML file or a shipped recipe: {', '.join(list_recipes(PS_TASKS))}.\n"
            "plsc-ps train RECIPE --help lists every flag with the recipe's values.\n"
            f"Servers: plsc-ps {' | '.join(cli_ps.COMMANDS)}, each with --help."
        )
        return 0 if args and args[0] in ("-h", "--help") else EXIT_USAGE
    if len(args) < 2 or args[1].startswith("-"):
        return ps(["--help"]) if args[1:2] in (["-h"], ["--help"]) else ps([])
    return _guarded(lambda: commands[args[0]](args[1], args[2:]))


def work(command: str, config_file: str, *extra: str) -> int:
    """What each rank runs that `_launch` started: the command with the config that was resolved once, there."""
    return _guarded(lambda: _work(command, load_recipe(config_file), extra))


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


def _count(text: str) -> int:
    """argparse's type for whole numbers from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number from 0")
    return int(text)


def _data(args: argparse.Namespace) -> int:
    """1 where `verify` found what spoils training."""
    if args.command == "templates":
        return _templates(args)
    options = {"root": args.root, "cache": args.cache, "image": args.image_column, "label": args.label_column}
    options["index"] = "rebuild" if args.rebuild_index else None
    source = open_images(args.path, **{name: value for name, value in options.items() if value})
    if args.command in ("verify", "stats"):
        bar = _Bar("reading")
        found = (
            health.verify(source, limit=args.limit, progress=bar) if args.command == "verify" else health.count(source)
        )
        print("\n".join(found.lines()))
        return 0 if found.sound else EXIT_FAILURE
    for name in ("target", "train", "test"):
        if hasattr(args, name):
            check_folder(os.path.dirname(getattr(args, name)) or ".", f"the folder of {name.upper()}")
            check_free(getattr(args, name))
    if getattr(args, "save_landmarks", None):
        check_free(args.save_landmarks)
    if args.command == "align":
        if args.landmarks:
            with opening("--landmarks", args.landmarks):
                faces = align.read_landmarks(args.landmarks, source)
        else:
            faces = align.find_faces(source, align.open_detector(), progress=_Bar("finding faces"))
        if args.save_landmarks:
            align.write_landmarks(args.save_landmarks, source, faces)
        made = align.Aligned(source, faces, image_size=args.image_size, quality=args.quality)
        convert(made, args.target, progress=_Bar("writing"))
        print(f"written: {args.target} ({len(made)} of {len(source)} images)")
    elif args.command == "convert":
        convert(source, args.target, progress=_Bar("writing"))
        print(f"written: {args.target}")
    elif args.command == "split":
        kept, held = split(source, [args.train, args.test], share=args.share, seed=args.seed)
        print(f"written: {args.train} ({kept} classes), {args.test} ({held} classes)")
    else:
        pairs = make_pairs(source.labels, num_pairs=args.num_pairs, folds=args.folds, seed=args.seed)
        write_pairs(args.target, pairs, [source.name(i) for i in range(len(source))])
        print(f"written: {args.target} ({len(pairs)} pairs)")
    return 0


def _templates(args: argparse.Namespace) -> int:
    """Figures of the IJB protocol."""
    from plsc.train.template_figures import template_figures

    lists = {"pairs": args.pairs, "galleries": args.gallery, "probes": args.probes, "landmarks": args.landmarks}
    if args.out:
        check_folder(os.path.dirname(args.out) or ".", "the folder of --out")
        check_free(args.out)
    found = template_figures(args.embeddings, args.media, **lists)
    print("\n".join(found.lines()))
    if args.out:
        with atomic_file(args.out) as file:
            file.write(json.dumps(found.as_json(), indent=2, allow_nan=False).encode() + b"\n")
        print(f"written: {args.out}")
    return 0


def _ps_train(recipe: str, flags: Sequence[str]) -> int:
    """The run that a recipe with one of PS_TASKS describes, in this process."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for "module:attr" in recipes
    values = read_recipe(recipe, PS_TASKS)
    if values.get("task") not in PS_TASKS:
        raise ValueError(f"recipe {recipe} has task {values.get('task')!r}, expected one of {', '.join(PS_TASKS)}")
    if values["task"] == "word2vec":
        return _word2vec(recipe, values, flags)
    from plsc.train import ctr
    from plsc.train.ctr_config import CtrConfig

    config = _override(f"plsc-ps train {recipe}", from_dict(CtrConfig, values, where=f"recipe {recipe}"), flags)
    with _logging_to_stdout(LocalCommunicator()):
        result = ctr.train(config, progress=_Bar("training"))
    _report(Path(config.out), {})
    print(", ".join(f"{name} {value:.4f}" for name, value in result.items()))
    return 0


def _word2vec(recipe: str, values: dict[str, Any], flags: Sequence[str]) -> int:
    """Word vectors; files of text may stand right after the recipe. Started by a launcher, as one of its workers."""
    from plsc.train import word2vec
    from plsc.train.word2vec_config import Word2VecConfig

    files = list(itertools.takewhile(lambda flag: not flag.startswith("-"), flags))
    flags = [*(["--data.train", *files] if files else []), *flags[len(files) :]]
    config = _override(f"plsc-ps train {recipe}", from_dict(Word2VecConfig, values, where=f"recipe {recipe}"), flags)
    comm = connect()
    with _logging_to_stdout(comm):
        result = word2vec.train(config, comm=comm, progress=_Bar("training") if comm.rank == 0 else None)
    if comm.rank == 0:
        _report(Path(config.out), {})
        print(", ".join(f"{name} {value:.4f}" for name, value in result.items()))
    comm.close()
    return 0


def _taken(args: list[str], flag: str, default: str) -> tuple[list[str], str]:
    """The arguments without a flag and its value, and that value."""
    words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith(f"{flag}=") else [arg])]
    if flag not in words:
        return words, default
    at = words.index(flag)
    return words[:at] + words[at + 2 :], (words[at + 1 : at + 2] or [""])[0]


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
        config = replace(_parse(f"{prog} {folder}", [str(config_file), *args[1:]]), out=folder)
        return _start(command, config, extra)

    return _guarded(run)


def _plan_here(args: Sequence[str]) -> list[str]:
    """--plan without a word after it is --plan here."""
    alone = [arg == "--plan" and after.startswith("-") for arg, after in itertools.pairwise([*args, "-"])]
    return ["--plan=here" if bare else arg for arg, bare in zip(args, alone, strict=True)]


def _plan(config: Config) -> int:
    """What fits, said by one rank alone."""
    from plsc.train import run  # noqa: F401  what a training process has loaded counts
    from plsc.train.plan import plan

    started = Launch.read()
    if started is not None and started.rank > 0:
        return 0
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
    with _logging_to_stdout(comm):
        if command == "train":
            result = run.train(config, comm=comm, progress=_Bar("drawing glyphs") if comm.rank == 0 else None)
        elif command == "evaluate":
            result = run.evaluate(config, report=extra[0], comm=comm)
            if comm.rank == 0 and extra[0]:
                print(f"report: {Path(extra[0]) / 'report.html'}")
        elif command == "embed":
            bar = _Bar("embedding") if comm.rank == 0 else None
            source, target, overwrite = extra
            run.embed_images(config, source, target, overwrite=bool(overwrite), comm=comm, progress=bar)
            result = None
        else:
            to, storage, thumbnails = extra
            written = list(run.export(config, to=to, thumbnails=bool(thumbnails), comm=comm).values())
            result = None
            if comm.rank == 0:
                bundles = [cli_serve.bundle_run(config.out, storage=storage)] if to in BUNDLED else []
                _say_written([*written, *bundles])
                if bundles:
                    _say_how_to_serve(Path(config.out))
        if command == "train" and result is not None and config.export and comm.rank == 0:
            cli_serve.bundle_run(config.out)
    if comm.rank == 0 and result is not None:
        _report(Path(config.out), result, MEASURED if command == "evaluate" else ARTIFACTS)
    comm.close()
    return 0


@contextmanager
def _logging_to_stdout(comm: Communicator) -> Iterator[None]:
    """What the library logs, as plain lines: all of rank 0's, the warnings of the others.

    A record marked `once` says what every rank finds, of every data set alike: rank 0 says it, of the first.
    """
    said: set[str] = set()

    def is_news(record: logging.LogRecord) -> bool:
        if not getattr(record, "once", False):
            return True
        known = comm.rank > 0 or record.msg in said
        said.add(record.msg)
        return not known

    log, handler = logging.getLogger("plsc"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if comm.rank == 0 else f"rank {comm.rank}: %(message)s"))
    handler.addFilter(is_news)
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO if comm.rank == 0 else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _parse(prog: str, args: Sequence[str]) -> Config:
    """The recipe, overridden by flags."""
    recipe = load_recipe(args[0])
    config = _override(prog, recipe, _plan_here(args[1:]))
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


def _override(prog: str, config: T, flags: Sequence[str]) -> T:
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


def _newest(out: str) -> Path | None:
    """The newest whole checkpoint of a run."""
    return Checkpoints(Path(out) / "checkpoints", comm=LocalCommunicator()).latest()


def _report(out: Path, result: dict[str, Any], names: Sequence[str] = ARTIFACTS) -> None:
    """Where everything is; the one figure people look for comes last."""
    _say_written([out / name for name in names if (out / name).exists()])
    if (out / "bundle").exists():
        _say_how_to_serve(out)
    for name in ("top1", "top5"):
        if name in result:
            print(f"{name} accuracy: {result[name] * 100:.2f} %")
    if "accuracy" in result:
        print(f"verification accuracy: {result['accuracy'] * 100:.2f} %")
    sys.stdout.flush()


def _say_written(paths: Sequence[Path]) -> None:
    print("\nwritten:")
    for path in paths:
        print(f"  {path}")
    sys.stdout.flush()


def _say_how_to_serve(out: Path) -> None:
    print(f"serve it, with a page to look at: plsc-serve {out}", flush=True)


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


def _guarded(run: Callable[[], int]) -> int:
    """An error becomes one sentence, or a traceback where that is needed; a rank leaves it to its launcher to say."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # where a mapped file is cut short, the process ends: say at what line
    try:
        # A rank of several may wait inside of a collective, where no handler runs: a signal ends it at once.
        with stopped_by_signals() if Launch.read() is None else nullcontext():
            return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Stopped as stopped:
        print(f"stopped by {stopped.name}: what was not whole is removed", file=sys.stderr)
        return stopped.code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_unheard():
            raise
        code, text = exit_code(error), told(error)
        if not report(code, text, about_others=isinstance(error, CommError)):
            print(text, file=sys.stderr)
        return code


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
