"""This process's place among the ranks, as whatever launched it wrote it into the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = "29500"
MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
PORTS = (20_000, 40_000)  # a Slurm step without MASTER_PORT takes one of these, by its job's number


@dataclass(frozen=True)
class Launch:
    """rank of world_size ranks, which meet at address:port."""

    rank: int
    world_size: int
    local_rank: int | None
    address: str
    port: str

    @staticmethod
    def read() -> Launch | None:
        """What the environment says, by the first of these that names a rank; None if none does.

        RANK and WORLD_SIZE with MASTER_ADDR and MASTER_PORT: torchrun, Kubeflow's PyTorchJob, Ray Train, your own.
        Open MPI's with MASTER_ADDR: mpirun may have been started by srun, once a host.
        A step of Slurm's srun: its first host is where ranks meet, where MASTER_ADDR does not say otherwise.
        With MASTER_ADDR: Slurm's variables outside of a step, and JOB_COMPLETION_INDEX (a Kubernetes Job of completion
        mode Indexed) with WORLD_SIZE. MASTER_PORT is then 29500 unless it is set. Empty variables count as absent.
        ValueError where it speaks of several ranks and leaves out what they need (each would be a world of its own),
        and where WORLD_SIZE is another number than the launcher's.
        """
        env = {name: value for name, value in os.environ.items() if value.strip()}
        if "RANK" in env:
            return _of(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", needs=("MASTER_ADDR", "MASTER_PORT"))
        if "SLURM_PROCID" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1" and MPI[0] not in env:
            return _of_slurm_step(env)
        for rank, size, local in (
            MPI,
            ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
            ("JOB_COMPLETION_INDEX", "WORLD_SIZE", ""),
        ):
            several = env.get(size, "1") != "1" and not rank.startswith("SLURM")  # Slurm's batch script is one process
            if rank in env and (several or "MASTER_ADDR" in env):
                return _of(env, rank, size, local)
        if env.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                f"the environment sets WORLD_SIZE={env['WORLD_SIZE']} but no rank; set RANK for each, or start them "
                "with torchrun, srun, or a Kubernetes Job of completionMode Indexed; for one process unset WORLD_SIZE"
            )
        return None


def launcher_holds_store() -> bool:
    """Whether ranks meet in torchrun's own store, which outlives them; else rank 0 holds one."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def number_of_start() -> str:
    """How often torchrun has started the ranks again, where its store still has what their predecessors wrote."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if launcher_holds_store() else "0"


def _of(env: Mapping[str, str], rank: str, size: str, local: str, *, needs: tuple[str, ...] = ()) -> Launch:
    absent = [name for name in (rank, size, "MASTER_ADDR", *needs) if not env.get(name)]
    if absent:
        raise ValueError(
            f"the environment sets {rank} but not {', '.join(dict.fromkeys(absent))}; start the ranks with torchrun, "
            "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"
        )
    port = env.get("MASTER_PORT") or DEFAULT_PORT
    return _made(env, rank, size, local, env["MASTER_ADDR"], port)


def _made(env: Mapping[str, str], rank: str, size: str, local: str, address: str, port: str) -> Launch:
    """The place that the named variables give; ValueError where they are no numbers or no place."""
    read = {name: env[name] for name in (rank, size, local) if env.get(name)}
    numbers = {name: int(value) if value.strip().isdecimal() else -1 for name, value in (read | {"port": port}).items()}
    if min(numbers.values()) < 0 or numbers[rank] >= numbers[size] or not 0 < numbers["port"] < 2**16:
        said = ", ".join(f"{name}={value}" for name, value in read.items())
        raise ValueError(
            f"the environment sets {said}, and ranks meet at port {port}; expected 0 <= {rank} < {size} and a port "
            "between 1 and 65535"
        )
    if env.get("WORLD_SIZE", "1") not in ("1", read[size]):
        raise ValueError(
            f"the environment sets {size}={read[size]} and WORLD_SIZE={env['WORLD_SIZE']}, expected the same number; "
            "unset WORLD_SIZE, which the launcher has not set"
        )
    return Launch(numbers[rank], numbers[size], numbers.get(local), address, port)


def _of_slurm_step(env: Mapping[str, str]) -> Launch:
    """srun sets the ranks' number, and where they run, for the step itself; the job's own may be more."""
    low, high = PORTS
    numbers = [int(env[name]) if env.get(name, "").isdecimal() else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job = numbers[0] * 7 + numbers[1]  # steps of a job side by side
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    address = env.get("MASTER_ADDR") or first_host(nodes)
    if not address:
        raise ValueError(
            "the environment is that of a Slurm step but names no hosts (SLURM_STEP_NODELIST); set MASTER_ADDR to the "
            "host of task 0"
        )
    port = env.get("MASTER_PORT") or str(low + job % (high - low))
    return _made(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", address, port)


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: "n[007-010,12],m1" gives "n007"; "" gives ""."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes.strip())
    return "" if match is None else "".join(part or "" for part in match.groups())
