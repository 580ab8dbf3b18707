"""Where the base model is: a folder, a GGUF file or a hub id; and every way of not being there, in plain words."""

from __future__ import annotations

import errno
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from sft_toolkit.args import ModelArguments
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import missing

KEY = "model.name_or_path"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def source_of(model: ModelArguments, key: str = KEY) -> dict[str, Any]:
    """Keyword arguments that name this model to any `from_pretrained`; error messages call it `key`.

    Raises:
        ConfigError: no such folder, or a folder that holds no model (it says what it holds and what would be right).
    """
    name = model.name_or_path
    if not name:
        raise ConfigError(f"{key} is empty: give a model folder or a hub id such as org/name")
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": name,
        "trust_remote_code": model.trust_remote_code,
    }
    if model.gguf_file:
        source["gguf_file"] = model.gguf_file
    folder = Path(name).expanduser()
    if folder.exists():
        _check_folder(folder, model.gguf_file, key)
        return {**source, "pretrained_model_name_or_path": str(folder)}
    if not HUB_ID.fullmatch(name):
        raise ConfigError(f"{key}: '{name}': {missing(name)} (give an existing folder, or a hub id such as org/name)")
    if model.revision:
        source["revision"] = model.revision
    # Six retries with growing pauses, 47 s in all, is what the hub client spends before it says "offline".
    return {**source, "local_files_only": True} if _hub_unreachable() else source


def _check_folder(folder: Path, gguf_file: str | None, key: str) -> None:
    if folder.is_file():
        hint = f"; write {KEY}: {folder.parent} and model.gguf_file: {folder.name}" if folder.suffix == ".gguf" else ""
        raise ConfigError(f"{key}: '{folder}' is a file, not a model folder{hint}")
    if gguf_file:
        if not (folder / gguf_file).is_file():
            raise ConfigError(f"model.gguf_file: '{folder / gguf_file}': {missing(str(folder / gguf_file))}")
        return
    if (folder / "config.json").is_file():
        return
    raise ConfigError(f"{key}: '{folder}' holds no model (no config.json){_what_instead(folder)}")


def _what_instead(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        base = _json(folder / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        return f"; it is an adapter: write {KEY}: {base} and lora.adapter: {folder}"
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return f"; write model.gguf_file: {ggufs[0]}" + (f" (or one of {', '.join(ggufs[1:])})" if ggufs[1:] else "")
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if inside:
        return f"; did you mean '{folder / inside[0]}'?"
    return f"; it holds {_listing(folder)}"


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _hub_unreachable() -> bool:
    """Whether the hub's name does not resolve; behind a proxy only the proxy can know, so it counts as reachable."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


@contextmanager
def in_plain_words(model: ModelArguments, part: str, key: str = KEY) -> Iterator[None]:
    """Turn what transformers says of an unloadable model or tokenizer into a ConfigError of one sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if isinstance(error, ConfigError) or _is_of_the_machine(error):
            raise
        raise ConfigError(
            f"{key}: the {part} of '{model.name_or_path}' can't be loaded: {_reason(model, error)}"
        ) from error


def _is_of_the_machine(error: Exception) -> bool:
    """A full disk or exhausted memory is no mistake in the configuration."""
    if isinstance(error, OSError):
        return error.errno not in (None, errno.ENOENT, errno.ENOTDIR)
    return isinstance(error, RuntimeError) and "mismatch" not in str(error)


def _reason(model: ModelArguments, error: Exception) -> str:
    name, text = model.name_or_path, " ".join(str(error).split())
    causes = {type(cause).__name__ for cause in (error, error.__cause__, error.__context__) if cause is not None}
    if causes & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"} or "couldn't connect" in text:
        return (
            f"there is no folder of that name here ({missing(name)}), and the hub can't be reached. "
            "Offline, give a folder or a hub id whose files are in the cache"
        )
    if causes & {"RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"}:
        revision = f" at revision '{model.revision}'" if model.revision else ""
        return (
            f"there is no folder of that name here ({missing(name)}), and the hub shows you no such model{revision}. "
            "Check the spelling, or log in with `hf auth login` if it is private or gated"
        )
    if "trust_remote_code" in text:
        return "it ships Python code of its own; read it, then set model.trust_remote_code: true"
    return first_mismatch(error) or text


def first_mismatch(error: Exception) -> str | None:
    """The first of the wrong shapes in an error of torch, which lists them all; None for any other error."""
    return next((line.strip() for line in str(error).splitlines() if "size mismatch" in line), None)
