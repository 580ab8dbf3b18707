"""The command line: thin subcommands, exit codes, and errors without a traceback. Imports nothing heavy at the top."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import Path
from typing import NoReturn, TypeAlias

from sft_toolkit._version import __version__
from sft_toolkit.engines.early_warning import early_warning_noted
from sft_toolkit.engines.ending import run_program
from sft_toolkit.engines.launch import launch_problems, read_launch
from sft_toolkit.errors import CheckpointError, ConfigError, DataError, OutOfMemoryError, TrainingDivergedError
from sft_toolkit.phases import phase_of, traceback_of, user_code_of

SHOW_TRACEBACK = "SFT_TOOLKIT_TRACEBACK"
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
EXIT_CODES = """exit codes:
  0  done
  1  a failure while running
  2  the configuration or the data is wrong; nothing was trained
  130, 143  stopped by Ctrl-C or SIGTERM, after saving a checkpoint"""


def program(argv: Sequence[str] | None = None) -> NoReturn:
    """`main` as a whole program: exits with its code."""
    run_program(lambda: main(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; never raises for an error of the user."""
    options = _parsed(argv)
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    try:
        return int(options.command(options))
    except (ConfigError, DataError) as error:
        if _is_the_one_to_say_it():
            _say(str(error))
        return error.exit_code
    except (CheckpointError, TrainingDivergedError, OutOfMemoryError) as error:
        _say(str(error))
        return error.exit_code
    except OSError as error:  # a full or read-only disk, a folder that went away
        _say(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        _say_unexpected(error)
        return 1


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; overrides may also stand behind them."""
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    written = [word for word in rest if word.startswith("-") or "=" not in word or not hasattr(options, "overrides")]
    if written:
        dashed = next((word.lstrip("-") for word in written if re.match(r"--?\w+\.[\w.]+=", word)), None)
        hint = f"; overrides are written without dashes: {dashed}" if dashed else ""
        parser.error(f"unrecognized arguments: {' '.join(written)}{hint}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


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
    preview.add_argument("--rows", type=_at_least_one, default=3, metavar="N", help="rows to show (default 3)")
    preview.add_argument("--json", action="store_true", help="one JSON object a line")
    preview.add_argument("--html", metavar="FILE", help="write a page for the browser")
    _with_config(commands, "check", _check, "all errors and warnings, and the resolved configuration; trains nothing")

    plan = _with_config(commands, "plan", _plan, "memory of every strategy on a machine, and which fits")
    plan.add_argument("--device-memory", metavar="SIZE", help="of one device, such as 24GiB (default: of this machine)")
    plan.add_argument("--devices", type=int, metavar="N", help="of all hosts together")
    plan.add_argument("--host-memory", metavar="SIZE", help="of one host, such as 256GiB")
    plan.add_argument("--devices-per-host", type=int, default=8, metavar="N", help="default 8")
    plan.add_argument("--json", action="store_true", help="one JSON object, sizes in bytes")

    doctor = _with_config(commands, "doctor", _doctor, "what of this machine would stop a training", required=False)
    doctor.add_argument("--ranks", type=int, default=2, metavar="N", help="of the all-reduce; 0: none (default 2)")
    doctor.add_argument("--json", action="store_true", help="a list of findings")

    merge = commands.add_parser("merge", help="merge an adapter into its base and verify the logits")
    merge.add_argument(
        "--adapter", required=True, action="append", metavar="DIR", help="an adapter's folder; repeatable"
    )
    merge.add_argument("--weights", type=float, nargs="+", default=(), metavar="W", help="a weight for each adapter")
    merge.add_argument("--output", required=True, metavar="DIR", help="folder of the merged model")
    merge.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="dtype of the merged weights")
    merge.add_argument("--allow-other-base", action="store_true", help="merge into a base it was not trained on")
    merge.set_defaults(command=_merge)
    return parser


def _with_config(
    commands: Commands, name: str, command: object, help: str, required: bool = True
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help)
    parser.add_argument("--config", required=required, metavar="FILE", help="YAML or JSON configuration")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")
    parser.set_defaults(command=command)
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, not {text}")
    return int(text)


def _train(options: argparse.Namespace) -> int:
    problems = list(launch_problems(os.environ))
    if problems:  # before anything is read: ranks that can't find one another would wait for one another
        raise ConfigError(problems)
    with early_warning_noted():
        return _trained(options)


def _trained(options: argparse.Namespace) -> int:
    from sft_toolkit.assemble import run
    from sft_toolkit.engines.distributed import leave_process_group

    with warnings.catch_warnings():
        # DeepSpeed 0.19 calls torch under its old names, on every rank: nothing that a user could change.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        result = run(options.config, options.overrides)
    leave_process_group()
    if os.environ.get("RANK", "0") == "0":
        print(result.summary())
    return result.exit_code


def _prepare(options: argparse.Namespace) -> int:
    from sft_toolkit.commands import prepare_only

    print(f"token cache is ready; counts are in {prepare_only(options.config, options.overrides)}")
    return 0


def _preview(options: argparse.Namespace) -> int:
    from sft_toolkit.commands import preview
    from sft_toolkit.data.preview import json_lines, terminal
    from sft_toolkit.data.preview_bins import in_words

    with _libraries_on_stderr():
        shown = preview(options.config, options.overrides, options.rows)
    if options.html:
        from sft_toolkit.data.preview_page import page

        Path(options.html).write_text(page(shown.rows, shown.tokenizer, shown.verdict, shown.bins), encoding="utf-8")
        _say_also(f"written: {options.html}")
    if options.json:
        for line in json_lines(shown.rows):
            print(line)
    elif not options.html:
        for record in shown.rows:
            print(terminal(record, shown.tokenizer, color=sys.stdout.isatty()), end="\n\n")
        print(shown.verdict)
        if shown.bins is not None:
            print(f"\n{in_words(shown.bins)}")
    return 0


def _check(options: argparse.Namespace) -> int:
    with _libraries_on_stderr():
        from sft_toolkit.commands import check

        resolved = check(options.config, options.overrides)
    print(resolved)
    return 0


def _plan(options: argparse.Namespace) -> int:
    with _libraries_on_stderr():
        from sft_toolkit.commands import plan
        from sft_toolkit.planning.command import Asked

        machine = Asked(options.device_memory, options.devices, options.host_memory, options.devices_per_host)
        found = plan(options.config, options.overrides, machine)
    print(found.in_json() if options.json else found.in_words())
    return 0


def _doctor(options: argparse.Namespace) -> int:
    """1 where something is bad: the machine is not ready, and that is no mistake of a configuration."""
    from sft_toolkit.doctor.checks import as_json, examine

    findings = []
    for finding in examine(dict(os.environ), options.config, options.overrides, options.ranks):
        findings.append(finding)
        if not options.json:
            print(finding.in_words(), flush=True)
    if options.json:
        print(as_json(findings))
    return int(any(finding.level == "bad" for finding in findings))


def _merge(options: argparse.Namespace) -> int:
    from sft_toolkit.lora.merge import merge

    allowed = options.allow_other_base
    print(merge(options.adapter, options.output, options.dtype, weights=options.weights, allow_other_base=allowed))
    return 0


def _libraries_on_stderr() -> AbstractContextManager[object]:
    """What a library prints when it is imported (DeepSpeed does) is no part of a result on standard output."""
    return redirect_stdout(sys.stderr)


def _is_the_one_to_say_it() -> bool:
    """All ranks find the same mistake in the same file: the first one says it, and any that is no rank of a group."""
    launch = read_launch(os.environ)
    return launch is None or launch.rank == 0 or any(launch_problems(os.environ))


def _say_unexpected(error: Exception) -> None:
    """What no check foresaw, in its own words, and where its traceback is."""
    during, written, place = phase_of(error), traceback_of(error), user_code_of(error)
    _say(f"{f'while {during}: ' if during else ''}{type(error).__name__}: {error}{f' ({place})' if place else ''}")
    if os.environ.get(SHOW_TRACEBACK):
        traceback.print_exception(error)
    else:
        where = f"in {written}" if written else f"shown with {SHOW_TRACEBACK}=1"
        print(f"(the traceback is {where})", file=sys.stderr)


def _say_also(message: str) -> None:
    """Beside the result on standard output."""
    print(message, file=sys.stderr)


def _say(message: str) -> None:
    rank = os.environ.get("RANK")
    print(f"error{f' (rank {rank})' if rank not in (None, '0') else ''}: {message}", file=sys.stderr)
