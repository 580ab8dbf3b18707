"""Which rows are held out, and how often a row is trained on: decided by content and seed, never by position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sft_toolkit.data.conversation import Conversation, Example, PlainText

Keys = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


def content_key(example: Example) -> int:
    """64-bit hash of what a row says. Rows that differ only in ids, weights or other columns have equal keys."""
    if isinstance(example, Conversation):
        messages = [message.as_template_dict() for message in example.messages]
        content: list[object] = [messages, example.tools, example.template_kwargs]
    elif isinstance(example, PlainText):
        content = [example.prompt, example.completion]
    else:
        content = [example.input_ids]
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def held_out(sources: Sequence[Keys], amount: float) -> list[npt.NDArray[np.bool_]]:
    """Choose the held-out rows of each source.

    Rows of equal content lie on the same side, whatever their source. With a share, a row's side depends on its own
    content alone, so that rows appended later move no other row. A number of rows is shared out by the sizes of the
    sources and takes the smallest keys; there, appended rows can replace some.

    Args:
        sources: content keys per source, each of shape (rows,).
        amount: a share below 1, or a whole number of rows.

    Returns:
        Per source a mask of shape (rows,), True where held out. At least one row is.
    """
    rows = sum(len(keys) for keys in sources)
    if rows == 0:
        return [np.zeros(0, dtype=np.bool_) for _ in sources]
    if amount < 1:
        masks = [keys < np.uint64(int(amount * 2**64)) for keys in sources]
        if any(mask.any() for mask in masks):
            return masks
        amount = 1
    chosen = _smallest(sources, int(amount))
    return [np.isin(keys, chosen) for keys in sources]


def linked(groups: Keys, contents: Keys) -> Keys:
    """A key per row that is equal for rows of one group, for rows of equal content, and for whatever these link.

    Args:
        groups, contents: keys per row, each uint64 (rows,), over all sources.

    Returns:
        uint64 (rows,), evenly distributed, and the same as before for rows that later rows don't link to others.
    """
    members = [np.unique(keys, return_inverse=True)[1] for keys in (groups, contents)]
    smallest = groups
    while True:
        before = smallest
        for of_row in members:
            of_member = np.full(int(of_row.max(initial=-1)) + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
            np.minimum.at(of_member, of_row, smallest)
            smallest = of_member[of_row]
        if (smallest == before).all():
            return _mixed(smallest)


def _mixed(keys: Keys) -> Keys:
    """The keys, hashed again (splitmix64): the smallest of several keys is small, and would be held out more often."""
    mixed = keys + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Keys = mixed ^ (mixed >> np.uint64(31))
    return result


def _smallest(sources: Sequence[Keys], amount: int) -> Keys:
    """Keys whose rows are `amount` together, or a few more where rows of equal content occur."""
    rows = sum(len(keys) for keys in sources)
    exact = [amount * len(keys) / rows for keys in sources]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(sources)), key=lambda i: quotas[i] - exact[i])
    for i in by_remainder[: amount - sum(quotas)]:
        quotas[i] += 1
    chosen = np.zeros(0, dtype=np.uint64)
    for keys, quota in zip(sources, quotas, strict=True):
        missing = quota - int(np.isin(keys, chosen).sum())
        fresh, counts = np.unique(keys[~np.isin(keys, chosen)], return_counts=True)
        # np.unique sorts: take the smallest keys until their rows reach the quota.
        taken = int(np.searchsorted(np.cumsum(counts), missing)) + 1 if missing > 0 else 0
        chosen = np.concatenate([chosen, fresh[:taken]])
    return chosen


def resampled(indices: Indices, weight: float, seed: int) -> Indices:
    """Rows of a source after its sampling weight, in order.

    Every row comes floor(weight) times, and a sample without replacement makes up the rest: 10 rows of weight 2.3
    become 23. The same seed gives the same sample.
    """
    whole = int(weight)
    return np.sort(np.concatenate([np.repeat(indices, whole), _sample(indices, (weight - whole), seed)]))


def passes(indices: Indices, count: int, seed: int) -> Indices:
    """`count` of these rows, pass after pass: each whole pass in order, and of the last one a sample in order."""
    whole, rest = divmod(count, max(1, len(indices)))
    return np.concatenate([np.tile(indices, whole), np.sort(_sample(indices, rest / max(1, len(indices)), seed))])


def _sample(indices: Indices, share: float, seed: int) -> Indices:
    # Raw bits, because numpy keeps their stream over versions (NEP 19).
    stream = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(len(indices))
    return indices[np.argsort(stream, kind="stable")[: round(share * len(indices))]]
