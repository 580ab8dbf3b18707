"""Examples -> input_ids and labels. Each text is rendered once and encoded once; labels come from character offsets.

What is learned: everything that the model must produce after its inference prompt, up to and with the token that ends
its turn. So a blank or an empty reasoning block that the template writes after the assistant's header is learned too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from sft_toolkit.args import Supervise
from sft_toolkit.data.conversation import IGNORED, Conversation, Example, PlainText, RowError, TokenRow
from sft_toolkit.data.encode import Alignment, TextEncoder
from sft_toolkit.data.offsets import starts_token, token_at, token_range
from sft_toolkit.data.spans import Unproven
from sft_toolkit.data.supervision import Span, learned_spans, weight_problem, weight_remarks
from sft_toolkit.data.template import Chat, ChatTemplate, Located
from sft_toolkit.data.turns import Turn
from sft_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMPTY_ANSWER = "an answer without text: only its end is learned"
CONTROL_IN_PROMPT = "control tokens spelled in user, system or tool text: the model reads them as control tokens"
CONTROL_IN_ANSWER = "control tokens spelled in an assistant's text: the model learns them as control tokens"
NO_END_OF_TURN = "no end-of-turn token after an assistant's text: the model does not learn to stop there"
NO_END_TOKEN = "no end token after the text: the tokenizer has none"
NO_PROMPT_HEADER = (
    "no header is added for inference: what stands before answers is not learned, the prompt must bring it"
)
OTHER_HEADER = (
    "finished answers begin otherwise than the inference prompt (a reasoning block, mostly): learned from there"
)
SWALLOWED = "white space before an answer belongs to a control token and is not learned"
OTHER_LABELS = "labels that differ from their own token"

BAD_ROW = "bad_row"
MASK_UNPROVEN = "mask_unproven"


@dataclass(frozen=True)
class Tokens:
    """A row ready for training.

    Attributes:
        input_ids: (L,) token ids.
        labels: (L,) the id where the token is learned, -100 elsewhere. Not shifted: the model does that.
        turn_ends: indices just after each assistant turn, in order; a row may be cut there.
        head: tokens that stay when the prompt is shortened from the left (bos, system text).
        starts: indices, in order, where the rest of a row may begin after its head.
        notes: remarks on this row, each one of the module's constants or of `template`'s.
        weights: (L,) factors of the tokens' losses; None is 1 for each.
    """

    input_ids: list[int]
    labels: list[int]
    turn_ends: tuple[int, ...] = ()
    head: int = 0
    starts: Sequence[int] = ()
    notes: tuple[str, ...] = ()
    weights: list[float] | None = None


@dataclass(frozen=True)
class Refusal:
    """A row that can't be trained on: the kind of reason ("bad_row", "mask_unproven") and the reason in words."""

    reason: str
    detail: str


class _Draft(NamedTuple):
    """A rendered text with what is known of it, before encoding. `turns` are the assistant's, learned or not."""

    text: str
    learned: list[Span]
    turns: Sequence[Turn] = ()
    user_starts: Sequence[int] = ()
    is_plain: bool = False
    notes: tuple[str, ...] = ()


class Renderer:
    """Renders and encodes examples with one tokenizer, and proves each label mask.

    Args:
        tokenizer: a fast one; its own chat template is the only one.
        supervise: which text is learned. `assistant`: every assistant turn. `last_assistant`: the last one.
            `completion`: the assistant turns from `Conversation.completion_from` on, or the last one where that is
            None. `all`: everything. Of a PlainText the completion is learned, and the prompt too with `all`. A
            TokenRow brings its own labels.
        cuts: say where a row may be cut; not needed, and a few per cent faster, where long rows are dropped.

    Attributes:
        notes: how many rows each remark applies to.

    Raises:
        ConfigError: the tokenizer gives no character offsets.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, supervise: Supervise = "assistant", cuts: bool = True
    ) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} of '{tokenizer.name_or_path}' gives no character offsets, "
                "which label masks are made from; a fast tokenizer (tokenizer.json) is needed"
            )
        self.notes: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._supervise = supervise
        self._cuts = cuts
        self._encode = TextEncoder(tokenizer)
        self._vocabulary = len(tokenizer)
        self._eos: int | None = tokenizer.eos_token_id

    @property
    def end_of_turn(self) -> tuple[str, int] | None:
        """Text and id of the token that ends an assistant's answer; None without a template or such a token."""
        if self._tokenizer.chat_template is None:
            return None
        try:
            text = self._template.grammar().end_of_turn
        except Unproven:
            return None
        return (text, self._id_of(text)) if text else None

    def encode(self, examples: Sequence[Example]) -> list[Tokens | Refusal]:
        """Tokens of each example, or why there are none, in order.

        The ids of a conversation are those of `apply_chat_template(tokenize=True)`. A PlainText gets the tokens that
        the tokenizer puts before a text (bos, where it does) and ends with exactly one eos.

        Raises:
            ConfigError: a conversation, and the tokenizer has no chat template.
        """
        drafts = self._drafts(examples)
        encodings = iter(self._encode([draft.text for draft in drafts if isinstance(draft, _Draft)]))
        results = [self._finish(draft, *next(encodings)) if isinstance(draft, _Draft) else draft for draft in drafts]
        for result in results:
            if isinstance(result, Tokens):
                self.notes.update(result.notes)
        return results

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)

    @cached_property
    def _lead_ids(self) -> list[int]:
        """What the tokenizer puts before a text, bos most often."""
        bare = self._tokenizer("x", add_special_tokens=False)["input_ids"]
        full = self._tokenizer("x")["input_ids"]
        return next((full[:i] for i in range(len(full)) if full[i : i + len(bare)] == bare), [])

    def _id_of(self, token: str) -> int:
        index = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(index, int)
        return index

    def _drafts(self, examples: Sequence[Example]) -> list[_Draft | Tokens | Refusal]:
        conversations = [example for example in examples if isinstance(example, Conversation)]
        chats = [self._template.chat(conversation) for conversation in conversations]
        rendered = zip(chats, self._template.render(chats) if chats else (), strict=True)
        drafts: list[_Draft | Tokens | Refusal] = []
        for example in examples:
            draft: _Draft | Tokens | Refusal
            if isinstance(example, Conversation):
                draft = self._conversation(example, *next(rendered))
            elif isinstance(example, PlainText):
                draft = self._plain(example)
            else:
                draft = self._token_row(example)
            if isinstance(draft, _Draft) and not _is_unicode(draft.text):
                draft = Refusal(BAD_ROW, "the text holds half of a surrogate pair, which is no character")
            drafts.append(draft)
        return drafts

    def _conversation(self, conversation: Conversation, chat: Chat, text: str | RowError) -> _Draft | Refusal:
        problem = weight_problem(conversation.messages, self._supervise)
        if problem or isinstance(text, RowError):
            return Refusal(BAD_ROW, problem or str(text))
        try:
            located = self._template.locate(chat, text)
        except Unproven as reason:
            if self._supervise == "all" and all(message.weight in (None, 1) for message in conversation.messages):
                return _Draft(text, [Span(0, len(text))], notes=chat.notes)
            return Refusal(MASK_UNPROVEN, str(reason))
        learned = learned_spans(conversation, located.turns, len(text), self._supervise)
        notes = (*chat.notes, *located.notes, *self._remarks(conversation, chat, located))
        return _Draft(text, learned, located.turns, located.user_starts, notes=notes)

    def _remarks(self, conversation: Conversation, chat: Chat, located: Located) -> Iterator[str]:
        grammar = self._template.grammar(chat.key)
        if grammar.default_system and not chat.where("system", "developer"):
            yield f'the chat template adds the system text "{grammar.default_system}"'
        spelled = {
            message.role == "assistant"
            for message in conversation.messages
            if message.content and grammar.spells_control(message.content)
        }
        yield from [CONTROL_IN_PROMPT] * (False in spelled) + [CONTROL_IN_ANSWER] * (True in spelled)
        if any(
            message.role == "assistant" and not message.content and not message.tool_calls
            for message in conversation.messages
        ):
            yield EMPTY_ANSWER
        if any(turn.closing is None for turn in located.turns):
            yield NO_END_OF_TURN
        if any(turn.diverges for turn in located.turns):
            yield OTHER_HEADER
        if grammar.unprompted:
            yield NO_PROMPT_HEADER
        yield from weight_remarks(conversation.messages, self._supervise)

    def _plain(self, example: PlainText) -> _Draft:
        text = example.prompt + example.completion
        learned = Span(0 if self._supervise == "all" else len(example.prompt), len(text))
        notes: tuple[str, ...] = () if example.completion else (EMPTY_ANSWER,)
        notes += () if self._eos is not None else (NO_END_TOKEN,)
        return _Draft(text, [learned], is_plain=True, notes=notes)

    def _token_row(self, row: TokenRow) -> Tokens | Refusal:
        ids, labels = row.input_ids, row.labels
        if {*map(type, ids), *map(type, labels)} - {int}:
            return Refusal(BAD_ROW, "input_ids and labels must be whole numbers")
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            bad = next(i for i in ids if not 0 <= i < self._vocabulary)
            return Refusal(BAD_ROW, f"input_ids holds {bad}; the tokenizer has the ids 0 to {self._vocabulary - 1}")
        learned = {*labels} - {IGNORED}
        if learned and (min(learned) < 0 or max(learned) >= self._vocabulary):
            bad = next(i for i in labels if i != IGNORED and not 0 <= i < self._vocabulary)
            return Refusal(BAD_ROW, f"labels holds {bad}; expected -100 or an id of 0 to {self._vocabulary - 1}")
        differ = any(label not in (IGNORED, i) for i, label in zip(ids, labels, strict=True))
        head = int(ids[0] == self._tokenizer.bos_token_id)
        notes = (OTHER_LABELS,) if differ else ()
        return Tokens(ids, labels, head=head, starts=_prompt(labels, head), notes=notes, weights=row.weights)

    def _finish(self, draft: _Draft, encoding: Alignment, ids: list[int]) -> Tokens | Refusal:
        finish = self._plain_tokens if draft.is_plain else self._chat_tokens
        try:
            return finish(draft, encoding, ids)
        except Unproven as reason:
            return Refusal(MASK_UNPROVEN, str(reason))

    def _labels(
        self, draft: _Draft, encoding: Alignment, ids: list[int]
    ) -> tuple[list[int], list[float] | None, tuple[str, ...]]:
        """Labels, weights where one is not 1, and the draft's notes with more."""
        labels = [IGNORED] * len(ids)
        weights = [1.0] * len(ids) if any(span.weight != 1.0 for span in draft.learned) else None
        notes = draft.notes
        for span in draft.learned:
            tokens = token_range(encoding, draft.text, span.start, span.end)
            labels[tokens.first : tokens.stop] = ids[tokens.first : tokens.stop]
            if weights is not None:
                weights[tokens.first : tokens.stop] = [span.weight] * (tokens.stop - tokens.first)
            if span.closing and ids[tokens.stop - 1] != self._id_of(span.closing):
                raise Unproven(f"the tokenizer does not keep {span.closing!r} as one token at the end of a turn")
            if tokens.swallowed and SWALLOWED not in notes:
                notes += (SWALLOWED,)
        return labels, weights, notes

    def _chat_tokens(self, draft: _Draft, encoding: Alignment, ids: list[int]) -> Tokens:
        labels, weights, notes = self._labels(draft, encoding, ids)
        if not self._cuts:
            return Tokens(ids, labels, notes=notes, weights=weights)
        length = len(draft.text)
        ends = tuple(token_at(encoding, turn.end, length) for turn in draft.turns)
        whole = all(starts_token(encoding, start) for start in draft.user_starts)
        starts = tuple(token_at(encoding, start, length) for start in draft.user_starts) if whole else ()
        return Tokens(ids, labels, ends, starts[0] if starts else 0, starts, notes, weights)

    def _plain_tokens(self, draft: _Draft, encoding: Alignment, ids: list[int]) -> Tokens:
        labels, _, notes = self._labels(draft, encoding, ids)
        lead = [] if ids[: len(self._lead_ids)] == self._lead_ids else self._lead_ids
        end = [self._eos] if self._eos is not None and ids[-1:] != [self._eos] else []
        labels = [IGNORED] * len(lead) + labels + end
        return Tokens([*lead, *ids, *end], labels, (), len(lead), _prompt(labels, len(lead)), notes)


def _prompt(labels: Sequence[int], head: int) -> range:
    """Where a row without turns may begin after its head: anywhere in its prompt, of which one token stays."""
    first = next((i for i, label in enumerate(labels) if label != IGNORED), len(labels))
    return range(head, max(head, first))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
