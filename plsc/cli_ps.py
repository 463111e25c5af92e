"""The commands of plsc-ps: `train` learns rows of tables, the others run servers of them."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plsc.cli_common import Bar, logging_to_stdout, say_result
from plsc.cli_flags import override
from plsc.comm import LocalCommunicator, connect
from plsc.ps.store import ServerLost
from plsc.train.config import from_dict, read_recipe
from plsc.train.failures import EXIT_FAILURE

PS_TASKS = ("ctr", "word2vec")  # of recipes for `train`
COMMANDS = ("serve", "launch", "stat", "save", "reshard")
EPILOG = "Tokens are read from PLSC_PS_TOKEN, not from the command line, where other users of the machine see them."


def run(argv: Sequence[str]) -> int:
    """plsc-ps COMMAND ...; a ValueError says what the user got wrong."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    handlers = {"serve": _serve, "launch": _launch, "stat": _stat, "save": _save, "reshard": _reshard}
    return handlers[args.command](args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plsc-ps", epilog=EPILOG)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve the tables that a TOML file describes", epilog=EPILOG)
    serve.add_argument("settings", metavar="tables.toml")
    for flag, kind in (("host", str), ("port", int), ("index", int), ("count", int), ("folder", str), ("run", str)):
        serve.add_argument(f"--{flag}", type=kind, help=f"instead of [server] {flag}")
    serve.add_argument("--metrics-port", type=int, help="instead of [server] metrics_port")
    serve.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="a TCPStore, or etcd as etcd://HOST:PORT, to say this server's address in",
    )
    serve.add_argument("--advertise", metavar="HOST:PORT", help="the address to say there, where it is not --host's")
    launch = commands.add_parser("launch", help="servers and workers on this machine: launch ... -- script.py")
    launch.add_argument("--tables", default="tables.toml", metavar="tables.toml")
    launch.add_argument("--servers", type=int, default=1)
    launch.add_argument("--workers", type=int, default=1)
    launch.add_argument("--folder", help="a folder for the servers' saves and logs")
    launch.add_argument("--restarts", type=int, default=3, help="times that a process which dies is started again")
    launch.add_argument("script", nargs=argparse.REMAINDER, help="script.py and its arguments, after --")
    for name, words in (("stat", "a live view of servers"), ("save", "have all servers save under one name")):
        ask = commands.add_parser(name, help=words, epilog=EPILOG)
        ask.add_argument("servers", metavar="HOST:PORT,...")
        ask.add_argument("--tls", help="file of the authority that signed the servers' certificates")
        ask.add_argument("--certificate", nargs=2, metavar=("CERT", "KEY"), help="this client's own")
        if name == "stat":
            ask.add_argument("--every", type=float, default=1.0, help="seconds")
            ask.add_argument("--once", action="store_true")
        else:
            ask.add_argument("name")
    reshard = commands.add_parser("reshard", help="saves of some servers as folders of another number of servers")
    reshard.add_argument("--saves", nargs="+", required=True, help="a save of each old server: FOLDER/auto-0000000007")
    reshard.add_argument("--folders", nargs="+", required=True, help="a new folder for each new server")
    return parser


def _serve(args: argparse.Namespace) -> int:
    from plsc.ps.discovery import publish
    from plsc.ps.server import Server
    from plsc.ps.settings import read_settings

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    flags = ("host", "port", "index", "count", "folder", "run", "metrics_port")
    tables, options = read_settings(args.settings, {name: getattr(args, name) for name in flags})
    server = Server(tables, **options)
    held = None
    if args.rendezvous:
        where = args.advertise or server.address
        try:
            held = publish(args.rendezvous, run=server.run, index=server.index, count=server.count, address=where)
        except BaseException:
            server.close()
            raise
    stopping: list[int] = []

    def stop(number: int, frame: Any) -> None:
        stopping.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    print(f"serving {', '.join(tables)} on {server.address}, server {server.index} of {server.count}", flush=True)
    while not stopping:
        server.closing.wait(0.5)
    print("stopping", flush=True)
    del held  # until now for whoever was looking
    code = 0
    try:
        server.close(save=server.state is not None)
    except Exception as error:
        print(f"error: could not save, the last save stands: {error}", file=sys.stderr)
        code = EXIT_FAILURE
    # Workers' streams are still open, and Flight's threads would wait for them for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _launch(args: argparse.Namespace) -> int:
    from plsc.ps.launch import launch

    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script:
        raise ValueError("got no script, expected plsc-ps launch ... -- script.py [arguments]")
    command = [sys.executable, *script] if script[0].endswith(".py") else script

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return launch(
        args.tables,
        command,
        servers=args.servers,
        workers=args.workers,
        folder=args.folder,
        restarts=args.restarts,
        say=say,
    )


def _stat(args: argparse.Namespace) -> int:
    from plsc.ps.ask import ask, table_of

    before: dict[str, Any] = {}
    while True:
        answers: dict[str, Any] = {}
        lost: list[str] = []
        for address in args.servers.split(","):
            try:
                answers |= ask(address, "stat", tls=args.tls, certificate=args.certificate)
            except ServerLost as error:  # it may be on its way back
                if args.once:
                    raise
                lost.append(str(error))
        lines, before = table_of(answers, before, time.monotonic())
        lines += lost
        if sys.stdout.isatty() and not args.once:
            print("\033[2J\033[H", end="")
        print("\n".join(lines), flush=True)
        if args.once:
            return 0
        time.sleep(args.every)


def _save(args: argparse.Namespace) -> int:
    from plsc.ps.ask import ask

    body = {"name": args.name}
    for address, answer in ask(args.servers, "save", body, tls=args.tls, certificate=args.certificate).items():
        print(f"{address}: {answer['rows']} rows in {answer['path']}")
    return 0


def _reshard(args: argparse.Namespace) -> int:
    from plsc.ps.reshard import reshard

    rows = reshard(args.saves, args.folders)
    print(f"{rows} rows from {len(args.saves)} to {len(args.folders)} servers")
    return 0


def train(recipe: str, flags: Sequence[str]) -> int:
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

    config = override(f"plsc-ps train {recipe}", from_dict(CtrConfig, values, where=f"recipe {recipe}"), flags)
    with logging_to_stdout(LocalCommunicator()):
        result = ctr.train(config, progress=Bar("training"))
    say_result(Path(config.out), {})
    print(", ".join(f"{name} {value:.4f}" for name, value in result.items()))
    return 0


def _word2vec(recipe: str, values: dict[str, Any], flags: Sequence[str]) -> int:
    """Word vectors; files of text may stand right after the recipe. Started by a launcher, as one of its workers."""
    from plsc.train import word2vec
    from plsc.train.word2vec_config import Word2VecConfig

    files = list(itertools.takewhile(lambda flag: not flag.startswith("-"), flags))
    flags = [*(["--data.train", *files] if files else []), *flags[len(files) :]]
    config = override(f"plsc-ps train {recipe}", from_dict(Word2VecConfig, values, where=f"recipe {recipe}"), flags)
    comm = connect()
    with logging_to_stdout(comm):
        result = word2vec.train(config, comm=comm, progress=Bar("training") if comm.rank == 0 else None)
    if comm.rank == 0:
        say_result(Path(config.out), {})
        print(", ".join(f"{name} {value:.4f}" for name, value in result.items()))
    comm.close()
    return 0
