"""Tables: quantities to the right, and narrower on a narrow terminal."""

from __future__ import annotations

import os
import sys

import pytest

from mmctl.cli.render import hanging, to_table, width

ROWS = [
    {"name": "a100-pcie-pairs", "first token p99": "376 ms", "about": "boards in pairs " * 5},
    {"name": "cpu", "first token p99": "4.01 s", "about": "no accelerator"},
]


def test_quantities_stand_to_the_right() -> None:
    head, first, second = to_table(ROWS).splitlines()
    at = head.index("first token p99") + len("first token p99")
    assert first[:at].endswith("376 ms") and second[:at].endswith("4.01 s")


def _terminal(monkeypatch, columns: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(
        "shutil.get_terminal_size", lambda fallback=(80, 24): os.terminal_size((columns, 24))
    )


@pytest.mark.parametrize("columns", [120, 80, 60])
def test_texts_and_headings_go_on_below_where_the_terminal_is_narrow(monkeypatch, columns) -> None:
    _terminal(monkeypatch, columns)
    lines = to_table(ROWS).splitlines()
    assert max(map(width, lines)) <= columns
    words = [word for row in ROWS for word in row["about"].split()]
    assert sorted(" ".join(lines).split()).count("pairs") == words.count("pairs")


def test_a_pipe_gets_each_row_in_one_line() -> None:
    assert len(to_table(ROWS).splitlines()) == 3


@pytest.mark.parametrize("columns", [200, 80, 40])
def test_figures_that_do_not_fit_stand_in_a_further_table(monkeypatch, columns) -> None:
    _terminal(monkeypatch, columns)
    row = {"policy": "perception"} | {f"figure {i}": 1000 + i for i in range(20)}
    lines = to_table([row, row]).splitlines()
    assert max(map(width, lines)) <= columns
    tables = "\n".join(lines).split("\n\n")
    assert all(table.splitlines()[-1].startswith("perception") for table in tables)
    shown = [word for table in tables for word in table.splitlines()[-1].split()[1:]]
    assert shown == [str(1000 + i) for i in range(20)]


def test_a_word_that_is_too_long_is_parted_behind_a_mark(monkeypatch) -> None:
    _terminal(monkeypatch, 40)
    shown = to_table([{"key": "breaker.rules.driver_action.max_age", "value": "x" * 60}])
    assert "breaker.rules." in [line.split()[0] for line in shown.splitlines()]


def test_a_line_goes_on_behind_its_indent(monkeypatch) -> None:
    _terminal(monkeypatch, 40)
    first, *rest = hanging("ok       " + "word " * 20, 9).splitlines()
    assert rest and all(line.startswith(" " * 9 + "word") for line in rest)
    assert max(map(width, [first, *rest])) <= 40
