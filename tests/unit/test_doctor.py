"""`doctor` finds what would stop a training or make it wait, says what to do, and never waits itself."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from sft_toolkit.cli import main
from sft_toolkit.doctor import packages
from sft_toolkit.doctor.building import check_building
from sft_toolkit.doctor.finding import Finding
from sft_toolkit.doctor.machine import check_disks, check_limits
from sft_toolkit.doctor.network import check_collective, check_network
from sft_toolkit.engines.distributed import start_problems
from sft_toolkit.engines.files_of_system import file_system, is_shared
from tests.distributed.launch import clean_environment

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def bad(findings: list[Finding]) -> list[str]:
    return [finding.in_words() for finding in findings if finding.level == "bad"]


def test_the_installed_stack_goes_together() -> None:
    findings = list(packages.check_packages())
    assert bad(findings) == []
    assert "torch " in findings[1].text


def test_packages_that_clash_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.9", "transformers": "5.24.0", "tokenizers": "0.19"}
    wishes = {"transformers": ["tokenizers>=0.22", "safetensors>=0.4", "jax; extra == 'flax'"]}
    monkeypatch.setattr(packages, "_version", versions.get)
    monkeypatch.setattr(packages, "_requires", lambda name: wishes.get(name, []))
    assert bad(list(packages.check_packages())) == [
        "bad   packages     transformers needs tokenizers>=0.22, found 0.19: pip install 'tokenizers>=0.22'",
        "bad   packages     transformers needs safetensors: pip install 'safetensors>=0.4'",
    ]


def test_a_lock_of_the_dead_is_bad_and_one_of_the_living_is_not(tmp_path: Path) -> None:
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):
        findings = [finding for finding in check_building(env) if finding.topic == "jit cache"]
        assert [finding.level for finding in findings] == ["note"]
        assert f"process {os.getpid()} compiles" in findings[0].text
        assert start_problems("zero2", "it", {**LAUNCHED, **env}) == []
    stale = f"{lock}: its owner was killed while compiling, and every start would wait for ever; remove it"
    assert f"bad   jit cache    {stale}" in bad(list(check_building(env)))
    assert start_problems("zero2", "it", {**LAUNCHED, **env}) == [stale]  # a training refuses to wait, too
    assert start_problems("ddp", "it", {**LAUNCHED, **env}) == []


def test_what_deepspeed_compiles_with_is_missing(tmp_path: Path) -> None:
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    said = bad(list(check_building(env)))
    assert [line.split(":")[0] for line in said] == [
        "bad   compiler     no C++ compiler, and DeepSpeed compiles at its start",
        "bad   ninja        not on the PATH, and DeepSpeed compiles with it",
        f"bad   compiler     CUDA_HOME={tmp_path} holds no bin/nvcc",
    ]


def test_a_disk_without_room_for_two_checkpoints(tmp_path: Path) -> None:
    (fits,) = check_disks(tmp_path / "not" / "there" / "yet", 2**20)
    (full,) = check_disks(tmp_path, 2**60)
    assert (fits.level, full.level) == ("ok", "bad")
    assert full.remedy == f"a checkpoint takes {2**30:.1f} GiB, and two are there at a time"
    assert file_system(Path("/proc/self")) == "proc"
    assert not is_shared(Path("/proc/self"))


def test_threads_are_noted_where_nobody_set_them() -> None:
    topics = [finding.topic for finding in check_limits({})]
    assert "threads" in topics
    assert "threads" not in [finding.topic for finding in check_limits({"OMP_NUM_THREADS": "2"})]


def test_interfaces_launchers_and_ports() -> None:
    there = [name for _, name in socket.if_nameindex()]
    assert bad(list(check_network({"GLOO_SOCKET_IFNAME": there[0], "NCCL_SOCKET_IFNAME": "^docker"}))) == []
    assert bad(list(check_network({"NCCL_SOCKET_IFNAME": "nope7"}))) == [
        f"bad   interface    NCCL_SOCKET_IFNAME=nope7, and there is {', '.join(there)}: unset NCCL_SOCKET_IFNAME"
    ]
    assert bad(list(check_network({"RANK": "0"})))[0].startswith("bad   launcher     RANK")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = [finding for finding in check_network({"MASTER_PORT": str(port)}) if finding.topic == "port"]
    assert busy[0].level == "note"
    assert busy[0].text.startswith(f"{port}: ")


def test_the_command_ends_with_one_where_something_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert main(["doctor", "--ranks", "0"]) == 0
    assert "ok    jit cache" in capsys.readouterr().out
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    assert main(["doctor", "--ranks", "0", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [finding["topic"] for finding in found if finding["level"] == "bad"] == ["jit cache"]


@pytest.mark.slow
def test_two_processes_add_up_or_say_why_not() -> None:
    env = clean_environment()
    (found,) = check_collective(2, env)
    assert found.level == "ok"
    assert float(found.text.split(": ")[1].removesuffix(" GB/s")) > 0
    (found,) = check_collective(2, {**env, "GLOO_SOCKET_IFNAME": "nope7"})
    assert found.level == "bad"
    assert "nope7" in found.text or "Unable to find" in found.text
