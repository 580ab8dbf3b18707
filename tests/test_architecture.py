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
# anybody may import these
FREE = {"errors", "args", "knobs", "keywords", "registry", "limits", "hints", "phases", "options"}

# module or folder -> what of ours it may import besides FREE and its own folder
LAW: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "limits": set(),
    "hints": set(),
    "phases": set(),
    "knobs": set(),
    "keywords": {"config_file"},  # lazily, where a keyword is wrong
    "args": {"training_args"},  # lazily, for `sft_toolkit.args.SFTArguments`
    "registry": set(),
    "options": set(),
    # tensors
    "loss.reduction": set(),
    "attention.per_document": set(),
    "model.modules": set(),
    "loss.chunked": {"loss.reduction"},
    "loss.objectives": {"loss.reduction"},
    "loss.supervised": {"loss.chunked", "loss.reduction", "model.modules"},
    "attention.isolation": {"model.modules"},
    "attention.packed": {"attention.per_document", "attention.isolation"},
    "metering.step_times": set(),
    "metering.utilisation": {"model.modules"},
    "metering.accounting": {"loss.reduction", "metering.step_times"},
    # configuration
    "config": {"config_file", "_version"},
    "config_file": set(),
    "precision": set(),
    "running.arguments": {"engines.deepspeed_config", "training_args"},
    "training_args": {"engines.deepspeed_config", "engines.distributed", "engines.environment", "precision"},
    # engines
    "engines.launch": set(),
    "engines.ending": {"engines.launch"},
    "engines.wrapped": set(),
    "engines.experts": set(),
    "engines.deepspeed_rules": set(),
    "engines.deepspeed_config": {"engines.deepspeed_rules", "training_args"},
    "engines.distributed": {
        "engines.deepspeed_config",
        "engines.deepspeed_rules",
        "engines.environment",
        "engines.jit_locks",
        "engines.launch",
        "training_args",
    },
    "engines.engagement": {"engines.distributed", "engines.wrapped", "engines.launch", "planning"},
    "planning": {"loss.chunked", "config", "lora", "model.source", "training_args"},
    "engines.environment": set(),
    "engines.files_of_system": set(),
    "engines.jit_locks": {"engines.files_of_system"},
    "doctor": {"config", "engines.files_of_system", "engines.jit_locks", "engines.launch", "planning"},
    # files
    "checkpoints.weights_file": set(),
    "checkpoints.durable": set(),
    "checkpoints.disk": set(),
    "checkpoints.marker": set(),
    "checkpoints.checkpoint": {"checkpoints.marker", "checkpoints.weights_file"},
    "checkpoints.rotation": {"checkpoints.checkpoint", "checkpoints.durable"},
    "model.source": set(),
    "model.gguf": set(),
    # siblings
    "data.packing": set(),
    "data.conversation": set(),
    "data": set(),
    "model.loading": {"model.gguf", "model.source"},
    "lora": {"checkpoints.checkpoint", "model.gguf", "model.source", "checkpoints.weights_file"},
    "engines.parent": set(),
    "engines.early_warning": set(),
    "callbacks": {
        "checkpoints.checkpoint",
        "model.freezing",
        "checkpoints.marker",
        "engines.early_warning",
        "engines.parent",
    },
    "evaluation": set(),
    # the trainer
    "engines.nodes": {"engines.launch"},
    "engines.resume_world": {"engines.distributed", "training_args"},
    "training.engine_trainer": {
        "engines.deepspeed_config",
        "engines.distributed",
        "engines.engagement",
        "engines.environment",
        "engines.experts",
        "engines.resume_world",
        "training_args",
    },
    "checkpoints.finite": set(),
    "model.freezing": set(),
    "training.adapter_trainer": {"training.intake", "model.modules", "training_args"},
    "checkpoints.background": set(),
    "checkpoints.snapshot": set(),
    "training.saving_agreement": set(),
    "training.saving_space": {"checkpoints.checkpoint", "checkpoints.disk"},
    "training.saving_behind": {"checkpoints.background", "checkpoints.snapshot"},
    "training.saving_chores": {
        "checkpoints.durable",
        "checkpoints.finite",
        "training.saving",
        "training.saving_space",
    },
    "training.saving_writer": {
        "checkpoints",
        "training.saving_agreement",
        "training.saving_behind",
        "training.saving_space",
        "training_args",
    },
    "training.saving": {
        "callbacks",
        "checkpoints.checkpoint",
        "checkpoints.disk",
        "checkpoints.finite",
        "training.saving_agreement",
        "training.saving_chores",
        "training.saving_writer",
        "training_args",
    },
    "training.stream_keeper": {"data"},
    "running.training_rows": {"data", "training_args"},
    "training.data_intake": {"data", "training_args"},
    "training.data_checks": {"data", "model.modules", "training.data_intake", "training_args"},
    "training.intake": {
        "data",
        "engines.distributed",
        "model.freezing",
        "lora",
        "model.loading",
        "model.modules",
        "training_args",
    },
    "training.forward_paths": {
        "data",
        "attention.isolation",
        "loss.reduction",
        "loss.objectives",
        "attention.packed",
        "loss.supervised",
        "trainer",
    },
    "training.loop_chores": {
        "training.intake",
        "metering.step_times",
        "training.stream_keeper",
        "trainer",
        "metering.utilisation",
    },
    "metering.log_entry": {"trainer"},
    "training.gradients": set(),
    "training.gradient_transforms": set(),
    "trainer": {
        "metering.accounting",
        "training.adapter_trainer",
        "data",
        "training.data_checks",
        "training.data_intake",
        "training.engine_trainer",
        "training.forward_paths",
        "training.gradients",
        "training.intake",
        "metering.log_entry",
        "training.loop_chores",
        "model.modules",
        "training.saving",
        "training_args",
    },
    # the run
    "running.out_of_memory": {"callbacks.memory", "config", "planning.words", "trainer"},
    "running.files": {"config", "_version", "running.out_of_memory"},
    "running.earlier_run": {"checkpoints.checkpoint", "config", "running.files"},
}
KNOW_ALL = {
    "sweep",
    "assemble",
    "running.checks",
    "commands",
    "rehearsal",
    "running.callbacks",
    "cli",
    "__init__",
    "__main__",
}


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
    if name in KNOW_ALL or top in KNOW_ALL or path.name == "__init__.py":
        return
    allowed = LAW.get(name, LAW.get(top))
    assert allowed is not None, f"{name} has no place in the import law yet: add it to LAW"
    own_folder = set() if name in LAW and "." in name else {top}
    broken = {i for i in our_imports(path) if not any(f"{i}.".startswith(f"{a}.") for a in allowed | FREE | own_folder)}
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
        "import sft_toolkit.checkpoints.checkpoint, sft_toolkit.data.sources, sft_toolkit.data.formats\n"
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
