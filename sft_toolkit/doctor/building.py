"""What DeepSpeed needs to compile its operators at their first use, and what a killed compile left behind."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from sft_toolkit.doctor.finding import Finding
from sft_toolkit.engines.jit_locks import cache_of, locks


def check_building(env: Mapping[str, str]) -> Iterator[Finding]:
    """Compiler, ninja, CUDA's compiler, the cache and its locks."""
    if find_spec("deepspeed") is not None:
        yield from _compilers(env)
    cache = cache_of(env)
    held = [lock for lock in locks(env) if not lock.is_stale]
    for lock in locks(env):
        yield Finding("bad" if lock.is_stale else "note", "jit cache", lock.in_words())
    place = cache if cache.exists() else next(p for p in cache.parents if p.exists())
    if not os.access(place, os.W_OK):
        yield Finding("bad", "jit cache", f"{cache} can't be written", "set TORCH_EXTENSIONS_DIR to a folder of yours")
    elif not held:
        built = len({*cache.glob("*/*.so"), *cache.glob("*/*/*.so")})
        yield Finding("ok", "jit cache", f"{cache}: {built} compiled operators")


def _compilers(env: Mapping[str, str]) -> Iterator[Finding]:
    compiler = shutil.which("c++", path=env.get("PATH")) or shutil.which("g++", path=env.get("PATH"))
    if compiler is None:
        yield Finding("bad", "compiler", "no C++ compiler, and DeepSpeed compiles at its start", "apt install g++")
    else:
        yield Finding("ok", "compiler", compiler)
    ninja = shutil.which("ninja", path=env.get("PATH"))
    beside = Path(sys.executable).parent / "ninja"
    if ninja is None:
        remedy = f"put {beside.parent} on the PATH" if beside.exists() else "pip install ninja"
        yield Finding("bad", "ninja", "not on the PATH, and DeepSpeed compiles with it", remedy)
    elif beside.exists() and Path(ninja) != beside:
        yield Finding("note", "ninja", f"{ninja} is not that of this environment", "another version compiles anew")
    else:
        yield Finding("ok", "ninja", ninja)
    home = env.get("CUDA_HOME")
    if home and not Path(home, "bin", "nvcc").exists():
        yield Finding(
            "bad", "compiler", f"CUDA_HOME={home} holds no bin/nvcc", "unset it, or name the toolkit's folder"
        )
