"""Writes data/tickets/train.jsonl and data/tickets/heldout.jsonl: support mails and the JSON ticket of each.

    python scripts/make_tickets.py [FOLDER]

Mails are composed at random, with a fixed seed, from data/tickets/phrases.yaml. That file keeps two sets of
building blocks which share no entry, so no held-out mail has a product or a sentence of the training mails.
Same input, same bytes out.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HOME = Path(__file__).resolve().parent.parent / "data" / "tickets"
SYSTEM = "Turn the mail into a ticket."
ROWS = {"train": 600, "heldout": 50}
SEED = 7


@dataclass(frozen=True)
class Ticket:
    """The answer. The order of the fields is the key order of the JSON; `title` is "Order NUMBER: PRODUCT"."""

    title: str
    problem: str
    request: str

    def canonical(self) -> str:
        """One line, no spaces between JSON tokens: the only accepted spelling."""
        return json.dumps(vars(self), separators=(",", ":"))


class Deck:
    """Deals a list's entries in random order and starts over when it is used up: all occur about equally often."""

    def __init__(self, entries: list[str], rng: random.Random) -> None:
        self._entries, self._rng = entries, rng
        self._pile: list[str] = []

    def deal(self) -> str:
        if not self._pile:
            self._pile = self._rng.sample(self._entries, len(self._entries))
        return self._pile.pop()


class Writer:
    """Composes mails and their tickets from one set of building blocks."""

    def __init__(self, phrases: Mapping[str, Any], rng: random.Random) -> None:
        self._rng = rng
        self._decks = {name: Deck(entries, rng) for name, entries in phrases.items() if isinstance(entries, list)}
        for kind in ("problems", "requests"):
            self._decks[kind] = Deck(list(phrases[kind]), rng)
            self._decks |= {name: Deck(entries, rng) for name, entries in phrases[kind].items()}

    def compose(self, number: int) -> tuple[str, Ticket]:
        """A mail about order `number` and its ticket."""
        problem, request = self._deal("problems"), self._deal("requests")
        if (problem, request) == ("payment", "replacement"):
            request = "answer"  # nobody asks for a second copy of a wrong bill
        product = self._deal("products")
        mail = self._fill(self._layout(problem, request), product, number)
        return mail, Ticket(f"Order {number}: {product}", problem, request)

    def _layout(self, problem: str, request: str) -> str:
        """Greeting, body and closing, with blanks; the order number comes early in some mails and late in others."""
        sentences = [self._deal(problem), self._deal(request)]
        if self._rng.random() < 0.6:
            body = [self._deal("intros"), *sentences]
        else:
            body = [self._deal("short_intros"), *sentences]
            body.insert(self._rng.choice([2, 3]), self._deal("numbers"))
        parts = [self._deal("greetings"), " ".join(body), self._deal("closings")]
        return "\n".join(part for part in parts if part)

    def _fill(self, text: str, product: str, number: int) -> str:
        other, amount = self._deal("others"), f"{self._rng.randint(5, 90)} euros"
        return text.format(p=product, a=article(product), n=number, x=other, ax=article(other), m=amount)

    def _deal(self, deck: str) -> str:
        return self._decks[deck].deal()


def article(noun: str) -> str:
    """`a` or `an`, by the first letter: phrases.yaml holds no noun that is an exception."""
    return "an" if noun[0] in "aeiou" else "a"


def rows(phrases: Mapping[str, Any], count: int, seed: str) -> Iterator[dict[str, Any]]:
    """`count` rows in the `messages` format; order numbers are unique."""
    rng = random.Random(seed)
    writer = Writer(phrases, rng)
    for number in rng.sample(range(10_000, 100_000), count):
        mail, ticket = writer.compose(number)
        turns = {"system": SYSTEM, "user": mail, "assistant": ticket.canonical()}
        yield {"messages": [{"role": role, "content": content} for role, content in turns.items()]}


def main(folder: Path) -> None:
    """Writes both files into `folder`."""
    phrases = yaml.safe_load((HOME / "phrases.yaml").read_text(encoding="utf-8"))
    for split, count in ROWS.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows(phrases[split], count, f"{split} {SEED}")]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HOME)
