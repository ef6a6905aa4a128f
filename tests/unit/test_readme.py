"""What the README says of the project's own files and tables is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmctl.engine.sources import SCHEMES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"(?<![\w./])((?:mmctl|tests|profiles)/[\w./]+\w)", README)))


@pytest.mark.parametrize("path", [path for path in NAMED if "NAME" not in path])
def test_a_file_that_is_named_is_there(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_source_has_a_row_on_what_it_needs(scheme: str) -> None:
    rows = re.findall(r"^\| `(\w+)\S*` \|", README, re.MULTILINE)
    told = f"'Who must be asked for what' in README.md has no row for {scheme}:"
    assert {"https": "http"}.get(scheme, scheme) in rows, told
