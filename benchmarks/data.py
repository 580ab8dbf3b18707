"""What preparing the data costs: `python -m benchmarks.data [--data FILE] [--rows N] [--memory N ...]`. Prints only.

Each measurement runs in a process of its own, in which imports and first uses are not measured. The limit is one
batched `tokenizer(texts)` call over texts that are rendered already.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.setting import BYTES, ROOT, SMOLLM2, TICKETS

WARM_UP = 50  # rows prepared before the clock starts
MAX_LENGTH = 2048
Measured = dict[str, float]


def main() -> None:
    """Parse the command line; measure, or be the process that is measured."""
    options = _options()
    if options.measure:
        print(json.dumps(_MEASURES[options.measure](Path(options.file), options.tokenizer, Path(options.folder))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = _rows(ROOT / options.data)
        print(_heading(options))
        _print_speed(options, rows, folder)
        _print_memory(options, rows, folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.data", description=(__doc__ or "").partition(": ")[0])
    add = parser.add_argument
    has_model = (ROOT / SMOLLM2 / "tokenizer_config.json").exists()
    add("--data", default=TICKETS, help="JSONL, or JSON that holds a list of rows; repeated up to --rows")
    add("--tokenizer", default=SMOLLM2 if has_model else BYTES, help=f"model folder, or '{BYTES}'")
    add("--rows", type=int, default=20_000)
    add("--rounds", type=int, default=3)
    add("--memory", type=int, nargs="*", default=[20_000, 100_000], metavar="N", help="rows whose peak memory is taken")
    add("--measure", choices=sorted(_MEASURES), help=argparse.SUPPRESS)
    add("--file", help=argparse.SUPPRESS)
    add("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def _print_speed(options: argparse.Namespace, rows: list[dict[str, Any]], folder: Path) -> None:
    file = _repeated(rows, options.rows, folder / "rows.jsonl")
    systems = ["tokenizer", "toolkit", *(["trl"] if find_spec("trl") else [])]
    rounds: dict[str, list[Measured]] = {system: [] for system in systems}
    for number in range(options.rounds):
        for system in systems:
            rounds[system].append(_measure(system, file, options.tokenizer, folder / f"{system}-{number}"))
    again = [_measure("toolkit", file, options.tokenizer, folder / "toolkit-0") for _ in range(options.rounds)]
    tokens = rounds["tokenizer"][0]["tokens"]
    print(f"\n{options.rows:,} rows, {tokens:,.0f} tokens; CPU-seconds over all threads, median of {options.rounds}\n")
    print("| what | CPU-s | to the tokenizer | tokens/CPU-s | rows kept |\n|---|--:|--:|--:|--:|")
    for system, measured in rounds.items():
        seconds = [one["cpu_s"] for one in measured]
        ratio = median(seconds) / median(one["cpu_s"] for one in rounds["tokenizer"])
        kept = measured[0].get("rows", options.rows)
        print(f"| {system} | {median(seconds):.2f} | {ratio:.2f} | {tokens / median(seconds):,.0f} | {kept:,.0f} |")
    print(f"\nSecond start, from the cache: {median(one['wall_s'] for one in again):.2f} s behind the imports.")
    if "trl" in systems:
        print(_agreement(folder / "toolkit-0", folder / "trl-0"))


def _print_memory(options: argparse.Namespace, rows: list[dict[str, Any]], folder: Path) -> None:
    print("\n| rows | peak MiB | of it imports | wall s |\n|--:|--:|--:|--:|")
    for count in options.memory:
        file = _repeated(rows, count, folder / "many.jsonl")
        one = _measure("toolkit", file, options.tokenizer, folder / f"memory-{count}")
        print(f"| {count:,} | {one['peak_mib']:,.0f} | {one['before_mib']:,.0f} | {one['wall_s']:.0f} |", flush=True)
    print(f"\nload average at the end: {os.getloadavg()[0]:.1f}")


# ---- In a process of its own -----------------------------------------------------------------------------------------


def _measure(system: str, file: Path, tokenizer: str, folder: Path) -> Measured:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.data", "--measure", system, "--file", str(file)]
    command += ["--tokenizer", tokenizer, "--folder", str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    measured: Measured = json.loads(done.stdout.splitlines()[-1])
    return measured


def _timed(work: Callable[[], Any]) -> tuple[Any, Measured]:
    before, wall, cpu = _peak_mib(), time.perf_counter(), time.process_time()
    result = work()
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    return result, {"cpu_s": cpu_s, "wall_s": wall_s, "before_mib": before, "peak_mib": _peak_mib()}


def _measure_tokenizer(file: Path, name: str, folder: Path) -> Measured:
    tokenizer, examples = _tokenizer(name), _chats(file)
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in examples]
    tokenizer(texts[:WARM_UP])
    encoded, measured = _timed(lambda: tokenizer(texts, add_special_tokens=False))
    return {**measured, "tokens": sum(map(len, encoded["input_ids"]))}


def _measure_toolkit(file: Path, name: str, folder: Path) -> Measured:
    from sft_toolkit.args import DataArguments, SourceArguments
    from sft_toolkit.data.prepare import prepare

    tokenizer = _tokenizer(name)

    def work(cache: str, max_rows: int | None = None) -> Any:
        source = SourceArguments(path=str(file), max_rows=max_rows)
        return prepare(DataArguments(train=[source], max_length=MAX_LENGTH, packing=True, cache_dir=cache), tokenizer)

    with tempfile.TemporaryDirectory() as warm:
        work(warm, WARM_UP)
    prepared, measured = _timed(lambda: work(str(folder)))
    (folder / "tokens.txt").write_text(str(prepared.train.cache_files[0]["filename"]))
    return {**measured, "rows": prepared.report["rows_kept"], "tokens": prepared.report["tokens"]}


def _measure_trl(file: Path, name: str, folder: Path) -> Measured:
    """TRL on prompt and completion: its way to learn an answer under any template."""
    from importlib import import_module

    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    trl: Any = import_module("trl")
    tokenizer = _tokenizer(name)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    args = trl.SFTConfig(str(folder), max_length=MAX_LENGTH, use_cpu=True, bf16=False, completion_only_loss=True)
    chats = _chats(file)

    def work(count: int) -> Any:
        sides = {"prompt": [c[:-1] for c in chats[:count]], "completion": [c[-1:] for c in chats[:count]]}
        return trl.SFTTrainer(model, args, train_dataset=Dataset.from_dict(sides), processing_class=tokenizer)

    work(WARM_UP)
    trainer, measured = _timed(lambda: work(len(chats)))
    trainer.train_dataset.save_to_disk(str(folder / "tokens"))
    return {**measured, "rows": len(trainer.train_dataset)}


_MEASURES: dict[str, Callable[[Path, str, Path], Measured]] = {
    "tokenizer": _measure_tokenizer,
    "toolkit": _measure_toolkit,
    "trl": _measure_trl,
}


def _agreement(ours: Path, theirs: Path) -> str:
    """How many rows have the same ids, and the same labels up to the white space behind the end of the turn."""
    from datasets import Dataset, load_from_disk

    pairs = zip(
        Dataset.from_file((ours / "tokens.txt").read_text()), load_from_disk(str(theirs / "tokens")), strict=True
    )
    same_ids = same_labels = more = 0
    for own, other in pairs:
        same_ids += own["input_ids"] == other["input_ids"]
        learned = [label != -100 for label in own["labels"]]
        mask = [label != -100 for label in other["labels"]]
        same_labels += learned == mask
        more += learned[:-1] == mask[:-1] and mask[-1] and not learned[-1]
    return f"Rows with TRL's ids: {same_ids:,}; with its labels: {same_labels:,}, and but for the last token: {more:,}."


# ---- Rows ------------------------------------------------------------------------------------------------------------


def _rows(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    parsed = (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(s) for s in text.split("\n") if s.strip()]
    )
    return list(parsed)


def _repeated(rows: list[dict[str, Any]], count: int, path: Path) -> Path:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines[i % len(lines)] for i in range(count))
    return path


def _chats(file: Path) -> list[list[dict[str, Any]]]:
    from sft_toolkit.args import SourceArguments
    from sft_toolkit.data.formats import converter, detect_format
    from sft_toolkit.data.sources import read_rows

    raws = list(read_rows(SourceArguments(path=str(file))))
    read: Any = converter(detect_format(raws[0].row))
    return [[message.as_template_dict() for message in read(raw).messages] for raw in raws]


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    if name == BYTES:
        from tests.tiny import tiny_tokenizer

        return tiny_tokenizer()
    return AutoTokenizer.from_pretrained(ROOT / name)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _heading(options: argparse.Namespace) -> str:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the start"
    found = ", ".join(f"{name} {_version(name)}" for name in ("transformers", "tokenizers", "datasets", "trl"))
    return f"{options.data}, tokenizer {options.tokenizer}; {machine}\nPython {platform.python_version()}, {found}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
