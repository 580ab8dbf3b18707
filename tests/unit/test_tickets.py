"""The quickstart's data: reproducible, held-out mails really new, every answer canonical and true to its mail."""

from __future__ import annotations

import json
import re
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TICKETS = ROOT / "data" / "tickets"
SPLITS = ("train", "heldout")
PHRASES: dict[str, dict[str, Any]] = yaml.safe_load((TICKETS / "phrases.yaml").read_text(encoding="utf-8"))


def texts(block: Any) -> Iterator[str]:
    """Every phrase in a list or mapping of lists."""
    if isinstance(block, str):
        yield block
        return
    for part in block.values() if isinstance(block, dict) else block:
        yield from texts(part)


def read(split: str) -> list[tuple[str, str]]:
    """(mail, answer) of each row, after a check of the row's shape."""
    pairs = []
    for line in (TICKETS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        system, user, assistant = json.loads(line)["messages"]
        assert system == {"role": "system", "content": "Turn the mail into a ticket."}
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        pairs.append((user["content"], assistant["content"]))
    return pairs


def word_runs(phrases: Iterator[str], length: int) -> set[tuple[str, ...]]:
    """All runs of `length` words within a phrase; punctuation and case don't count."""
    words = [re.findall(r"[\w'{}]+", phrase.lower()) for phrase in phrases]
    return {tuple(w[i : i + length]) for w in words for i in range(len(w) - length + 1)}


def filled(phrase: str) -> str:
    """A regular expression of what the phrase looks like in a mail."""
    return re.sub(r"\\\{\w+\\\}", r"[\\w ]+", re.escape(phrase))


def test_the_script_reproduces_the_committed_files_byte_for_byte(tmp_path: Path) -> None:
    main: Callable[[Path], None] = runpy.run_path(str(ROOT / "scripts" / "make_tickets.py"))["main"]
    main(tmp_path)
    for split in SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (TICKETS / f"{split}.jsonl").read_bytes()


def test_sizes_and_balance_of_the_classes() -> None:
    assert [len(read(split)) for split in SPLITS] == [600, 50]
    problems = Counter(json.loads(answer)["problem"] for _, answer in read("heldout"))
    assert problems == dict.fromkeys(["damage", "delivery", "wrong item", "missing part", "payment"], 10)
    assert problems.keys() == Counter(json.loads(answer)["problem"] for _, answer in read("train")).keys()


def test_no_mail_occurs_twice() -> None:
    mails = [mail for split in SPLITS for mail, _ in read(split)]
    assert len(set(mails)) == len(mails) == 650


def test_no_phrase_and_no_run_of_four_words_is_shared_between_train_and_heldout() -> None:
    ours, theirs = ({text.lower() for text in texts(PHRASES[split])} - {""} for split in SPLITS)
    assert ours & theirs == set()
    assert word_runs(texts(PHRASES["train"]), 4) & word_runs(texts(PHRASES["heldout"]), 4) == set()


def test_no_heldout_sentence_occurs_in_a_training_mail() -> None:
    sentences = [text for text in texts(PHRASES["heldout"]) if text.endswith((".", "?")) and "{" not in text]
    assert len(sentences) == 56
    training_text = "\n".join(mail for mail, _ in read("train"))
    assert [sentence for sentence in sentences if sentence in training_text] == []


def test_no_heldout_product_or_order_number_occurs_in_a_training_mail() -> None:
    training_text = "\n".join(mail for mail, _ in read("train"))
    for _, answer in read("heldout"):
        number, product = json.loads(answer)["title"].removeprefix("Order ").split(": ")
        assert re.search(rf"\b{product}\b", training_text) is None
        assert number not in training_text


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_is_the_canonical_json(split: str) -> None:
    for _, answer in read(split):
        ticket = json.loads(answer)
        assert list(ticket) == ["title", "problem", "request"]
        assert answer == json.dumps(ticket, separators=(",", ":"))


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_says_what_its_mail_says(split: str) -> None:
    pools = PHRASES[split]
    for mail, answer in read(split):
        ticket = json.loads(answer)
        number, product = ticket["title"].removeprefix("Order ").split(": ")
        assert re.findall(r"\b\d{5}\b", mail) == [number]
        assert product in pools["products"]
        assert re.search(rf"\b{product}\b", mail)
        for kind, field in (("problems", "problem"), ("requests", "request")):
            said = {name for name, list_ in pools[kind].items() if any(re.search(filled(p), mail) for p in list_)}
            assert said == {ticket[field]}


@pytest.mark.parametrize("split", SPLITS)
def test_every_mail_uses_the_right_indefinite_article(split: str) -> None:
    wrong = r"\b(a [aeiou]|an [^aeiou])"
    assert [mail for mail, _ in read(split) if re.search(wrong, mail)] == []
