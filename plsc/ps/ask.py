"""Questions to servers from outside a run: how they are, and to save; and the lines of `plsc-ps stat`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plsc.ps.link import question
from plsc.ps.wire import bearer


def ask(
    servers: str,
    name: str,
    body: dict[str, Any] | None = None,
    *,
    tls: str | None = None,
    certificate: Sequence[str] | None = None,
    token: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Each server's answer to "health", "stat" or "save", by address. The token's default is PLSC_PS_TOKEN."""
    token = os.environ.get("PLSC_PS_TOKEN") if token is None else token
    headers = bearer(token)
    options: dict[str, Any] = {} if tls is None else {"tls_root_certs": Path(tls).read_bytes()}
    if certificate is not None:
        options["cert_chain"], options["private_key"] = (Path(file).read_bytes() for file in certificate)
    timeout = 3600.0 if name == "save" else 10.0
    return {
        address: question(address, name, body, tls=tls is not None, options=options, headers=headers, timeout=timeout)
        for address in servers.split(",")
    }


def table_of(answers: dict[str, Any], before: dict[str, Any], now: float) -> tuple[list[str], dict[str, Any]]:
    """A line for each table of each server; rates are since `before`, what this function returned last time."""
    head = ("server", "table", "rows", "MB", "workers", "pulls/s", "pushes/s", "Mkeys/s", "hit %", "p99 ms", "stale")
    lines = ["{:<22} {:<12} {:>11} {:>8} {:>7} {:>8} {:>8} {:>8} {:>6} {:>7} {:>6}".format(*head)]
    seen: dict[str, Any] = {}
    for address, answer in answers.items():
        for name, t in answer["tables"].items():
            counts = {kind: t["requests"].get(kind, 0) for kind in ("pull", "push")}
            counts |= {"keys": sum(t["keys"].values()), "time": now}
            seen[f"{address} {name}"] = counts
            last = before.get(f"{address} {name}")
            rate = {kind: 0.0 for kind in ("pull", "push", "keys")}
            if last is not None and now > last["time"]:
                rate = {kind: max(0, counts[kind] - last[kind]) / (now - last["time"]) for kind in rate}
            pulled = t["keys"].get("pull", 0)
            hit = 100 * (1 - min(1, t["born"] / pulled)) if pulled else 0.0
            size = (t["arena_bytes"] + t["index_bytes"]) / 1e6
            slow = 1e3 * max(t["p99_seconds"].values(), default=0.0)
            lines.append(
                f"{address:<22} {name:<12} {t['rows']:>11} {size:>8.0f} {t['workers']:>7} {rate['pull']:>8.1f} "
                f"{rate['push']:>8.1f} {rate['keys'] / 1e6:>8.2f} {hit:>6.1f} {slow:>7.2f} {t['staleness_p50']:>6}"
            )
    return lines, seen
