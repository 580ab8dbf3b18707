"""Whatever is said in whatever template: the answers and their ends are learned to the byte, and nothing else is."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_toolkit.data.conversation import Conversation, Message, PlainText
from sft_toolkit.data.lengths import fit
from sft_toolkit.data.render import Renderer, Tokens
from tests.templates import FAMILIES
from tests.tiny import supervised_text

QUICK = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
CONTROLS = ["<|im_end|>", "</s>", "<s>", "[INST]", "[/INST]", "<|eot_id|>", "<end_of_turn>", "<|im_start|>assistant\n"]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [*CONTROLS, " ", "\n", "\t", "None", "Yes", "assistant", "\u200b", "\u00a0", "é", "日本", "😀"]
        ),
        st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=6),
    ),
    max_size=5,
).map("".join)
NAMES = st.sampled_from(sorted(FAMILIES))
TRIMMING = ("llama3", "gemma")


@cache
def renderer(name: str, bos: bool) -> tuple[Any, Renderer]:
    tokenizer = FAMILIES[name].tokenizer(bos_in_template=bos)
    return tokenizer, Renderer(tokenizer)


def encoded(name: str, bos: bool, example: Any) -> tuple[Any, Tokens]:
    tokenizer, own = renderer(name, bos)
    (tokens,) = own.encode([example])
    assert isinstance(tokens, Tokens), (example, tokens)
    return tokenizer, tokens


def answers(name: str, texts: list[str]) -> str:
    """What must be learned of these answers, the last one as the family writes it."""
    earlier, last = FAMILIES[name].learned
    texts = [text.strip() for text in texts] if name in TRIMMING else texts
    shown = [earlier.replace("Yes", "\0") for _ in texts[1:]] + [last.replace("No", "\0")]
    return "".join(form.replace("\0", text) for form, text in zip(shown, texts, strict=True))


@QUICK
@given(NAMES, st.booleans(), st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), st.none() | TEXTS)
def test_answers_and_their_ends_are_learned_to_the_byte(
    name: str, bos: bool, turns: list[tuple[str, str]], system: str | None
) -> None:
    messages = [Message(role, text) for pair in turns for role, text in zip(("user", "assistant"), pair, strict=True)]
    head = [] if system is None else [Message("system", system)]
    tokenizer, tokens = encoded(name, bos, Conversation((*head, *messages)))
    assert supervised_text(tokenizer, tokens.input_ids, tokens.labels) == answers(name, [text for _, text in turns])
    own: Any = tokenizer.apply_chat_template([m.as_template_dict() for m in (*head, *messages)])
    assert tokens.input_ids == own["input_ids"]
    assert all(label in (-100, i) for i, label in zip(tokens.input_ids, tokens.labels, strict=True))


@QUICK
@given(NAMES, TEXTS, TEXTS)
def test_completions_are_learned_to_the_byte_and_end_once(name: str, prompt: str, completion: str) -> None:
    tokenizer, tokens = encoded(name, False, PlainText(prompt, completion))
    eos = tokenizer.eos_token
    end = "" if completion.endswith(eos) or (not completion and prompt.endswith(eos)) else eos
    assert supervised_text(tokenizer, tokens.input_ids, tokens.labels) == completion + end


@QUICK
@given(
    NAMES,
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3),
    st.integers(2, 120),
    st.sampled_from(["truncate_right", "truncate_prompt_left", "cut_at_turn"]),
)
def test_a_cut_row_is_a_part_of_the_whole_one(
    name: str, turns: list[tuple[str, str]], max_length: int, policy: Any
) -> None:
    messages = [Message(role, text) for pair in turns for role, text in zip(("user", "assistant"), pair, strict=True)]
    _, whole = encoded(name, True, Conversation(tuple(messages)))
    cut = fit(whole, max_length, policy).tokens
    if cut is None:
        return
    assert len(cut.input_ids) == len(cut.labels) <= max_length
    assert any(label != -100 for label in cut.labels[1:])
    pairs, kept = (
        list(zip(whole.input_ids, whole.labels, strict=True)),
        list(zip(cut.input_ids, cut.labels, strict=True)),
    )
    if policy == "truncate_prompt_left":
        gone = len(pairs) - len(kept)
        assert kept == pairs[: whole.head] + pairs[whole.head + gone :]
    else:
        assert kept == pairs[: len(kept)]
