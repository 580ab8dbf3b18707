"""The quickstart's data set: reproducible, held-out rows truly held out, every answer strict and true to its mail."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HOME = ROOT / "data" / "tickets"
PHRASES: dict[str, dict[str, Any]] = yaml.safe_load((HOME / "phrases.yaml").read_text(encoding="utf-8"))


def rows(split: str) -> list[tuple[str, dict[str, str], str]]:
    """Mail, ticket, and the ticket as it is written."""
    found = []
    for line in (HOME / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        system, user, assistant = json.loads(line)["messages"]
        assert system == {"role": "system", "content": "Turn the mail into a ticket."}
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        found.append((user["content"], json.loads(assistant["content"]), assistant["content"]))
    return found


def blocks(split: str) -> set[str]:
    """Every product and sentence of a set, as it stands in the mails but for the blanks."""
    parts: set[str] = set()
    for entry in PHRASES[split].values():
        groups = entry.values() if isinstance(entry, dict) else [entry]
        parts |= {text for group in groups for text in group if text}
    return parts


def test_the_generator_writes_the_same_bytes(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "scripts" / "make_tickets.py"))["main"](tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (HOME / name).read_bytes()


def test_there_are_enough_rows_and_none_twice() -> None:
    mails = [mail for split in ("train", "heldout") for mail, _, _ in rows(split)]
    assert (len(rows("train")), len(rows("heldout"))) == (600, 50)
    assert len(set(mails)) == 650


def test_no_product_or_sentence_of_the_held_out_mails_occurs_in_training() -> None:
    assert blocks("train") & blocks("heldout") == set()
    trained = {ticket["title"].partition(": ")[2] for _, ticket, _ in rows("train")}
    assert {ticket["title"].partition(": ")[2] for _, ticket, _ in rows("heldout")} & trained == set()
    sentences = [text for text in blocks("heldout") if "{" not in text and " " in text and text.endswith((".", "?"))]
    assert len(sentences) > 40
    everything = "\n".join(mail for mail, _, _ in rows("train"))
    assert [sentence for sentence in sentences if sentence in everything] == []


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_ticket_is_canonical_and_true_to_its_mail(split: str) -> None:
    problems, requests = set(PHRASES["train"]["problems"]), set(PHRASES["train"]["requests"])
    for mail, ticket, written in rows(split):
        assert list(ticket) == ["title", "problem", "request"]
        assert written == json.dumps(ticket, separators=(",", ":"))
        order, _, product = ticket["title"].removeprefix("Order ").partition(": ")
        assert order in mail
        assert product in mail
        assert ticket["problem"] in problems
        assert ticket["request"] in requests
