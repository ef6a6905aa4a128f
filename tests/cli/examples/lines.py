"""The examples of the command line, as its own help prints them."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from importlib import import_module

from mmctl.cli.commands import EXAMPLES, TREE, Branch, Leaf

Path = tuple[str, ...]


def examples() -> list[str]:
    """Every example of every help text once, lines that go on joined, remarks left out."""
    found = list(lines(EXAMPLES))
    for entry in TREE.values():
        if isinstance(entry, Branch):
            found += lines(entry.examples)
    for _, leaf in leaves():
        found += lines(_docstring(leaf).partition("Examples:\n")[2])
    return list(dict.fromkeys(found))


def leaves() -> Iterator[tuple[Path, Leaf]]:
    """Each command by its path in the tree."""
    for name, entry in TREE.items():
        if isinstance(entry, Leaf):
            yield (name,), entry
        else:
            yield from (((name, below), leaf) for below, leaf in entry.commands.items())


def calls(line: str) -> Iterator[tuple[Path, list[str]]]:
    """Each call of mmctl in a line: the command's path in the tree, and the words behind it."""
    words = list(shlex.shlex(line, punctuation_chars=True, posix=True))
    while "mmctl" in words:
        words = words[words.index("mmctl") + 1 :]
        end = next((i for i, word in enumerate(words) if word in ("|", "<", ">", ";", "&&")), None)
        name, *rest = words[:end]
        entry = TREE[name]
        if isinstance(entry, Leaf):
            yield (name,), rest
        elif rest and rest[0] in entry.commands:
            yield (name, rest[0]), rest[1:]
        else:
            assert entry.default is not None, line
            yield (name, entry.default), rest


def _docstring(leaf: Leaf) -> str:
    module, function = leaf.target.split(":")
    text = inspect.getdoc(getattr(import_module(f"mmctl.cli.{module}"), function))
    assert text is not None
    return text


def lines(block: str) -> Iterator[str]:
    """The lines of a block to its first empty one, those that go on joined, without remarks."""
    joined = re.sub(r"\\\n\s*", "", block.strip("\n").split("\n\n")[0])
    for line in joined.splitlines():
        # A remark stands behind two spaces or, on a line of its own, far to the right.
        if line.strip() and not line.startswith(" " * 8):
            yield re.split(r"\s{2,}", line.strip())[0]
