"""What a chat template writes around turns, learned once from conversations whose texts are one letter long.

No table of model families: the template itself is asked. What it appends for `add_generation_prompt=True` is the
assistant's header (where that adds nothing, what stands between a user's turn and the answer is); the control token
after an assistant's text closes the turn; what two user turns have in common before their text is the user's header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any

from sft_toolkit.data.conversation import RowError
from sft_toolkit.data.spans import TAG, Grammar, Layout, Marker, Unproven, unmark

Render = Callable[[Sequence[dict[str, Any]], bool], str]  # (messages, add_generation_prompt) -> text


def learn(render: Render, specials: Sequence[str], added: Sequence[str]) -> Grammar:
    """The grammar of the template behind `render`.

    Args:
        render: raises RowError where the template refuses the messages.
        specials: the tokenizer's special tokens.
        added: all its added tokens; some models close turns with one that is not flagged as special.

    Raises:
        Unproven: the template can't render one user turn with one assistant turn, or leaves one out.
    """
    lead = _leading_roles(render)
    one, two = [*lead, "assistant"], [*lead, "assistant", "user", "assistant"]
    single, pair, with_system = plain_layout(render, one), _attempt(render, two), _attempt(render, ["system", "user"])
    if len(single.slots) != len(one) or (pair and len(pair.slots) != len(two)):
        raise Unproven("the chat template leaves out or repeats a plain user or assistant message")
    special_tokens, added_tokens = pattern(specials), pattern(added)

    before_user, before_answer = single.before(-3), single.before(-2)
    before_next_user, after_user = pair.before(-3) if pair else "", _after_user(render, lead)
    before_first_text = with_system.before(0) if with_system else before_user
    openings = {*special_tokens.findall(before_first_text), *special_tokens.findall(before_user)[-1:]}
    openings -= {*added_tokens.findall(after_user)[:1]}  # what ends a user's turn as well begins none
    call = _layout_of_call(render, lead)
    endings = _endings(single.before(-1), before_next_user, openings, added_tokens)
    closings = endings + _call_endings(call, endings, added_tokens)
    user_header = _common_end(_atoms(before_user, special_tokens), _atoms(before_next_user, special_tokens), closings)
    before_answers = [before_answer, pair.before(-4) if pair else before_answer]
    header = _generation_header(render, lead, special_tokens)
    written = "" if header else _written_header(before_answers, _tail(render, lead), closings, special_tokens)
    return Grammar(
        headers=_headers(header or written, before_answers),
        end_of_turn=endings[0] if endings else None,
        closings=tuple(closings),
        shows_calls=call is not None,
        controls=pattern([*specials, *closings]),
        initials=frozenset(token[0] for token in (*specials, *closings) if token),
        fillers=_fillers({*specials, *added} - {*closings}),
        unprompted=bool(written),
        user_header=user_header,
        default_system=_default_system(with_system, before_user, user_header, special_tokens),
    )


def plain_layout(render: Render, roles: Sequence[str], prompt: bool = False) -> Layout:
    """The layout of a conversation of these roles whose texts are one letter long."""
    marker = Marker()
    return unmark(render(marker.mark(_letters(roles)), prompt), marker.owners)


def _letters(roles: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": "x"} for role in roles]


def pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds any of the tokens, the longer ones first; nothing where there are none."""
    ordered = sorted({token for token in tokens if token}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _leading_roles(render: Render) -> list[str]:
    """Roles that a plain conversation begins with: some templates demand a system message."""
    try:
        plain_layout(render, ["user", "assistant"])
    except RowError as error:
        if _attempt(render, ["system", "user", "assistant"]) is None:
            raise Unproven(f"the chat template refuses one user turn with one assistant turn: {error}") from error
        return ["system", "user"]
    return ["user"]


def _attempt(render: Render, roles: Sequence[str], prompt: bool = False) -> Layout | None:
    try:
        return plain_layout(render, roles, prompt)
    except RowError:
        return None


def _layout_of_call(render: Render, lead: list[str]) -> Layout | None:
    """The layout of a conversation that ends with a tool call; None where the template does not show the call."""
    # Mistral's templates demand an id of nine characters.
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"a": "x"}}}
    messages = [*_letters(lead), {"role": "assistant", "content": "", "tool_calls": [call]}]
    marker = Marker()
    try:
        layout = unmark(render(marker.mark(messages), False), marker.owners)
    except (RowError, Unproven):
        return None
    shown = [slot.message for slot in layout.slots]
    return layout if shown.count(len(lead)) == 2 and shown[-1] == len(lead) else None


def _endings(after_last: str, before_next_user: str, openings: Collection[str], added: re.Pattern[str]) -> list[str]:
    """The token that ends the last answer and, where it is another one, the token that ends an earlier answer."""
    last, earlier = _run(after_last, added), _run(before_next_user, added)
    together = [*takewhile(lambda token: token not in openings, last[: _same(last, earlier)])]
    if together:  # tokens right behind one another that come after every answer: the last of them ends it
        return together[-1:]
    # Where nothing ends a turn, the first token after it begins the next one.
    return last[:1] + [token for token in earlier[:1] if token not in {*openings, *last}]


def _run(text: str, added: re.Pattern[str]) -> list[str]:
    """The first control token of a text, and those that follow with nothing in between."""
    run: list[str] = []
    match = added.search(text)
    while match:
        run.append(match.group())
        match = added.match(text, match.end())
    return run


def _call_endings(call: Layout | None, endings: list[str], added: re.Pattern[str]) -> list[str]:
    """The token that ends a turn with a tool call, where none of `endings` does."""
    tokens: list[str] = added.findall(call.before(-1)) if call else []
    # Parts of a call may have closing tokens of their own; the one that ends the turn comes last.
    return [] if set(endings).intersection(tokens) else tokens[-1:]


def _generation_header(render: Render, lead: list[str], specials: re.Pattern[str]) -> str:
    """What `add_generation_prompt=True` adds after a user's turn, whole control tokens compared as one."""
    prompted = _tail(render, lead)
    if prompted is None:
        return ""
    without, with_prompt = _atoms(_after_user(render, lead), specials), _atoms(prompted, specials)
    return "".join(with_prompt[_same(without, with_prompt) :])


def _after_user(render: Render, lead: list[str]) -> str:
    """The template's text after a user's turn that nothing follows; "" where it refuses such a conversation."""
    ended = _attempt(render, lead)
    return ended.before(-1) if ended else ""


def _tail(render: Render, lead: list[str]) -> str | None:
    """The template's text after the user's in its inference prompt."""
    prompted = _attempt(render, lead, prompt=True)
    return prompted.before(-1) if prompted else None


def _written_header(
    before_answers: Sequence[str], tail: str | None, closings: Sequence[str], specials: re.Pattern[str]
) -> str:
    """The assistant's header of a template that adds none for inference: what stands before every answer, behind the
    end of the user's turn; "" where that is nothing but white space (Mistral) and reasoning tags."""
    first, second = (_atoms(text, specials) for text in before_answers)
    common = first[: _same(first, second)]
    if tail is not None:
        common = common[_same(common, _atoms(tail, specials)) :]
    header = "".join(common)
    for closing in closings:
        header = header.rpartition(closing)[2]
    return header.lstrip() if TAG.sub("", header).strip() else ""


def _fillers(controls: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"\s*(?:{TAG.pattern}|{pattern(controls).pattern}|\Z)")


def _atoms(text: str, specials: re.Pattern[str]) -> list[str]:
    """The text's characters, with each control token in one piece."""
    atoms: list[str] = []
    at = 0
    for match in specials.finditer(text):
        atoms += [*text[at : match.start()], match.group()]
        at = match.end()
    return [*atoms, *text[at:]]


def _same(first: Sequence[str], second: Sequence[str]) -> int:
    """How many leading items are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _headers(header: str, before_assistants: Iterable[str]) -> tuple[str, ...]:
    """The generation header and, where a rendered turn does not show all of it, the part that it shows.

    Some templates end the inference prompt with an opened reasoning block that finished turns don't have.
    """
    headers = {header} if header.strip() else set()
    for text in before_assistants:
        if header not in text:
            shown = next((header[:n] for n in range(len(header), 0, -1) if text.endswith(header[:n])), "")
            headers |= {shown} if any(map(str.isalnum, shown)) else set()
    return tuple(sorted(headers, key=len, reverse=True))


def _common_end(first: list[str], second: list[str], closings: Iterable[str]) -> str:
    """The longest common ending of two texts given as atoms, from after the last token in it that closes a turn."""
    common = "".join(first[len(first) - _same(first[::-1], second[::-1]) :])
    for closing in closings:
        common = common.rpartition(closing)[2]
    return common.lstrip()


def _default_system(with_system: Layout | None, before_user: str, user_header: str, specials: re.Pattern[str]) -> str:
    """The text that stands where a system message would, in a conversation that has none."""
    if with_system is None or not user_header or not with_system.slots or with_system.slots[0].message != 0:
        return ""
    lead = with_system.before(0)
    if not before_user.startswith(lead):
        return ""
    return specials.split(before_user[len(lead) :].removesuffix(user_header))[0].strip()
