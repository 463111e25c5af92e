"""A store by words: from a mode's name and a list of servers, or a table of this process where there are none."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plsc.ps.geo import Geo
from plsc.ps.host import Host, Seat
from plsc.ps.modes import Async, Communicator, Direct, HalfAsync, Sync
from plsc.ps.rules import RULES, Rule
from plsc.ps.store import SharedStore
from plsc.ps.table import Table

MODES: dict[str, Callable[..., Communicator]] = {
    "direct": Direct,
    "async": Async,
    "half_async": HalfAsync,
    "sync": Sync,
    "geo": Geo,
}
REMOTE_ARGS = ("wire", "timeout", "patience", "tls", "certificate", "server_name", "run")


def check_mode(mode: str, args: Mapping[str, Any]) -> None:
    """ValueError where the mode is unknown or has no such argument."""
    if mode not in MODES:
        raise ValueError(f"ps: got {mode!r}, expected none or one of {', '.join(MODES)}")
    known = [name for name in inspect.signature(MODES[mode]).parameters if name != "store"]
    if strangers := [name for name in args if name not in (*known, *REMOTE_ARGS)]:
        expected = ", ".join((*known, *REMOTE_ARGS))
        raise ValueError(f"ps_args: {mode} knows no {', '.join(strangers)}; expected {expected}")


def open_store(
    name: str,
    *,
    dim: int,
    mode: str,
    servers: Sequence[str],
    args: Mapping[str, Any],
    rank: int,
    workers: int,
    rule: str | Rule | None = None,
    lr: float | None = None,
) -> Communicator:
    """Table `name` of the servers in this mode; without servers a new table here, which only one worker can have.

    rule, lr: of a table made here (adagrad, 0.05); of the servers' they must be what the servers say.
    """
    check_mode(mode, args)
    store: SharedStore
    if servers:
        from plsc.ps.remote import connect

        options = {key: value for key, value in args.items() if key in REMOTE_ARGS}
        store = connect(servers, table=name, rank=rank, **options)
        _compare(name, store, dim, rule, lr)
    elif workers > 1:
        raise ValueError(f"table {name!r}: got {workers} workers and no servers; start some with plsc-ps serve")
    else:
        made = Table(dim, rule="adagrad" if rule is None else rule, lr=0.05 if lr is None else lr, locked=True)
        store = Seat(Host(made, name=name))
    settings = {key: value for key, value in args.items() if key not in REMOTE_ARGS}
    if "workers" in inspect.signature(MODES[mode]).parameters:
        settings.setdefault("workers", workers)
    return MODES[mode](store, **settings)


def _compare(name: str, store: SharedStore, dim: int, rule: str | Rule | None, lr: float | None) -> None:
    wanted = RULES[rule]() if isinstance(rule, str) and rule in RULES else rule
    for what, got, served in (("dim", dim, store.dim), ("rule", wanted, store.rule), ("lr", lr, store.lr)):
        if got is not None and got != served:
            raise ValueError(
                f"table {name!r}: got {what} {got!r}, the servers have {served!r}; change the script or tables.toml"
            )
