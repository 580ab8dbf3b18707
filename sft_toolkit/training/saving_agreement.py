"""What ranks say to one another behind an error, with an end to the waiting.

Collectives are of no use then: a rank that failed in the middle of an update has left some open, and a group of gloo
that waited in vain can't be given back (torch 2.13 hangs at that). The store through which the ranks found one another
is still there, and its waits have limits.
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import distributed

ALONE, DECIDED = "not every rank has failed, or some are gone", "decided"
SECONDS_TO_MEET = 5.0  # ranks that fail of the same error wait for one another at every update


class NoAgreementError(RuntimeError):
    """Not all ranks have come: the others have not failed, or are gone."""


class Agreement:
    """Made by all ranks together, while all is well.

    Args:
        seconds: how long one rank may do something while the others wait for it (write a checkpoint).

    Raises:
        RuntimeError: there is no store at MASTER_ADDR and MASTER_PORT.
    """

    def __init__(self, seconds: float) -> None:
        self._rank, self._ranks = distributed.get_rank(), distributed.get_world_size()
        self._patience = timedelta(seconds=seconds)
        self._meetings = 0
        name = [uuid.uuid4().hex]  # of this training: an earlier one of these processes may have used the store too
        broadcast_object_list(name)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=SECONDS_TO_MEET)
        store = distributed.TCPStore(address, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        self._store = distributed.PrefixStore(f"sft_toolkit/{name[0]}", store)  # type: ignore[attr-defined]

    def everybody_says(self, answer: Any) -> list[Any]:
        """What each rank answers (JSON), by rank; all have to ask within a few seconds.

        Raises:
            NoAgreementError: some don't.
        """
        answers: list[Any] = []
        with suppress(RuntimeError):
            if not self._store.check([DECIDED]):
                answers = self._met(answer, timedelta(seconds=SECONDS_TO_MEET))
        # Its answer stays in the store when a rank gives up and ends; a later one must not wait for it then. So the
        # first to know decides for all.
        try:
            decided = self._store.compare_set(DECIDED, "", "together" if answers else "alone")
        except RuntimeError:
            decided = b"alone"
        if decided != b"together":
            raise NoAgreementError(ALONE)
        return answers

    def wait(self) -> None:
        """Until all ranks are here.

        Raises:
            NoAgreementError: one takes too long, or the store is gone.
        """
        try:
            self._met(None, self._patience)
        except RuntimeError as error:
            raise NoAgreementError("another rank is gone") from error

    def _met(self, answer: Any, patience: timedelta) -> list[Any]:
        self._meetings += 1
        keys = [f"{self._meetings}/{rank}" for rank in range(self._ranks)]
        self._store.set(keys[self._rank], json.dumps(answer))
        self._store.wait(keys, patience)
        return [json.loads(self._store.get(key)) for key in keys]
