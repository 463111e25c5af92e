"""Which world connect() and world() give: from the environment, from torch.distributed, or of one rank."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plsc.comm import (
    BACKENDS,
    Checked,
    CommError,
    Communicator,
    GlooCommunicator,
    LocalCommunicator,
    NcclCommunicator,
    connect,
    run_ranks,
    world,
)
from plsc.comm import world as world_function
from plsc.comm.launch import Launch, first_host

LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "PLSC_DEBUG", "JOB_COMPLETION_INDEX")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
OTHERS = ("SLURM_STEP_", "SLURM_JOB_", "OMPI_", "TORCHELASTIC_", "GROUP_")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, and no world left from before or for after."""
    for name in (*LAUNCH, *SLURM, *(name for name in os.environ if name.startswith(OTHERS))):
        monkeypatch.delenv(name, raising=False)
    world_function().close()
    yield
    world_function().close()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_world_of_one_is_the_same_each_time() -> None:
    here = connect()
    assert isinstance(here, LocalCommunicator) and here.world_size == 1
    assert world() is here and connect() is here and connect("local") is here
    here.close()
    assert world() is not here and world() is world()


def test_unknown_and_impossible_backends() -> None:
    with pytest.raises(ValueError, match=r"expected 'auto' or one of .*gloo, local, nccl"):
        connect("smoke signals")
    with pytest.raises(ValueError, match="names no rank; start the ranks with torchrun"):
        connect("gloo")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"use connect\('gloo'\)"):
            BACKENDS["nccl"].connect(timeout=1.0, init_timeout=1.0)


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="sets RANK but not MASTER_ADDR, MASTER_PORT"):
        connect()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (  # torchrun
            "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=h0 MASTER_PORT=29400 "
            "TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True",
            Launch(3, 4, 1, "h0", "29400"),
        ),
        (  # Kubeflow's PyTorchJob
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PET_NNODES=2 PYTHONUNBUFFERED=1",
            Launch(1, 2, None, "job-master-0", "23456"),
        ),
        (  # a Kubernetes Job of completion mode Indexed
            "JOB_COMPLETION_INDEX=2 WORLD_SIZE=3 MASTER_ADDR=train-0.train",
            Launch(2, 3, None, "train-0.train", "29500"),
        ),
        (  # Ray Train's worker, which also has joined torch.distributed already
            "RANK=1 LOCAL_RANK=0 NODE_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=41000",
            Launch(1, 2, 0, "10.0.0.1", "41000"),
        ),
        (  # srun
            "SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=6 SLURM_JOB_ID=77 SLURM_STEP_ID=1 "
            "SLURM_STEP_NODELIST=node[003-004,9] SLURM_JOB_NODELIST=node[001-009]",
            Launch(5, 6, 1, "node003", "20540"),
        ),
        (  # srun, told where to meet
            "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=2 MASTER_ADDR=h7 MASTER_PORT=1234",
            Launch(1, 2, 1, "h7", "1234"),
        ),
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_NODELIST=n[1-2]", None),  # a batch script outside of srun is one
        ("SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NODELIST=n1", None),  # an interactive shell
        (  # mpirun
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 MASTER_ADDR=h0",
            Launch(1, 2, 0, "h0", "29500"),
        ),
        (  # mpirun inside of a Slurm job starts a daemon on each host by srun, and ranks inherit its number
            "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 MASTER_ADDR=n1 "
            "SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=n[1-2] SLURM_JOB_ID=5",
            Launch(5, 8, 1, "n1", "29500"),
        ),
        (  # a batch script that says how many ranks srun is to start
            "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=2 MASTER_ADDR=h7 MASTER_PORT=1234 WORLD_SIZE=2",
            Launch(1, 2, 1, "h7", "1234"),
        ),
        ("RANK= WORLD_SIZE= MASTER_ADDR= LOCAL_RANK=", None),  # a template that was not filled in
        ("", None),
    ],
)
def test_launchers_are_understood(environment: str, expected: Launch | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for word in environment.split():
        monkeypatch.setenv(*word.split("=", 1))
    assert Launch.read() == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("RANK=0 MASTER_ADDR=h0 MASTER_PORT=1", "sets RANK but not WORLD_SIZE"),
        ("RANK=4 WORLD_SIZE=4 MASTER_ADDR=h0 MASTER_PORT=1", "RANK=4, WORLD_SIZE=4.*expected 0 <= RANK < WORLD_SIZE"),
        ("RANK=-1 WORLD_SIZE=4 MASTER_ADDR=h0 MASTER_PORT=1", "RANK=-1, WORLD_SIZE=4"),
        ("RANK=0 WORLD_SIZE=two MASTER_ADDR=h0 MASTER_PORT=1", "WORLD_SIZE=two"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=x MASTER_ADDR=h0 MASTER_PORT=1", "LOCAL_RANK=x"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h0 MASTER_PORT=http", "port http; expected"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h0 MASTER_PORT=70000", "port 70000; expected"),
        ("WORLD_SIZE=4 MASTER_ADDR=h0", "sets WORLD_SIZE=4 but no rank"),  # a Job that is not Indexed
        ("WORLD_SIZE=4", "sets WORLD_SIZE=4 but no rank.*unset WORLD_SIZE"),
        ("RANK= WORLD_SIZE=4 MASTER_ADDR=h0 MASTER_PORT=1", "sets WORLD_SIZE=4 but no rank"),
        ("RANK=0 WORLD_SIZE= MASTER_ADDR=h0 MASTER_PORT=1", "sets RANK but not WORLD_SIZE"),
        (
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=n1 WORLD_SIZE=8",
            "SLURM_STEP_NUM_TASKS=2 and WORLD_SIZE=8, expected the same",
        ),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 MASTER_ADDR=h0 WORLD_SIZE=4",
            "OMPI_COMM_WORLD_SIZE=2 and WORLD_SIZE=4",
        ),
        ("JOB_COMPLETION_INDEX=0 MASTER_ADDR=h0", "sets JOB_COMPLETION_INDEX but not WORLD_SIZE"),
        ("JOB_COMPLETION_INDEX=0 WORLD_SIZE=2", "sets JOB_COMPLETION_INDEX but not MASTER_ADDR"),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4", "sets OMPI_COMM_WORLD_RANK but not MASTER_ADDR"),
        ("SLURM_PROCID=7 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=n1", "SLURM_PROCID=7, SLURM_STEP_NUM_TASKS=2"),
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=many SLURM_STEP_NODELIST=n1", "SLURM_STEP_NUM_TASKS=many"),
    ],
)
def test_several_ranks_without_what_they_need(environment: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a world of one each, all of which would train and write to one folder."""
    for word in environment.split():
        monkeypatch.setenv(*word.split("=", 1))
    with pytest.raises(ValueError, match=words):
        Launch.read()


@pytest.mark.parametrize("environment", ["JOB_COMPLETION_INDEX=3", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1"])
def test_a_process_of_its_own(environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many Jobs that have nothing to do with each other; mpirun of one."""
    for word in environment.split():
        monkeypatch.setenv(*word.split("=", 1))
    assert Launch.read() is None


def test_the_first_host_of_a_slurm_list() -> None:
    lists = {"n[007-010,12],m1": "n007", "gpu1,gpu2": "gpu1", "one": "one", "r[1-2]n3": "r1n3", "": ""}
    assert {nodes: first_host(nodes) for nodes in lists} == lists


def test_a_slurm_step_without_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ValueError, match="set MASTER_ADDR to the host of task 0"):
        connect()


def test_each_start_under_torchrun_has_keys_of_its_own(
    monkeypatch: pytest.MonkeyPatch, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its store keeps what the ranks before wrote; a rank that reads their addresses reaches nobody."""
    if torch.cuda.is_available():
        pytest.skip("would start NCCL")
    store = dist.TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    launcher = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "1"}
    for name, value in {**place, **launcher}.items():
        monkeypatch.setenv(name, value)
    for start in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        connect("gloo", timeout=5.0, init_timeout=5.0)
        c10d_store = dist.distributed_c10d._get_default_store()
        c10d_store.set("mark", start)
        world().close()
        assert store.num_keys() > 0 and "torchrun cannot restart" not in caplog.text
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with caplog.at_level(logging.WARNING):
        connect("gloo", timeout=5.0, init_timeout=5.0)
        assert not dist.distributed_c10d._get_default_store().check(["mark"])
        world().close()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommError, match=r"rank 0 could not join 2 ranks at 127.0.0.1:\d+ within 1 s"):
        connect("gloo", init_timeout=1.0)


@pytest.mark.parametrize("slurm", [False, True])
def test_connects_from_the_environment(monkeypatch: pytest.MonkeyPatch, free_port: int, slurm: bool) -> None:
    if torch.cuda.is_available():
        pytest.skip("would start NCCL")
    names = SLURM if slurm else ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    launch = dict(zip(names, "010", strict=True))
    for name, value in {**launch, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}.items():
        monkeypatch.setenv(name, value)
    alone = world()  # asked before connecting: a world of one, which gives way
    here = connect(timeout=5.0)
    assert here is not alone and isinstance(here, GlooCommunicator) and dist.is_initialized()
    assert world() is here and connect("gloo") is here
    with pytest.raises(ValueError, match="in a world of 'gloo' already"):
        connect("local")
    assert here.all_gather(torch.ones(2)).wait().tolist() == [1.0, 1.0]
    here.close()
    assert not dist.is_initialized()
    assert world() is not here


def test_unconnected_ranks_are_warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with caplog.at_level(logging.WARNING):
        assert world().world_size == 1
    assert "has not connected" in caplog.text


def test_a_gpu_of_a_world_of_torch_does_not_need_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that spawns its ranks tells torch the rank, and the environment the rest."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="sets WORLD_SIZE=4 but no rank"):
        NcclCommunicator._find_device()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert NcclCommunicator._find_device() == torch.device("cuda", 0) and chosen == [0]


def test_groups_that_nobody_closes_are_forgotten() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    here = world()
    verbs = here._session.heartbeat._verbs
    for _ in range(3):
        group = here.split([[0]])
        group.all_reduce(torch.ones(2)).wait()
    gc.collect()
    assert len(verbs) == 2
    del group
    gc.collect()
    assert list(verbs) == ["world"]
    here.close()


def test_adopts_a_world_of_torch_and_leaves_it_to_its_owner() -> None:
    alone = world()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    here = world()
    assert here is not alone and here.name == "gloo" and world() is here and connect() is here
    assert here.gather_objects("x") == ["x"]
    assert here.split([[0]]).all_reduce(torch.ones(2)).wait().tolist() == [1.0, 1.0]
    here.close()
    assert dist.is_initialized()
    again = world()
    assert again is not here and again.name == "gloo"
    dist.destroy_process_group()
    assert world().name == "local"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert world() is not again and world().name == "gloo"


def test_debug_wraps_in_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLSC_DEBUG", "1")
    here = connect()
    assert isinstance(here, Checked) and world() is here
    assert isinstance(here.split([[0]]), Checked)
    assert here.all_reduce(torch.ones(2)).wait().tolist() == [1.0, 1.0]


def test_ranks_that_are_threads_have_their_own() -> None:
    def body(comm: Communicator) -> bool:
        with pytest.raises(ValueError, match="in a world of 'threads' already"):
            connect("gloo")
        return connect() is comm

    assert run_ranks(2, body) == [True, True]


def test_a_new_backend_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(LocalCommunicator):
        @classmethod
        def connect(cls, *, timeout: float, init_timeout: float) -> Communicator:
            made = cls("cpu")
            made.name = "mine"
            return made

    monkeypatch.setitem(BACKENDS, "mine", Mine)
    assert connect("mine") is world()
    assert world().name == "mine"


def test_a_port_in_use_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CommError, match=f"{port}: the port is in use.*choose another MASTER_PORT"):
            connect("gloo", init_timeout=10.0)


ENDINGS = {
    "ours": "world = plsc.comm.connect('gloo')",
    "of torch": "torch.distributed.init_process_group('gloo'); world = plsc.comm.connect('gloo')",
}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
@pytest.mark.parametrize("start", ENDINGS.values(), ids=ENDINGS)
def test_no_thread_of_ours_outlives_the_end(start: str, free_port: int) -> None:
    """Python aborts a process whose transport still frees tensors then. Nothing is closed by the script."""
    script = f"""
import atexit, pathlib

@atexit.register  # the first registered runs last
def threads():
    names = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
    print(sorted({{name for name in names if "gloo_runloop" in name}} | {{t.name for t in threading.enumerate()}}))

import threading, time, torch, torch.distributed, plsc
{start}
comms = [world, world.split([[0]]), plsc.comm.Ring(world)]
job = plsc.comm.background.Background(world.device)
for comm in comms:
    comm.all_reduce(torch.ones(5)).wait()
    comm.all_gather(torch.ones(5)).wait()
job.submit(lambda: (time.sleep(0.5), comms[1].all_gather(torch.ones(9)).wait()))
running = pathlib.Path("/proc/self/task")
assert any("gloo_runloop" in (task / "comm").read_text() for task in running.iterdir())
"""
    environment = {
        **os.environ,
        **{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)},
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr


def test_torch_never_has_the_last_reference_of_a_world_that_was_closed(free_port: int) -> None:
    """torch's DDP frees its group with the GIL held, and then waits for threads that may need the GIL."""
    script = f"""
import os, torch
from torch.nn.parallel import DistributedDataParallel
from plsc.comm import connect, torch_distributed
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="{free_port}")
comm = connect("gloo")
group = torch.distributed.group.WORLD
net = DistributedDataParallel(torch.nn.Linear(2, 2))
net(torch.ones(1, 2)).sum().backward()
comm.gather_objects("all")
comm.close()
assert torch_distributed._ended == [group] and not torch.distributed.is_initialized()
del net, group
print("freed")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "freed\n", done.stdout + done.stderr
