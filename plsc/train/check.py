"""plsc-train --check: looks at the ranks, their links, clocks, versions, config and data, and says what is wrong."""

from __future__ import annotations

import platform
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
from typing import Any
from zlib import crc32

import numpy as np
import torch

from plsc.comm import FailedTogether
from plsc.comm.communicator import ranks_text
from plsc.comm.launch import Launch
from plsc.comm.probe import PAIR_SECONDS, Link, Responder, Unreachable, collect, meet, own_address, share, visit
from plsc.train.build import build_data, num_classes
from plsc.train.config import Config, to_dict
from plsc.train.resume import class_names, digest

COME_SECONDS = 120.0  # that ranks get to start
DATA_SECONDS = 3600.0  # that they get to open their data
CLOCK_SECONDS = 2.0  # apart, from which on logs and certificates of hosts do not fit together
SLOW = 0.25  # of the median rate: a link that holds up the others
PACKAGES = ("torch", "numpy", "plsc-torch")
Say = Callable[[str], None]


def check(config: Config, *, say: Say, launch: Launch | None = None) -> bool:
    """Looks at everything; False on ranks that leave the talking to rank 0 where something is wrong.

    Rank 0 says what it found line by line, and raises FailedTogether with one sentence for each thing that is wrong.
    launch: this process's place; default: the environment's, else a world of one.
    """
    launch = launch or Launch.read() or Launch(0, 1, None, "127.0.0.1", "0")
    facts = about_this_rank(config, launch)
    if launch.world_size == 1:
        facts |= about_data(config)
        problems = [*errors([facts]), *about_batch(config, 1)]
        return _told([facts], [[]], problems, config, say)
    store = meet(launch, seconds=COME_SECONDS)
    everyone = range(launch.world_size)
    with ExitStack() as stack:
        if "error" not in facts:
            responder = stack.enter_context(Responder(facts["address"]))
            facts["port"] = responder.port
        share(store, launch.rank, "facts", facts)
        try:
            ranks = collect(store, everyone, "facts", seconds=COME_SECONDS)
            links = visit_all(ranks, launch.rank)
            share(store, launch.rank, "links", [asdict(link) for link in links])
            found = collect(store, everyone, "links", seconds=len(ranks) * PAIR_SECONDS * 2)
            if launch.rank > 0:  # what has to be made first is made once
                collect(store, [0], "data", seconds=DATA_SECONDS)
            share(store, launch.rank, "data", about_data(config))
            data = collect(store, everyone, "data", seconds=DATA_SECONDS)
        except Unreachable as error:
            if launch.rank == 0:
                raise FailedTogether(f"the ranks are not ready: {error}") from error
            return False
        ranks = [rank | more for rank, more in zip(ranks, data, strict=True)]
        between = [[Link(**link) for link in each] for each in found]
        problems = [
            *errors(ranks),
            *differences(ranks),
            *about_links(ranks, between),
            *about_batch(config, launch.world_size),
        ]
        share(store, launch.rank, "end", True)
        if launch.rank == 0:
            collect(store, everyone, "end", seconds=PAIR_SECONDS)  # the store goes with this rank
            return _told(ranks, between, problems, config, say)
    return not problems


def about_this_rank(config: Config, launch: Launch) -> dict[str, Any]:
    """Who this rank is, with an "error" where it cannot say."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "backend": backend,
        "device": gpu or f"CPU {platform.machine()}",
        "versions": {"Python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
        "settings": flat(to_dict(config)),
        "time": time.time(),
    }
    try:
        facts["address"], facts["interface"] = own_address(backend, launch.address)
    except (ValueError, OSError) as error:
        facts["error"] = str(error)
    return facts


def about_data(config: Config) -> dict[str, Any]:
    """Size and digest of what the config's data set holds, or why it does not open."""
    try:
        data = build_data(config.data, seed=config.seed)
        labels = crc32(np.ascontiguousarray(data.labels, np.int64).tobytes())
        names = digest(class_names(data))
        size = {"images": len(data), "classes": num_classes(config, data), "labels": f"{labels:08x}"}
        return {"data": size | {"names": names and names[:8]}}
    except (ValueError, OSError) as error:
        return {"data error": str(error)}


def visit_all(ranks: Sequence[Mapping[str, Any]], own: int) -> list[Link]:
    """This rank to every other one in turn, each beginning with the one after it."""
    links = []
    for step in range(1, len(ranks)):
        peer = (own + step) % len(ranks)
        if "port" in ranks[peer]:
            links.append(visit(peer, ranks[peer]["address"], ranks[peer]["port"]))
    return links


# ---- what is wrong, in sentences


def errors(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """What single ranks could not do; said once where all say the same."""
    told: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        for text in (facts.get("error"), facts.get("data error")):
            if text:
                told.setdefault(text, []).append(rank)
    return [f"{ranks_text(who)}: {text}" if len(ranks) > 1 else text for text, who in told.items()]


def differences(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must be the same on all ranks and is not."""
    found = []
    for kind, what in (("versions", ""), ("settings", "setting "), ("data", "data: number of ")):
        tables = [facts.get(kind, {}) for facts in ranks]
        for name in dict.fromkeys(name for table in tables for name in table):
            if all(tables) and len({str(table.get(name)) for table in tables}) > 1:
                who: dict[str, list[int]] = {}
                for rank, table in enumerate(tables):
                    who.setdefault(repr(table.get(name)), []).append(rank)
                values = ", ".join(f"{value} on {ranks_text(where)}" for value, where in who.items())
                label = f"data: digest of {name}" if kind == "data" and name in ("labels", "names") else what + name
                found.append(f"{label} differs: {values}")
    backends = {facts["backend"] for facts in ranks}
    if len(backends) > 1:
        without = [rank for rank, facts in enumerate(ranks) if facts["backend"] == "gloo"]
        found.append(f"{ranks_text(without)} found no GPU, the others have one")
    return found


def about_links(ranks: Sequence[Mapping[str, Any]], links: Sequence[Sequence[Link]]) -> list[str]:
    """Pairs that do not reach each other, addresses that lead nowhere, clocks that are off."""
    found = []
    hosts = {facts["host"] for facts in ranks}
    for rank, facts in enumerate(ranks):
        if len(hosts) > 1 and str(facts.get("address", "")).startswith("127."):
            found.append(
                f"rank {rank} (host {facts['host']}) would tell the others {facts['address']} ({facts['interface']}), "
                f"which leads nowhere from another host; set {facts['backend'].upper()}_SOCKET_IFNAME to the interface "
                "that does"
            )
    for rank, each in enumerate(links):
        for link in each:
            if link.error:
                peer = ranks[link.peer]
                found.append(
                    f"rank {rank} (host {ranks[rank]['host']}) does not reach rank {link.peer} (host {peer['host']}) "
                    f"at {peer['address']}:{peer['port']}: {link.error}"
                )
    for link in links[0]:
        if not link.error and abs(link.ahead) > CLOCK_SECONDS:
            way = "ahead of" if link.ahead > 0 else "behind"
            found.append(
                f"the clock of rank {link.peer} (host {ranks[link.peer]['host']}) is {abs(link.ahead):.1f} s {way} "
                "rank 0's; let both hosts set theirs by a time server"
            )
    return found


def about_batch(config: Config, world: int) -> list[str]:
    parts = world * config.strategy.accumulate
    if config.batch_size % parts == 0:
        return []
    return [f"batch_size is {config.batch_size}, expected a multiple of ranks * accumulate = {parts}"]


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one table of names with dots; `nproc` says how ranks are started, not what they do."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif prefix + name != "nproc":
            found[prefix + name] = value
    return found


# ---- what is said


def _told(
    ranks: Sequence[Mapping[str, Any]],
    links: Sequence[Sequence[Link]],
    problems: Sequence[str],
    config: Config,
    say: Say,
) -> bool:
    """Rank 0's report; raises where there is a problem."""
    hosts: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        hosts.setdefault(facts["host"], []).append(rank)
    say("ranks: " + "; ".join(f"{ranks_text(who)} on {host}" for host, who in hosts.items()))
    say("devices: " + ", ".join(sorted({facts["device"] for facts in ranks})))
    say("versions: " + ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items()))
    if len(ranks) > 1:
        say("addresses: " + ", ".join(f"{f['address']} ({f['interface']})" for f in ranks if "address" in f))
    if "data" in ranks[0]:
        size = ranks[0]["data"]
        say(f"data: {size['images']} images of {size['classes']} classes, labels {size['labels']}")
    good = [(rank, link) for rank, each in enumerate(links) for link in each if not link.error]
    if good:
        rates = [link.rate for _, link in good]
        delays = [1e3 * link.delay for _, link in good]
        say(
            f"links: {len(good)} of {len(ranks) * (len(ranks) - 1)}; {min(delays):.2f} to {max(delays):.2f} ms there "
            f"and back, {min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f} MB/s"
        )
        for rank, link in good:
            if link.rate < SLOW * statistics.median(rates):
                say(f"slow: rank {rank} to rank {link.peer}, {link.rate / 1e6:.1f} MB/s")
        say(f"clocks: within {max(abs(link.ahead) for _, link in good) * 1e3:.1f} ms")
    if problems:
        raise FailedTogether("the ranks are not ready: " + "\n  ".join(["", *problems]).rstrip())
    say(f"ready: batches of {config.batch_size}, {config.batch_size // len(ranks)} a rank and optimizer step")
    return True
