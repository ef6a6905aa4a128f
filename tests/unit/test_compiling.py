"""Machine code kept per state of its sources; needs numba (the extra 'fast')."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmctl.engine import compiling


def test_a_changed_source_gets_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "code"))
    called, caller = tmp_path / "called.py", tmp_path / "caller.py"
    called.write_text("ONE = 1\n")
    caller.write_text("from called import ONE\n")
    before = compiling.folder([called, caller])
    assert before == compiling.folder([caller, called])
    called.write_text("ONE = 2\n")
    assert compiling.folder([called, caller]) != before
    assert before.parent == tmp_path / "code"


def test_code_is_kept_where_it_was_asked_for(tmp_path: Path) -> None:
    if not compiling.available():
        pytest.skip("numba (the extra 'fast') is not installed")
    scope: dict[str, object] = {}
    source = tmp_path / "doubled.py"
    source.write_text("def doubled(x):\n    return 2 * x\n")
    exec(compile(source.read_text(), source, "exec"), scope)
    place = tmp_path / "code"
    with compiling.into(place) as numba:
        before = numba.config.CACHE_DIR
        doubled = numba.njit(cache=True)(scope["doubled"])
    assert numba.config.CACHE_DIR != before == str(place)
    assert doubled(21) == 42
    assert compiling.kept(place, "doubled.doubled")
    assert not compiling.kept(place, "doubled.tripled")
