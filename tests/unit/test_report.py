"""The counts behind the data report, and how they are said."""

from __future__ import annotations

from sft_toolkit.data.report import Tally, describe, nothing_left, total


def tally() -> Tally:
    result = Tally(rows_read=4, rows_truncated=1)
    result.keep(10, 4)
    result.keep(1200, 300)
    for number in (3, 4):
        result.drop("too_long", f"a.jsonl, line {number}")
    result.warn("a remark", ["a.jsonl, line 1"])
    return result


def test_sums_name_the_first_three_rows_of_each_kind() -> None:
    summed = total([tally(), tally()])
    assert summed.as_dict() == {
        "rows_read": 8,
        "rows_kept": 4,
        "rows_dropped": {"too_long": 4},
        "rows_truncated": 2,
        "tokens": 2420,
        "supervised_tokens": 608,
        "longest": 1200,
        "warnings": {
            "too_long": {"count": 4, "rows": ["a.jsonl, line 3", "a.jsonl, line 4", "a.jsonl, line 3"]},
            "a remark": {"count": 2, "rows": ["a.jsonl, line 1", "a.jsonl, line 1"]},
        },
    }
    assert Tally(**summed.as_dict()) == summed


def test_a_sum_leaves_its_parts_alone() -> None:
    part = tally()
    total([part, part])
    assert part == tally()


def test_the_summary_says_what_was_kept_and_why_rows_went() -> None:
    assert describe("a.jsonl", tally()) == (
        "a.jsonl: 2 of 4 rows kept, 1,210 tokens, 304 of them supervised (25 %), longest 1,200, 1 cut to max_length\n"
        "  dropped, too_long: 2 rows, first a.jsonl, line 3; a.jsonl, line 4\n"
        "  a remark: 1 rows, first a.jsonl, line 1"
    )


def test_nothing_left_says_why() -> None:
    assert nothing_left("data.train", Tally()) == "data.train: there are no rows"
    empty = Tally(rows_read=2)
    for number in (1, 2):
        empty.drop("bad_row", f"a.jsonl, line {number}")
    assert nothing_left("data.train", empty) == (
        "data.train: no row is left to train on, 2 were read. Dropped: bad_row: 2 (first: a.jsonl, line 1)"
    )
