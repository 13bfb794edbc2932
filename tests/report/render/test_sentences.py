"""Sentences in HTML: commands are code, and numbers stay with their units."""

from __future__ import annotations

import re

import pytest

from stagewright.report.render.html import render_macro, sentence_html
from stagewright.table import Column, Table


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("took 44 % of the time", "took 44\u00a0% of the time"),
        ("1.44 × over one device", "1.44\u00a0× over one device"),
        ("75.6 ± 9.0 in 3 steps", "75.6\u00a0±\u00a09.0 in 3 steps"),
        ("4.28 MiB at 7.67 Gb/s", "4.28\u00a0MiB at 7.67\u00a0Gb/s"),
        ("2 seeds of 3", "2 seeds of 3"),
        ("<b> & 3 %", "&lt;b&gt; &amp; 3\u00a0%"),
    ],
)
def test_a_number_stays_with_its_unit(text: str, html: str) -> None:
    assert sentence_html(text) == html


def test_commands_are_code_whose_words_are_not_broken() -> None:
    html = sentence_html("This studies more: stagewright study strategies --workers 2,4 --quick")
    code = "".join(f'<span class="word">{word}</span> ' for word in html.striptags().split(": ")[1].split())
    assert html == f"This studies more: <code>{code.strip()}</code>"
    run = sentence_html("Diagnose your network: stagewright fabric run. Slow link: replace it (--restart).")
    assert re.sub("</?span[^>]*>", "", run) == (
        "Diagnose your network: <code>stagewright fabric run</code>. Slow link: replace it (<code>--restart</code>)."
    )
    assert sentence_html("Stagewright's codecs, a well-known link").startswith("Stagewright&#39;s codecs")


def test_a_card_and_a_note_are_written_so() -> None:
    assert "44\u00a0%" in render_macro("note", "44 %")


def test_short_cells_of_tables_are_not_broken() -> None:
    table = Table(title="All", columns=(Column("a"), Column("b")), rows=(("mlp-mnist", "a text of some more words"),))
    html = render_macro("table", table)
    assert 'short">mlp-mnist</td>' in html
    assert html.count(" short") == 1


def test_names_of_columns_may_be_broken_at_dots() -> None:
    table = Table(title="", columns=(Column("optimizer.learning_rate"), Column("a & b")), rows=(("1", "2"),))
    html = render_macro("table", table)
    assert "<th>optimizer.<wbr>learning_<wbr>rate</th><th>a &amp; b</th>" in html
