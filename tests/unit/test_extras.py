"""Every message about a missing extra names one that the package has, quoted for any shell."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import pytest

from mmctl.engine.errors import MissingExtraError
from mmctl.engine.sources.doctor import EXTRAS

ROOT = Path(__file__).parents[2]


def _named() -> list[tuple[str, str]]:
    """Where an extra is named in the source, and its name; each word of a table or a loop too."""
    found = []
    for path in sorted((ROOT / "mmctl").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "MissingExtraError":
                continue
            extra = node.args[1]
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            if isinstance(extra, ast.Constant):
                found.append((where, extra.value))
            else:
                name = ast.unparse(extra).partition("[")[0]
                found += [(where, word) for word in _words(tree, name)]
    return found


def _words(tree: ast.AST, name: str) -> list[str]:
    """The values of a table of this name, or what a loop gives to its last target of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            if isinstance(node.value, ast.IfExp):
                return [ast.literal_eval(one) for one in (node.value.body, node.value.orelse)]
            return [str(ast.literal_eval(value)) for value in node.value.values]  # type: ignore[attr-defined]
        if isinstance(node, ast.For) and name in ast.unparse(node.target):
            return [row[-1] for row in ast.literal_eval(node.iter)]
    raise AssertionError(f"{name} is neither a table nor a loop")


@pytest.mark.parametrize(("where", "extra"), _named())
def test_the_extra_is_one_of_the_package(where: str, extra: str) -> None:
    assert extra in EXTRAS, where


def test_the_command_is_quoted_for_any_shell() -> None:
    message = str(MissingExtraError("breaker guard", "guard"))
    assert message == "breaker guard needs the extra 'guard': pip install 'mmctl[guard]'"
    assert shlex.split(message.partition(": ")[2]) == ["pip", "install", "mmctl[guard]"]
