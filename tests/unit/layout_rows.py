"""One row through one layout, for tests."""

from __future__ import annotations

from typing import Any

import pytest

from sft_toolkit.data.conversation import RowError
from sft_toolkit.data.formats import to_example
from sft_toolkit.data.sources import RawRow


def example(format: str, row: dict[str, Any], **maps: dict[str, str]) -> Any:
    """The row as an example; `columns` and `roles` as in a source."""
    return to_example(RawRow("a.jsonl", 1, row), format, maps.get("columns"), maps.get("roles"))


def reason(format: str, row: dict[str, Any], **maps: dict[str, str]) -> str:
    """Why the row is refused."""
    with pytest.raises(RowError) as caught:
        example(format, row, **maps)
    return str(caught.value)
