from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_page_says_what_the_command_line_says() -> None:
    pytest.importorskip("click_man", reason="click-man is not installed")
    spec = importlib.util.spec_from_file_location("manual", ROOT / "tests" / "manual.py")
    assert spec is not None and spec.loader is not None
    manual = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(manual)
    made = dict(manual.pages())
    folder = ROOT / "man"
    kept = {str(path.relative_to(folder)): path.read_text() for path in folder.glob("man*/*")}
    for name, page in made.items():
        example = page.partition(".SH EXAMPLES\n")[2].partition("\n.fi\n")[0]
        shown = [line.replace("\\-", "-") for line in example.splitlines()]
        assert not [line for line in shown if len(line) > 73], f"{name}: wider than a page"
    stale = {name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name)}
    assert not stale, "run: python tests/manual.py"
