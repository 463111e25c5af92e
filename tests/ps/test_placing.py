"""Commands of docs/cluster.md that place servers and workers, run as they stand there on addresses of one machine."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from plsc.ps import Table
from plsc.ps.launch import free_ports
from plsc.ps.log import State

PAGE = (Path(__file__).resolve().parents[2] / "docs/cluster.md").read_text(encoding="utf-8")
WORKERS = 2
PUSHES = 5
KEYS = np.arange(9, dtype=np.uint64)
SETTINGS = """
[server]
durability = "log"
[tables.clicks]
dim = 2
rule = "sgd"
lr = 1.0
init = "zeros"
"""
SCRIPT = f"""
import os, numpy as np, plsc
with plsc.ps.connect(table="clicks", patience=120) as store:
    for _ in range({PUSHES}):
        store.push(np.arange(9, dtype=np.uint64), np.ones((9, 2), np.float32))
open("done-" + os.environ["RANK"], "w").close()
"""
# What srun does of what the page asks of it, on one machine: as many tasks as asked for, node i at 127.0.0.i.
SRUN = """#!/bin/bash
tasks=1
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#--ntasks=}; shift; done
for ((task = 0; task < tasks; task++)); do
  SLURM_PROCID=$task SLURMD_NODENAME=127.0.0.$((task + 1)) "$@" & echo $! >> "$SLURM_STAND_IN/step-$tasks"
done
wait
"""
SCANCEL = """#!/bin/bash
xargs kill -TERM < "$SLURM_STAND_IN/step-2"
"""
SCONTROL = """#!/bin/bash
printf '127.0.0.%d\\n' 1 2 3 4
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")]


def block(heading: str, language: str = "bash", number: int = 0) -> str:
    """A block of this language under a heading of the part on servers."""
    part = PAGE[PAGE.index("# Servers of tables") :]
    section = part[part.index(f"\n## {heading}\n") + 1 :].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S)[number]


def here(text: str, ports: dict[str, int]) -> str:
    """The page's hosts as addresses of this machine, its ports as free ones."""
    text = text.replace("10.0.0.", "127.0.0.")
    for port, free in ports.items():
        text = re.sub(rf"\b{port}\b", str(free), text)
    return text


class Machine:
    """A folder with tables.toml and script.py, the commands on its PATH, and what was started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tables.toml").write_text(SETTINGS)
        (folder / "script.py").write_text(SCRIPT)
        (folder / "bin").mkdir()
        start = f"import sys; sys.path[:] = {sys.path!r}; from plsc.cli import ps; sys.exit(ps())"
        self.put("plsc-ps", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -c {shlex.quote(start)} "$@"\n')
        self.put("python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        source = os.pathsep.join(filter(None, sys.path))
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": source, "PLSC_PS_TOKEN": "0123456789abcdef"}
        self.environment["OMP_NUM_THREADS"] = "1"
        self.started: list[subprocess.Popen[str]] = []

    def put(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, command: str, **environment: str) -> subprocess.Popen[str]:
        words = ["bash", "-c", f"exec {command}"]
        own = {**self.environment, **environment}
        child = subprocess.Popen(words, cwd=self.folder, env=own, stdout=subprocess.PIPE, text=True)
        self.started.append(child)
        return child

    def serve(self, command: str, **environment: str) -> subprocess.Popen[str]:
        child = self.start(command, **environment)
        assert child.stdout is not None and child.stdout.readline().startswith("serving"), command
        return child

    def run(self, command: str, **environment: str) -> str:
        own = {**self.environment, **environment}
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=own, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def train(self, command: str) -> None:
        """The page's line for worker 0, and the same for the others."""
        crew = [self.start(f"env {command.replace('RANK=0', f'RANK={rank}')}") for rank in range(WORKERS)]
        assert [each.wait(300) for each in crew] == [0] * WORKERS

    def end(self, *servers: subprocess.Popen[str]) -> None:
        for each in servers:
            each.send_signal(signal.SIGTERM)
        assert [each.wait(60) for each in servers] == [0] * len(servers)

    def assert_saved(self, *folders: str, pushes: int = WORKERS * PUSHES) -> None:
        """The servers' folders hold every push of every worker."""
        rows = np.zeros((len(KEYS), 2), np.float32)
        for index, folder in enumerate(folders):
            state = State(self.folder / folder, durability="log", index=index, count=len(folders))
            tables = state.load({"clicks": Table(2, rule="sgd", lr=1.0, init="zeros")}, {"clicks": {}})
            rows += tables["clicks"].table.pull(KEYS, create=False)
            state.close()
        np.testing.assert_array_equal(rows, np.full((len(KEYS), 2), -pushes))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for child in made.started:
        child.kill()
        child.communicate()


def test_launch(machine: Machine) -> None:
    machine.run(block("One machine", "console").removeprefix("$ "))
    machine.assert_saved("state/server-0", "state/server-1", pushes=4 * PUSHES)


def test_plain_hosts(machine: Machine) -> None:
    ports = {"7000": free_ports(1)[0]}
    first, second, worker = here(block("Plain hosts"), ports).splitlines()
    servers = [machine.serve(first), machine.serve(second)]
    machine.train(worker)
    stat, save = here(block("Plain hosts", number=1), ports).splitlines()
    assert len(re.findall(r"clicks", machine.run(stat))) == 2
    machine.run(save)
    assert all((machine.folder / f"state-{index}/monday").is_dir() for index in range(2))
    machine.end(*servers)
    machine.assert_saved("state-0", "state-1")


def test_systemd(machine: Machine) -> None:
    unit = block("systemd", "ini")
    if shutil.which("systemd-analyze"):
        # What it lints is the unit's grammar; the program lies elsewhere here.
        path = machine.folder / "plsc-ps@.service"
        path.write_text(unit.replace("/opt/plsc/bin/plsc-ps", "/bin/sh").replace("/etc/plsc/ps.env", "-/none"))
        lint = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
        assert "plsc-ps@" not in lint.stderr, lint.stderr
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    port = free_ports(1)[0]
    line = here(line, {}).replace("/opt/plsc/bin/", "").replace("/etc/plsc/", "").replace("/var/lib/plsc/", "state-")
    assert [re.search(r"--port (\S+)", line.replace("%i", i))[1] for i in "01"] == ["7000", "7001"]  # type: ignore[index]
    line = re.sub(r"--port \S+", f"--port {port}", line).replace("127.0.0.1", "127.0.0.1%i")
    servers = [machine.serve(line.replace("%i", str(index))) for index in range(2)]
    machine.train(f"RANK=0 PLSC_PS_SERVERS=127.0.0.10:{port},127.0.0.11:{port} python script.py")
    servers[1].kill()  # Restart=always: the same command again
    servers[1].wait()
    servers[1] = machine.serve(line.replace("%i", "1"))
    machine.end(*servers)
    machine.assert_saved("state-0", "state-1")


def test_slurm_with_a_stand_in_for_srun(machine: Machine) -> None:
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        machine.put(name, text)
    script = here(block("Slurm"), {"7000": free_ports(1)[0]})
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    machine.run(script, SLURM_STAND_IN=str(machine.folder), SLURM_JOB_ID="1")
    machine.assert_saved("state-0", "state-1", pushes=4 * PUSHES)


def test_kubernetes(machine: Machine) -> None:
    yaml = pytest.importorskip("yaml")
    service, pods = yaml.safe_load_all(block("Kubernetes", "yaml"))
    spec, template = pods["spec"], pods["spec"]["template"]
    name = pods["metadata"]["name"]
    assert service["metadata"]["name"] == spec["serviceName"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    volumes = [each["name"] for each in template["spec"]["volumes"]]
    volumes += [each["metadata"]["name"] for each in spec["volumeClaimTemplates"]]
    assert sorted(each["name"] for each in container["volumeMounts"]) == sorted(volumes)
    shell, flag, line = container["command"]
    assert (shell, flag) == ("sh", "-c") and f"--count {spec['replicas']} " in line
    port = free_ports(1)[0]
    servers = []
    for index in range(spec["replicas"]):
        own = line.replace("0.0.0.0", f"127.0.0.{index + 1}").replace("/etc/plsc/", "").replace("7000", str(port))
        own = own.replace("/data", f"data-{index}")
        servers.append(machine.serve(f"sh -c {shlex.quote(own)}", HOSTNAME=f"{name}-{index}"))
    machine.train(f"RANK=0 PLSC_PS_SERVERS=127.0.0.1:{port},127.0.0.2:{port} python script.py")
    machine.end(*servers)
    machine.assert_saved("data-0", "data-1")


HEADING = "Addresses that nobody knows beforehand"


def test_addresses_in_a_tcp_store(machine: Machine) -> None:
    rendezvous(machine, here(block(HEADING), {"7100": free_ports(1)[0]}))


def test_addresses_in_etcd(machine: Machine) -> None:
    pytest.importorskip("etcd3gw", reason="the client is missing: pip install etcd3gw")
    if shutil.which("etcd") is None:
        pytest.skip("etcd is missing: apt install etcd-server")
    client, peer = free_ports(2)
    flags = f"--data-dir etcd --listen-client-urls http://127.0.0.9:{client} --listen-peer-urls http://127.0.0.9:{peer}"
    flags += f" --advertise-client-urls http://127.0.0.9:{client} --initial-advertise-peer-urls http://127.0.0.9:{peer}"
    machine.start(f"etcd {flags} --initial-cluster default=http://127.0.0.9:{peer} 2>etcd.log")
    until = time.monotonic() + 60
    while "ready to serve client requests" not in (machine.folder / "etcd.log").read_text():
        assert time.monotonic() < until
        time.sleep(0.1)
    rendezvous(machine, here(block(HEADING, number=1), {"2379": client}))


def rendezvous(machine: Machine, page: str) -> None:
    first, second, worker = page.splitlines()
    servers = [machine.serve(first), machine.serve(second)]
    machine.train(worker)
    machine.end(*servers)
    machine.assert_saved("state-0", "state-1")
