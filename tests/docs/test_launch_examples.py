"""The scripts in `examples/` start what they say; stand-ins for srun, ssh and accelerate note their calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml

from tests.distributed.launch import ROOT

EXAMPLES = ROOT / "examples"
TRAIN = "train.py --config run.yaml training.run_name=two words"


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def run(tmp_path: Path, command: list[str], **env: str) -> list[str]:
    """The calls of `accelerate`, sorted, each in one line."""
    calls = tmp_path / "calls"
    stand_in(tmp_path, "accelerate", f'echo "$@" >> {calls}')
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, env={"PATH": path, **env}, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return sorted(calls.read_text(encoding="utf-8").splitlines())


def launched(rank: int, address: str, port: int, processes: int) -> str:
    world = f"--num_machines 2 --num_processes {processes} --machine_rank {rank}"
    return f"launch --multi_gpu {world} --main_process_ip {address} --main_process_port {port} {TRAIN}"


def test_slurm(tmp_path: Path) -> None:
    stand_in(tmp_path, "scontrol", "printf 'node7\\nnode9\\n'")
    stand_in(tmp_path, "srun", 'shift; for id in 0 1; do SLURM_NODEID=$id "$@"; done')
    job = {"SLURM_JOB_NODELIST": "node[7,9]", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2"}
    gpus = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64"}
    script = ["bash", str(EXAMPLES / "slurm" / "train.sbatch"), "run.yaml", "training.run_name=two words"]
    assert run(tmp_path, script, **job, **gpus) == [launched(rank, "node7", 23456, 16) for rank in (0, 1)]


def test_ssh(tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    stand_in(tmp_path, "hostname", "echo 10.0.0.7 172.17.0.1")
    stand_in(tmp_path, "ssh", '[ "$1" = -tt ] && shift; shift; bash -c "$*"')
    script = ["bash", str(EXAMPLES / "ssh" / "train.sh"), "host7 host9", "4", "run.yaml", "training.run_name=two words"]
    assert run(tmp_path, script) == [launched(rank, "10.0.0.7", 29500, 8) for rank in (0, 1)]


def test_kubernetes(tmp_path: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "trainjob.yaml").read_text(encoding="utf-8"))
    trainer = job["spec"]["trainer"]
    assert (job["kind"], job["apiVersion"], trainer["numNodes"]) == ("TrainJob", "trainer.kubeflow.org/v1alpha1", 2)
    node = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "sft-node-0-0", "PET_MASTER_PORT": "29400"}
    (call,) = run(tmp_path, [*trainer["command"], *trainer["args"]], **node)
    assert call == launched(1, "sft-node-0-0", 29400, 16).replace(TRAIN, "train.py --config /config/run.yaml")
