"""The DeepSpeed settings of a run: build them, read them, and refuse what contradicts the arguments.

There is one source of settings per run: the JSON file of `distributed.deepspeed`, or the ready ones of this package
(`distributed.strategy: zero1 | zero2 | zero3`), or what `accelerate launch` was given. The ready files leave to "auto"
whatever the arguments say already; docs/deepspeed.md gives the reason for each other key.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_toolkit.engines.deepspeed_rules import contradictions, impossible, offloads_optimizer, replaced_by_offload
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import missing

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from sft_toolkit.args import DistributedArguments
    from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)

STAGE_OF = {"zero1": 1, "zero2": 2, "zero3": 3}
_OFFLOADS = (False, "cpu", "nvme")


def build_deepspeed_config(
    stage: int, offload_optimizer: bool | str = False, offload_param: bool | str = False, nvme_path: str | None = None
) -> dict[str, Any]:
    """The ready settings of a ZeRO stage, with every tunable that the arguments know at "auto".

    Args:
        stage: 1 partitions the optimizer state over the ranks, 2 also the gradients, 3 also the weights.
        offload_optimizer: `True` or "cpu" keeps the optimizer state in host memory, "nvme" on a disk (stage 3).
        offload_param: the same for the weights (stage 3).
        nvme_path: folder on the local disk of every node, for "nvme".

    Raises:
        ConfigError: a stage or an offload that DeepSpeed does not have.
    """
    optimizer_device, param_device = _device(offload_optimizer), _device(offload_param)
    problems = [
        *_stage_problems(stage, optimizer_device, param_device),
        *_nvme_problems(nvme_path, optimizer_device, param_device),
    ]
    if problems:
        raise ConfigError(problems)
    config = packaged(f"ds_zero{max(stage, 2)}.json")
    zero = config["zero_optimization"]
    zero["stage"] = stage
    for key, device in (("offload_optimizer", optimizer_device), ("offload_param", param_device)):
        if device == "cpu":
            zero[key] = {"device": "cpu", "pin_memory": True}
        elif device == "nvme":
            zero[key] = {"device": "nvme", "nvme_path": nvme_path, "pin_memory": True}
    return config


def packaged(name: str) -> dict[str, Any]:
    """One of the JSON files that ship inside the package, such as `ds_zero2.json`."""
    text = files("sft_toolkit").joinpath("deepspeed", name).read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def read_deepspeed_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """A DeepSpeed JSON file, or a mapping, as a dict of its own.

    `stage3_gather_16bit_weights_on_model_save` at "auto", or absent at stage 3, becomes true: the stack reads both as
    false, and a run without it ends with exit code 0 and no weights.

    Raises:
        ConfigError: the file is missing, is no JSON object, or holds a key twice.
    """
    config = json.loads(json.dumps(source)) if isinstance(source, Mapping) else _parse(Path(source))
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == 3:
        key = "stage3_gather_16bit_weights_on_model_save"
        if zero.get(key, "auto") == "auto":
            zero[key] = True
    return config


def choose_deepspeed_config(distributed: DistributedArguments, env: Mapping[str, str]) -> dict[str, Any] | None:
    """What to pass as `TrainingArguments(deepspeed=...)`; None without DeepSpeed or where the launcher brings it."""
    if distributed.deepspeed is not None:
        return read_deepspeed_config(distributed.deepspeed)
    if distributed.strategy in STAGE_OF and launcher_settings(env) is None:
        offloads = (distributed.offload_optimizer, distributed.offload_param, distributed.nvme_path)
        try:
            return build_deepspeed_config(STAGE_OF[distributed.strategy], *offloads)
        except ConfigError as error:
            raise ConfigError([f"distributed.{problem}" for problem in error.problems]) from error
    return None


def settings_of(args: SFTArguments, env: Mapping[str, str]) -> dict[str, Any] | None:
    """The one set of DeepSpeed settings that these arguments run under; None without DeepSpeed.

    Those of the launcher are taken over. Left to accelerate, their "auto" for the weights of ZeRO-3 means that none are
    saved, and a run ends with exit code 0 and no model.

    Raises:
        ConfigError: settings from two places, or settings that can't be built or read.
    """
    own, launcher = args.deepspeed, launcher_settings(env)
    if args.zero_stage is not None:
        built = build_deepspeed_config(args.zero_stage, args.offload_optimizer, args.offload_param, args.nvme_path)
        # A copy of the arguments (dataclasses.replace, to_dict) brings the dictionary that was built for the first.
        if own and own != built:
            raise ConfigError(f"zero_stage: {args.zero_stage} contradicts deepspeed; keep one of them")
        own = built
    elif asked := [name for name in ("offload_optimizer", "offload_param", "nvme_path") if getattr(args, name)]:
        raise ConfigError([f"{name}: needs zero_stage (1, 2 or 3)" for name in asked])
    if own:
        own = json.loads(own) if isinstance(own, str) and own.lstrip().startswith("{") else own
        settings = read_deepspeed_config(own)
        if launcher is not None and launcher != settings:
            given = f"zero_stage: {args.zero_stage}" if args.zero_stage is not None else "deepspeed"
            raise ConfigError(
                f"{given}: the launcher brings DeepSpeed settings of its own "
                f"({env.get('ACCELERATE_DEEPSPEED_CONFIG_FILE', 'the accelerate configuration')}); keep one of the two "
                "(`accelerate launch --use_deepspeed` without a file leaves the choice to the arguments)"
            )
        return settings
    if launcher is None and env.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        return build_deepspeed_config(2)  # the stage that a bare `--use_deepspeed` means to accelerate
    return launcher


def launcher_settings(env: Mapping[str, str]) -> dict[str, Any] | None:
    """The DeepSpeed settings that `accelerate launch` itself was given; None where it brings none.

    A bare `--use_deepspeed` brings none. Follows `accelerate.utils.DeepSpeedPlugin`, which reads the same variables,
    but for the weights of ZeRO-3: accelerate saves none unless told to, here they are gathered unless forbidden.

    Raises:
        ConfigError: see `read_deepspeed_config`.
    """
    file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file != "none":
        return read_deepspeed_config(file)
    own = ("ZERO_STAGE", "OFFLOAD_OPTIMIZER_DEVICE", "OFFLOAD_PARAM_DEVICE", "ZERO3_SAVE_16BIT_MODEL")
    if not any(f"ACCELERATE_DEEPSPEED_{key}" in env for key in own):
        return None
    gather = env.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "auto").lower()
    zero: dict[str, Any] = {
        "stage": int(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)),
        "stage3_gather_16bit_weights_on_model_save": gather if gather == "auto" else gather == "true",
    }
    for part in ("offload_optimizer", "offload_param"):
        device = env.get(f"ACCELERATE_DEEPSPEED_{part.upper()}_DEVICE", "none")
        zero[part] = {"device": device}
        if device == "nvme":
            zero[part]["nvme_path"] = env.get(f"ACCELERATE_DEEPSPEED_{part.upper()}_NVME_PATH")
    steps = env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    clipping = env.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    return read_deepspeed_config(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": int(steps) if steps.isdigit() else "auto",
            "gradient_clipping": "auto" if clipping == "auto" else float(clipping),
            "zero_optimization": zero,
        }
    )


def check_settings_in_use(args: TrainingArguments, env: Mapping[str, str], name: str | None = None) -> None:
    """`check_deepspeed_config` on what a run with these arguments takes: its own settings, else the launcher's.

    Args:
        name: what the message calls settings of the arguments; `distributed.deepspeed` where it gave them.

    Raises:
        ConfigError: see `check_deepspeed_config`.
    """
    launcher = launcher_settings(env)
    if launcher is not None and args.deepspeed in (None, launcher):
        check_deepspeed_config(launcher, args, "the DeepSpeed settings of `accelerate launch`")
    elif args.deepspeed:
        check_deepspeed_config(args.deepspeed, args, name)


def check_deepspeed_config(
    config: Mapping[str, Any] | str | Path, args: TrainingArguments, name: str | None = None
) -> None:
    """Refuse settings that can't work, or that say something else than the arguments; before the model loads.

    Transformers finds wrong numbers only in `train()`, with the model loaded. An optimizer that ZeRO-Offload can't use
    it does not find at all: accelerate trains with Adam whatever was asked for.

    Args:
        config: the settings as the user wrote them, with their "auto".
        args: the arguments that "auto" follows; `zero_stage`, `offload_optimizer` and `offload_param` are read where
            they exist.
        name: what the message calls the settings; the file's path where `config` is one.

    Raises:
        ConfigError: everything that is wrong, the contradictions as one table "key, JSON, YAML".
    """
    name = name or ("the DeepSpeed settings" if isinstance(config, Mapping) else str(config))
    settings = read_deepspeed_config(config)
    problems = [f"{name}: {problem}" for problem in impossible(settings, args)]
    rows = list(contradictions(settings, args))
    if rows:
        problems.append(f"{name} contradict the arguments of the run:\n{_table(rows)}\n{_WAY_OUT}")
    if problems:
        raise ConfigError(problems)


def check_client_optimizer(optimizer: Any, config: Mapping[str, Any]) -> None:
    """Refuse an optimizer object that offload would replace by another algorithm; log where it is replaced by its like.

    Raises:
        ConfigError: offload is on, and accelerate would train with DeepSpeed's CPU Adam instead of `optimizer`.
    """
    if not offloads_optimizer(config) or type(optimizer).__module__.startswith(("deepspeed.", "accelerate.")):
        return  # its own, or a stand-in for the one that the JSON describes
    problem = replaced_by_offload(optimizer)
    if problem:
        raise ConfigError(problem)
    logger.info("offload: %s runs as DeepSpeed's CPU version, with the same settings", type(optimizer).__name__)


_WAY_OUT = 'Write "auto" in the JSON and it follows the arguments, or change the arguments.'


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = [("key", "JSON", "YAML"), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return "\n".join(f"  {key:<{widths[0]}}  {left:<{widths[1]}}  {right}" for key, left, right in lines)


def _device(offload: bool | str) -> bool | str:
    return "cpu" if offload is True else offload


def _stage_problems(stage: int, optimizer_device: bool | str, param_device: bool | str) -> Iterator[str]:
    if stage not in STAGE_OF.values():
        yield f"zero_stage: {stage} is none of 1, 2, 3 (without ZeRO, leave it out: DDP is the default)"
    for name, device in (("offload_optimizer", optimizer_device), ("offload_param", param_device)):
        if device not in _OFFLOADS:
            yield f"{name}: {device!r} is none of false, true, 'cpu', 'nvme'"
        elif device == "nvme" and stage != 3:
            yield f"{name}: 'nvme' needs ZeRO stage 3, and the stage is {stage}; take 'cpu' or zero3"
        elif name == "offload_param" and device and stage != 3:
            yield f"offload_param: only ZeRO stage 3 partitions the weights, and the stage is {stage}; take zero3"


def _nvme_problems(nvme_path: str | None, *devices: bool | str) -> Iterator[str]:
    if "nvme" not in devices:
        return
    if not nvme_path:
        yield "nvme_path: offload to 'nvme' needs a folder on a local disk of every node"
    elif not Path(nvme_path).is_dir():
        yield f"nvme_path: {nvme_path}: {missing(nvme_path) if not Path(nvme_path).exists() else 'is no folder'}"


def _parse(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise ConfigError(f"{path}: {missing(str(path))}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: is no JSON: {error.msg}") from None
    except _Twice as error:
        raise ConfigError(f"{path}: the key '{error}' stands there twice") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: DeepSpeed settings are a JSON object, and this is a {type(config).__name__}")
    return config


class _Twice(Exception):
    """A key that a JSON object holds twice; the standard parser keeps the last one without a word."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise _Twice(key)
        entries[key] = value
    return entries
