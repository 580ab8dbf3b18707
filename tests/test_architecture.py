"""The house stays in order: imports run one way, files stay small, importing is quick and changes nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sft_toolkit"
SIBLINGS = ("data", "lora", "callbacks", "evaluation", "model")
FREE = {"errors", "args", "registry", "limits", "hints", "phases"}  # anybody may import these

# module or folder -> what of ours it may import besides FREE and its own folder
LAW: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "limits": set(),
    "hints": set(),
    "phases": set(),
    "args": {"training_args"},  # lazily, for `sft_toolkit.args.SFTArguments`
    "registry": set(),
    # tensors
    "loss": set(),
    "attention": set(),
    "modules": set(),
    "chunked_loss": {"loss"},
    "objectives": {"loss"},
    "supervised": {"chunked_loss", "loss", "modules"},
    "isolation": {"modules"},
    "packed_attention": {"attention", "isolation"},
    "step_times": set(),
    "utilisation": {"modules"},
    "accounting": {"loss", "step_times"},
    # configuration
    "config": {"config_file", "_version"},
    "config_file": set(),
    "precision": set(),
    "run_args": {"deepspeed_config", "training_args"},
    "training_args": {"deepspeed_config", "distributed", "environment", "precision"},
    # engines
    "launch": set(),
    "engines": set(),
    "deepspeed_rules": set(),
    "deepspeed_config": {"deepspeed_rules", "training_args"},
    "distributed": {"deepspeed_config", "deepspeed_rules", "environment", "jit_locks", "launch", "training_args"},
    "engagement": {"distributed", "engines", "launch", "planning"},
    "planning": {"chunked_loss", "config", "lora", "model_source", "training_args"},
    "environment": set(),
    "files_of_system": set(),
    "jit_locks": {"files_of_system"},
    "doctor": {"config", "files_of_system", "jit_locks", "launch", "planning"},
    # files
    "weights_file": set(),
    "durable": set(),
    "disk": set(),
    "marker": set(),
    "checkpoint": {"marker", "weights_file"},
    "rotation": {"checkpoint", "durable"},
    "model_source": set(),
    "gguf": set(),
    # siblings
    "data.packing": set(),
    "data.conversation": set(),
    "data": set(),
    "model": {"gguf", "model_source"},
    "lora": {"checkpoint", "gguf", "model_source", "weights_file"},
    "parent": set(),
    "callbacks": {"checkpoint", "freezing", "marker", "parent"},
    "evaluation": set(),
    # the trainer
    "nodes": {"launch"},
    "resume_world": {"distributed", "training_args"},
    "engine_trainer": {
        "deepspeed_config",
        "distributed",
        "engagement",
        "environment",
        "resume_world",
        "training_args",
    },
    "finite": set(),
    "freezing": set(),
    "adapter_trainer": {"intake", "modules", "training_args"},
    "saving_chores": {"disk", "durable", "finite", "saving"},
    "saving": {
        "callbacks",
        "checkpoint",
        "disk",
        "durable",
        "finite",
        "marker",
        "rotation",
        "saving_chores",
        "training_args",
    },
    "stream_keeper": {"data"},
    "training_rows": {"data", "training_args"},
    "data_intake": {"data", "modules", "training_args"},
    "intake": {"data", "distributed", "freezing", "lora", "model", "modules", "training_args"},
    "forward_paths": {"data", "isolation", "loss", "objectives", "packed_attention", "supervised", "trainer"},
    "loop_chores": {"intake", "step_times", "stream_keeper", "trainer", "utilisation"},
    "log_entry": {"trainer"},
    "gradients": set(),
    "gradient_transforms": set(),
    "trainer": {
        "accounting",
        "adapter_trainer",
        "data",
        "data_intake",
        "engine_trainer",
        "forward_paths",
        "gradients",
        "intake",
        "log_entry",
        "loop_chores",
        "modules",
        "saving",
        "training_args",
    },
    # the run
    "run_files": {"config", "_version"},
    "earlier_run": {"checkpoint", "config", "run_files"},
}
KNOW_ALL = {"assemble", "run_checks", "commands", "rehearsal", "run_callbacks", "cli", "__init__", "__main__"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def our_imports(path: Path) -> set[str]:
    """Dotted names inside the package, `TYPE_CHECKING` blocks included: they are dependencies of thought too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sft_toolkit."):
            found.add(node.module.removeprefix("sft_toolkit."))
        elif isinstance(node, ast.ImportFrom) and node.module == "sft_toolkit":
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(a.name.removeprefix("sft_toolkit.") for a in node.names if a.name.startswith("sft_toolkit."))
    return found


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_run_one_way(path: Path) -> None:
    name = dotted(path)
    top = name.split(".")[0]
    if top in KNOW_ALL:
        return
    allowed = LAW.get(name, LAW.get(top))
    assert allowed is not None, f"{name} has no place in the import law yet: add it to LAW"
    own_folder = set() if name in LAW and "." in name else {top}
    broken = {i for i in our_imports(path) if i.split(".")[0] not in allowed | FREE | own_folder}
    assert broken == set()


def test_the_siblings_of_the_law_exist() -> None:
    for sibling in SIBLINGS:
        assert (PACKAGE / sibling).is_dir() or (PACKAGE / f"{sibling}.py").is_file()


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_files_and_functions_stay_small(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= 300
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 50, f"{node.name} is too long"


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()


def test_the_light_modules_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, sft_toolkit, sft_toolkit.cli, sft_toolkit.args, sft_toolkit.config, sft_toolkit.registry\n"
        "import sft_toolkit.checkpoint, sft_toolkit.data.sources, sft_toolkit.data.formats\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'peft', 'accelerate'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


def test_importing_everything_changes_nothing_global() -> None:
    code = (
        "import os, signal, logging, importlib, pkgutil\n"
        "import torch, transformers, accelerate, peft, datasets\n"
        "from transformers import Trainer, TrainingArguments\n"
        "def state(): return (dict(os.environ), signal.getsignal(signal.SIGTERM), logging.getLogger().handlers[:],\n"
        "    logging.getLogger().level, torch.get_default_dtype(), torch.get_num_threads(), Trainer.compute_loss,\n"
        "    torch.random.get_rng_state().tolist(), transformers.logging.get_verbosity())\n"
        "before = state()\n"
        "import sft_toolkit\n"
        "for m in pkgutil.walk_packages(sft_toolkit.__path__, 'sft_toolkit.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "print(state() == before, torch.cuda.is_initialized(), torch.distributed.is_initialized())"
    )
    assert run_python(code) == "True False False"


def test_every_public_name_can_be_imported() -> None:
    code = "import sft_toolkit\nprint(all(getattr(sft_toolkit, n) is not None for n in sft_toolkit.__all__))"
    assert run_python(code) == "True"
