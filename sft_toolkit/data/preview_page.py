"""The preview as one HTML file: no script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from transformers import PreTrainedTokenizerBase

from sft_toolkit.data import preview_bins
from sft_toolkit.data.preview import LINE_END, STOPS, Piece, pieces, readable, title

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #66707f;
        --line: #dfe3e9; --learn: #d3f2dc; --learn-text: #0b5a2a; --pill: #e8ebf0;
        --doubt: #c2410c; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161c; --card: #1a2029; --text: #e3e8ef; --soft: #8f9bab;
          --line: #2b3440; --learn: #123d25; --learn-text: #9fe8b8; --pill: #2b3440;
          --doubt: #fb923c; } }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1rem 4rem; background: var(--page); color: var(--text);
       font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; }
.verdict { margin: 0 0 1rem; padding: .6rem 1rem; background: var(--card); border: 1px solid var(--line);
           border-left: 4px solid var(--learn-text); border-radius: 6px; }
.doubt { border-left-color: var(--doubt); }
.legend { color: var(--soft); font-size: .9rem; margin-bottom: 1.5rem; }
.legend span { margin-right: 1rem; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin-bottom: 1.25rem;
          overflow: hidden; }
h2 { font-size: .85rem; font-weight: 600; margin: 0; padding: .6rem 1rem; color: var(--soft);
     border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
pre { margin: 0; padding: 1rem; font: .88rem/1.7 ui-monospace, monospace; white-space: pre-wrap;
      overflow-wrap: anywhere; color: var(--soft); }
i, small { font-style: normal; opacity: .45; user-select: none; }
small { opacity: .8; margin-right: .2em; }
.learn { background: var(--learn); color: var(--learn-text); border-radius: 3px; padding: .12em 0; }
.light { background: color-mix(in srgb, var(--learn) 45%, transparent); border-bottom: 2px dotted; }
.heavy { border-bottom: 2px solid; }
.special { border: 1px solid var(--line); background: var(--pill); border-radius: 4px; padding: 0 .25em;
           font-size: .92em; }
.special.learn { background: var(--learn); border-color: currentColor; }
"""

_LEGEND = (
    '<div class="legend"><span><span class="learn">learned</span></span><span>read, not learned</span>'
    '<span><span class="special">control token</span></span><span><i>↵</i> line end</span>'
    "<span><small>0.5×</small> weight of what follows</span>hover: positions in the row</div>"
)


def page(
    shown: Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    verdict: str,
    bins: preview_bins.BinsShown | None = None,
) -> str:
    """A page of rows from `preview.records`; `verdict` is the sentence of `preview.stopping`."""
    articles = "\n".join(_article(record, tokenizer) for record in shown)
    packing = "" if bins is None else preview_bins.section(bins)
    doubt = "" if verdict.startswith(STOPS) else " doubt"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>What is trained</title>\n<style>{_STYLE}{preview_bins.STYLE}</style>\n</head>\n"
        "<body>\n<h1>What is trained</h1>\n"
        f'<p class="verdict{doubt}">{escape(verdict)}</p>\n{_LEGEND}\n{articles}\n{packing}</body>\n</html>\n'
    )


def _article(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    shown = pieces(record, tokenizer)
    before = [1.0, *(piece.weight for piece in shown)]
    text = "".join(_span(piece, piece.weight != weight) for piece, weight in zip(shown, before, strict=False))
    # A line end right behind <pre> is dropped by browsers, so the first one of the text has to be the second.
    return f"<article><h2>{escape(title(record))}</h2><pre>\n{text}</pre></article>"


def _span(piece: Piece, is_other_weight: bool) -> str:
    classes = [name for name, on in (("learn", piece.supervised), ("special", piece.special)) if on]
    place = f"tokens {piece.start} to {piece.stop - 1}" if piece.stop - piece.start > 1 else f"token {piece.start}"
    if piece.supervised and piece.weight != 1.0:
        place += f", weight {piece.weight:g}"
        classes.append("light" if piece.weight < 1.0 else "heavy")
    shown = f"<small>{piece.weight:g}×</small>" if is_other_weight and piece.weight != 1.0 else ""
    marked = f' class="{" ".join(classes)}"' if classes else ""
    text = escape(readable(piece.text)).replace("\n", f"<i>{LINE_END}</i>\n")
    return f'<span{marked} title="{place}">{shown}{text}</span>'
