"""The command line: thin subcommands, exit codes, and errors without a traceback. Imports nothing heavy at the top."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from sft_toolkit._version import __version__
from sft_toolkit.errors import CheckpointError, ConfigError, DataError, TrainingDivergedError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
EXIT_CODES = """exit codes:
  0  done
  1  a failure while running
  2  the configuration or the data is wrong; nothing was trained
  130, 143  stopped by Ctrl-C or SIGTERM, after saving a checkpoint"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; never raises for an error of the user."""
    options = build_parser().parse_args(argv)
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    try:
        return int(options.command(options))
    except (ConfigError, DataError) as error:
        # All ranks find the same mistake in the same file: one of them says it.
        if os.environ.get("RANK", "0") == "0":
            _say(str(error))
        return error.exit_code
    except (CheckpointError, TrainingDivergedError) as error:
        _say(str(error))
        return error.exit_code
    except OSError as error:  # a full or read-only disk, a folder that went away
        _say(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; every subcommand that reads a configuration takes overrides behind it."""
    parser = argparse.ArgumentParser(
        prog="sft-toolkit",
        description="Supervised fine-tuning of language models.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sft_toolkit {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    _with_config(commands, "train", _train, "train, as `accelerate launch train.py` does, in this process")
    _with_config(commands, "prepare", _prepare, "build the token cache and the data report; loads no model")
    preview = _with_config(commands, "preview", _preview, "show what is trained, token by token")
    preview.add_argument("--rows", type=int, default=3, metavar="N", help="rows to show (default 3)")
    preview.add_argument("--json", action="store_true", help="one JSON object a line")
    preview.add_argument("--html", metavar="FILE", help="write a page for the browser")
    _with_config(commands, "check", _check, "all errors and warnings, and the resolved configuration; trains nothing")

    merge = commands.add_parser("merge", help="merge an adapter into its base and verify the logits")
    merge.add_argument("--adapter", required=True, metavar="DIR", help="folder of the adapter")
    merge.add_argument("--output", required=True, metavar="DIR", help="folder of the merged model")
    merge.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="dtype of the merged weights")
    merge.set_defaults(command=_merge)
    return parser


def _with_config(commands: Commands, name: str, command: object, help: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help)
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML or JSON configuration")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")
    parser.set_defaults(command=command)
    return parser


def _train(options: argparse.Namespace) -> int:
    from sft_toolkit.assemble import run

    result = run(options.config, options.overrides)
    if os.environ.get("RANK", "0") == "0":
        print(result.summary())
    return result.exit_code


def _prepare(options: argparse.Namespace) -> int:
    from sft_toolkit.assemble import prepare_only

    print(f"token cache is ready; counts are in {prepare_only(options.config, options.overrides)}")
    return 0


def _preview(options: argparse.Namespace) -> int:
    from sft_toolkit.assemble import preview
    from sft_toolkit.data.preview import json_lines, terminal
    from sft_toolkit.data.preview_bins import in_words

    shown = preview(options.config, options.overrides, options.rows)
    if options.html:
        from sft_toolkit.data.preview_page import page

        Path(options.html).write_text(page(shown.rows, shown.tokenizer, shown.verdict, shown.bins), encoding="utf-8")
        print(f"written: {options.html}")
    elif options.json:
        for line in json_lines(shown.rows):
            print(line)
    else:
        for record in shown.rows:
            print(terminal(record, shown.tokenizer, color=sys.stdout.isatty()), end="\n\n")
        print(shown.verdict)
        if shown.bins is not None:
            print(f"\n{in_words(shown.bins)}")
    return 0


def _check(options: argparse.Namespace) -> int:
    from sft_toolkit.assemble import check

    print(check(options.config, options.overrides))
    return 0


def _merge(options: argparse.Namespace) -> int:
    from sft_toolkit.lora.merge import merge

    print(merge(options.adapter, options.output, dtype=options.dtype))
    return 0


def _say(message: str) -> None:
    rank = os.environ.get("RANK")
    print(f"error{f' (rank {rank})' if rank not in (None, '0') else ''}: {message}", file=sys.stderr)
