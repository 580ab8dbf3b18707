"""What ranks say to one another behind an error, with an end to the waiting.

The group of the training is of no use then: a rank that failed in the middle of a step has left collectives open there.
This one is there for nothing else, and its barrier gives up on ranks that don't come.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed

SECONDS_TO_MEET = 5.0  # ranks that fail of the same error wait for one another at every update


class NoAgreementError(RuntimeError):
    """Not all ranks have come: the others have not failed, or are gone."""


class Agreement:
    """A group of all ranks on the CPU.

    Args:
        seconds: how long one rank may do something while the others wait for it (write a checkpoint).
    """

    def __init__(self, seconds: float) -> None:
        self._patience = timedelta(seconds=seconds)
        self._group = distributed.new_group(backend="gloo", timeout=self._patience)

    def everybody_says(self, answer: Any) -> list[Any]:
        """What each rank answers, by rank; all have to ask within a few seconds.

        Raises:
            NoAgreementError: some don't.
        """
        answers: list[Any] = [None] * distributed.get_world_size()
        try:
            distributed.monitored_barrier(self._group, timeout=timedelta(seconds=SECONDS_TO_MEET))
            distributed.all_gather_object(answers, answer, group=self._group)
        except RuntimeError as error:
            raise NoAgreementError("not every rank has failed, or some are gone") from error
        return answers

    def wait(self) -> None:
        """Until all ranks are here.

        Raises:
            NoAgreementError: one is gone, or takes too long.
        """
        try:
            distributed.monitored_barrier(self._group, timeout=self._patience)
        except RuntimeError as error:
            raise NoAgreementError("another rank is gone") from error

    def close(self) -> None:
        """Give the group back; asks nobody."""
        distributed.destroy_process_group(self._group)
