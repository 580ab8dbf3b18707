"""The four public errors. The command line turns each into its exit code, without a traceback."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """The configuration is wrong: nothing was loaded, nothing was trained (exit code 2).

    Args:
        problems: one sentence per problem, all found in one pass, each naming the place
            (`run.yaml:12: training.learning_rat`) and what would be right.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class UnknownKeywordError(ConfigError, TypeError):
    """A keyword that a class of ours does not take; a TypeError too, as code that tries names one by one expects."""


class DataError(ValueError):
    """A data file or row is wrong: names the file, the 1-based row and the key (exit code 2)."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        # What a loader's worker raises, torch raises again as `type(error)("Caught ... Original Traceback ...")`.
        super().__init__(message.rpartition(f"\n{__name__}.DataError: ")[2].rstrip("\n"))


class CheckpointError(RuntimeError):
    """A checkpoint can't be written, or a saved folder does not reload as it should.

    Args:
        message: what happened, in which folder, and the way out.
        exit_code: 1 while running; 2 where the user asked for a checkpoint that can't be used.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class TrainingDivergedError(RuntimeError):
    """The loss or a gradient is no longer a finite number: names steps and rows (exit code 1)."""

    exit_code = 1


class OutOfMemoryError(RuntimeError):
    """Memory ran out in a run: names the phase, predicted and measured memory, and the keys that help (exit code 1)."""

    exit_code = 1


EXPECTED = (ConfigError, DataError, CheckpointError, TrainingDivergedError, OSError)
"""What says all there is to say in its message; anything else may need its traceback."""
