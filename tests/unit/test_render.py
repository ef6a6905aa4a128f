"""Tables: quantities to the right, and narrower on a narrow terminal."""

from __future__ import annotations

import os
import sys

import pytest

from mmctl.cli.render import to_table, width

ROWS = [
    {"name": "a100-pcie-pairs", "first token p99": "376 ms", "about": "boards in pairs " * 5},
    {"name": "cpu", "first token p99": "4.01 s", "about": "no accelerator"},
]


def test_quantities_stand_to_the_right() -> None:
    head, first, second = to_table(ROWS).splitlines()
    at = head.index("first token p99") + len("first token p99")
    assert first[:at].endswith("376 ms") and second[:at].endswith("4.01 s")


@pytest.mark.parametrize("columns", [120, 80, 60])
def test_texts_and_headings_go_on_below_where_the_terminal_is_narrow(monkeypatch, columns) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(
        "shutil.get_terminal_size", lambda fallback=(80, 24): os.terminal_size((columns, 24))
    )
    lines = to_table(ROWS).splitlines()
    assert max(map(width, lines)) <= columns
    words = [word for row in ROWS for word in row["about"].split()]
    assert sorted(" ".join(lines).split()).count("pairs") == words.count("pairs")


def test_a_pipe_gets_each_row_in_one_line() -> None:
    assert len(to_table(ROWS).splitlines()) == 3
