"""Hosts inside one machine: network namespaces joined by links of a set speed; they vanish with whoever made them.

    with Lab(4, mbit=100) as lab:
        ranks = [lab.start(host, ["python", "train.py"], env) for host in range(4)]

A host has a name of its own (h0, h1, ...), its own loopback and one interface eth0 at 10.77.0.1, 10.77.0.2, ...; a
token bucket shapes both directions. The namespaces have no names in the file system: each lives as long as the process
that holds it, and the kernel ends those processes when this one dies. Needs Linux, iproute2 and root. No latency and no
loss are emulated, so nothing measured here says anything about either.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# What a host runs first. Its own /etc/hosts: without one, name look-ups of the transports wait for a server.
HOLDER = """
set -e
hostname h{index}
mount --bind {folder}/hosts /etc/hosts
for file in nsswitch.conf resolv.conf; do
    if [ -e /etc/$file ]; then mount --bind {folder}/$file "$(readlink -f /etc/$file)"; fi
done
ip link set lo up
echo ready
exec sleep infinity
"""


def missing() -> str | None:
    """Why there can be no lab on this machine; None where there can."""
    for tool in ("unshare", "nsenter", "ip", "tc", "mount", "hostname"):
        if shutil.which(tool) is None:
            return f"needs the command {tool} (Linux: util-linux, iproute2, hostname)"
    words = ["unshare", "--net", "--mount", "--uts", "true"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    why = f"needs the right to make network namespaces (root): {tried.stderr.strip()}"
    return None if tried.returncode == 0 else why


class Lab:
    """`hosts` hosts behind one switch; a context manager."""

    def __init__(self, hosts: int, *, mbit: float) -> None:
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self.mbit = mbit
        self._holders: list[subprocess.Popen[str]] = []  # of the hosts, then of the switch
        self._ranks: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Lab:
        try:
            with tempfile.TemporaryDirectory(prefix="plsc-lab-") as name:
                self._write_names(Path(name))
                for index in range(len(self.addresses) + 1):
                    self._holders.append(self._hold(index, Path(name)))
                for holder in self._holders:
                    assert holder.stdout is not None
                    if holder.stdout.readline() != "ready\n":
                        raise RuntimeError(f"a host did not start: {holder.communicate()[1]}")
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str], *, cwd: str | Path = ".", **options: Any
    ) -> subprocess.Popen[Any]:
        """The command on a host; options are Popen's. It ends with this process."""
        names = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
        place = ["-t", str(self._holders[host].pid), "--net", "--mount", "--uts", f"--wd={Path(cwd).absolute()}"]
        inside = ["nsenter", *place, "--", *command]
        process = subprocess.Popen(
            inside, env={**os.environ, **names, **env}, preexec_fn=_die_with_parent, start_new_session=True, **options
        )
        self._ranks.append(process)
        return process

    def kill_host(self, host: int) -> None:
        """Ends everything that runs on a host, as a power cut would."""
        for pid in _members(self._holders[host].pid):
            if pid != self._holders[host].pid:
                _kill(pid)

    def cut(self, host: int) -> None:
        """Takes a host off the switch: its processes go on, nobody reaches them."""
        self._on_switch("ip", "link", "set", f"host{host}", "down")

    def close(self) -> None:
        for holder in self._holders:
            for pid in _members(holder.pid):  # what was started may have started more, in sessions of their own
                _kill(pid)
            holder.kill()
            holder.communicate()
        for process in self._ranks:
            process.wait()
        self._holders.clear()

    # ---- inside

    def _write_names(self, folder: Path) -> None:
        lines = ["127.0.0.1 localhost", *(f"{address} h{host}" for host, address in enumerate(self.addresses))]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "nsswitch.conf").write_text("hosts: files\n")
        (folder / "resolv.conf").write_text("")

    def _hold(self, index: int, folder: Path) -> subprocess.Popen[str]:
        script = HOLDER.format(index=index, folder=folder)
        return subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_parent,
        )

    def _connect(self) -> None:
        self._on_switch("ip", "link", "add", "switch", "type", "bridge")
        self._on_switch("ip", "link", "set", "switch", "up")
        for host, address in enumerate(self.addresses):
            pid, port = str(self._holders[host].pid), f"host{host}"
            self._on_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
            self._on_switch("ip", "link", "set", port, "master", "switch", "up")
            _inside(pid, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            _inside(pid, "ip", "link", "set", "eth0", "up")
            _inside(pid, *self._shape("eth0"))  # host to switch
            self._on_switch(*self._shape(port))  # switch to host

    def _shape(self, device: str) -> list[str]:
        burst = max(128, round(self.mbit))  # KB; a tick of the kernel's clock must fit into it
        rate = [f"{self.mbit:g}mbit", "burst", f"{burst}kb", "latency", "100ms"]
        return ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", *rate]

    def _on_switch(self, *command: str) -> None:
        _inside(str(self._holders[-1].pid), *command)


def sent_bytes(device: str = "eth0") -> int:
    """What this host has sent through an interface so far, headers included; to be asked on the host."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[8])
    raise ValueError(f"no interface {device!r} here")


def _inside(pid: str, *command: str) -> None:
    done = subprocess.run(["nsenter", "-t", pid, "--net", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _members(pid: int) -> list[int]:
    """The processes that are on the host which `pid` holds."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(folder / "ns/net") == os.readlink(f"/proc/{pid}/ns/net"):
                found.append(int(folder.name))
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
