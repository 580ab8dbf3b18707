"""How ranks find one another: names, interfaces, ports, and how fast they exchange numbers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

from sft_toolkit.doctor.finding import Finding
from sft_toolkit.engines.launch import launch_problems

TIMEOUT = 90.0  # seconds; most of it is the import of torch


def check_network(env: Mapping[str, str]) -> Iterator[Finding]:
    """The launcher's variables, the host's name, the interfaces that were named, the usual port."""
    for problem in launch_problems(env):
        yield Finding("bad", "launcher", problem)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        local = address.startswith("127.")
        remedy = "for several machines name this one by its address (--main_process_ip)" if local else ""
        yield Finding("note" if local else "ok", "host name", f"{name} is {address}", remedy)
    except OSError:
        yield Finding(
            "note", "host name", f"{name} has no address", "add it to /etc/hosts before you start two machines"
        )
    there = [interface for _, interface in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        asked = env.get(variable, "")
        absent = [part for part in asked.split(",") if part and not _matches(part, there)]
        if absent:
            yield Finding(
                "bad", "interface", f"{variable}={asked}, and there is {', '.join(there)}", f"unset {variable}"
            )
    yield Finding("ok", "interface", ", ".join(there))
    yield _port(int(env["MASTER_PORT"]) if env.get("MASTER_PORT", "").isdigit() else 29500)


def _matches(part: str, there: list[str]) -> bool:
    """NCCL's rule: a prefix; `=name` exactly; `^name` anything else."""
    bare = part.lstrip("^=")
    return any(name == bare if part.startswith("=") else name.startswith(bare) for name in there) or part[0] == "^"


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            return Finding(
                "note", "port", f"{port}: {error}", "start with --main_process_port 0, which takes a free one"
            )
    return Finding("ok", "port", f"{port} is free")


def check_collective(ranks: int, env: Mapping[str, str]) -> Iterator[Finding]:
    """An all-reduce over `ranks` processes of this machine, in processes of their own and with a time limit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    kept = {name: value for name, value in env.items() if not name.startswith(("MASTER_", "TORCHELASTIC_"))}
    process = subprocess.Popen(
        [*command, "-m", "sft_toolkit.doctor.all_reduce"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
        process.communicate()
        yield Finding("bad", "all-reduce", f"{ranks} processes did not answer one another in {TIMEOUT:.0f} s", _WAY_OUT)
        return
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        yield Finding("bad", "all-reduce", f"{ranks} processes: {_reason(err)}", _WAY_OUT)
        return
    found = json.loads(lines[0])
    text = f"{found['ranks']} processes, {found['backend']}, {found['mebibytes']} MiB: {found['gigabytes']:.2f} GB/s"
    yield Finding("ok", "all-reduce", text)


def _reason(stderr: str) -> str:
    """The error of a rank; the launcher's own says only that there was one."""
    lines = [line.split("]: ")[-1].strip() for line in stderr.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*Error: .", line)]
    return errors[0] if errors else "no answer"


_WAY_OUT = "name the interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); NCCL_DEBUG=INFO says more"
