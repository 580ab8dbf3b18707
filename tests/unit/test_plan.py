"""The packing plan: every row once, groups apart, saved as plain data."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sft_toolkit.data.orders import ByLength, Curriculum
from sft_toolkit.data.packing import best_fit_decreasing
from sft_toolkit.data.plan import described_bins, plan_packing, plan_parts, to_json
from sft_toolkit.data.preview_bins import in_words, section, shown_bins
from sft_toolkit.errors import ConfigError
from tests.unit.token_rows import token_rows

TOKENS = token_rows(3, 6, 4, 7, sources=["a.jsonl", "b.jsonl", "a.jsonl", "a.jsonl"])


def test_the_plan_is_that_of_best_fit_decreasing() -> None:
    plan = plan_packing(TOKENS, 10)
    assert plan.bins == best_fit_decreasing([3, 6, 4, 7], 10) == [[3, 0], [1, 2]]
    assert plan.fill == 1.0
    assert [plan.tokens_of(0), plan.tokens_of(1)] == [10, 10]


def test_rows_of_different_groups_never_share_a_bin() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 320).tolist()
    tokens, ordering = token_rows(*lengths), Curriculum()
    plan = plan_packing(tokens, 64, ordering)
    assert sorted(row for rows in plan.bins for row in rows) == list(range(320))
    by_length = np.argsort(lengths, kind="stable").tolist()
    bands = [{by_length.index(row) // 20 for row in rows} for rows in plan.bins]
    assert all(len(band) == 1 for band in bands)
    assert all(plan.tokens_of(number) <= 64 for number in range(len(plan.bins)))


def test_an_order_that_makes_no_sense_on_bins_is_refused() -> None:
    with pytest.raises(ConfigError, match="by_length saves padding"):
        plan_packing(TOKENS, 10, ByLength())


def test_parts_are_packed_each_by_itself() -> None:
    plan, bins = plan_parts(TOKENS, 10, [1, 3])
    assert plan.bins == [[0], [3], [1, 2]]
    assert bins == [1, 2]


def test_the_saved_plan_is_plain_data_with_a_bin_a_line() -> None:
    text = to_json(plan_packing(TOKENS, 10), TOKENS)
    assert json.loads(text) == {
        "capacity": 10,
        "rows": 4,
        "tokens": 20,
        "fill": 1.0,
        "sources": ["a.jsonl", "b.jsonl"],
        "bins": [{"tokens": 10, "rows": [[0, 4], [0, 1]]}, {"tokens": 10, "rows": [[1, 2], [0, 3]]}],
    }
    assert '  {"tokens":10,"rows":[[0,4],[0,1]]},\n' in text


def test_bins_are_described_by_source_row_and_tokens() -> None:
    assert list(described_bins(plan_packing(TOKENS, 10), TOKENS, 1)) == [
        {"tokens": 10, "rows": [["a.jsonl", 4, 7], ["a.jsonl", 1, 3]]}
    ]


def test_the_preview_says_how_full_the_bins_are_and_who_shares_one() -> None:
    shown = shown_bins(plan_packing(TOKENS, 12), TOKENS, 5)
    assert in_words(shown) == (
        "Packing: 4 rows in 2 bins of 12 tokens, 83.3 % full; the emptiest holds 9.\n"
        "bin 1: 11 tokens (91.7 %): a.jsonl rows 4 (7), 3 (4)\n"
        "bin 2: 9 tokens (75.0 %): b.jsonl rows 2 (6); a.jsonl rows 1 (3)"
    )


def test_the_page_draws_a_bar_for_each_bin() -> None:
    tokens = token_rows(3, 6, sources=["a<b.jsonl", "b.jsonl"])
    html = section(shown_bins(plan_packing(tokens, 12), tokens, 5))
    assert (
        '<figure><div class="bin"><span style="width:50.00%" title="row 2 of b.jsonl: 6 tokens">2</span>'
        '<span style="width:25.00%" title="row 1 of a&lt;b.jsonl: 3 tokens">1</span></div>'
        "<figcaption>bin 1: 9 tokens (75.0 %), 2 rows</figcaption></figure>"
    ) in html
