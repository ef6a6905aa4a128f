"""SVG pictures that stand on their own, in any renderer."""

from __future__ import annotations

import re

_TEXT = re.compile(
    r'(<text [^>]*?x=")([\d.]+)(" [^>]*?textLength=")([\d.]+)("[^>]*>)([^<]*)(</text>)'
)
_ESCAPE = re.compile(r"&#?\w+;")


def portable(svg: str) -> str:
    """The same picture without a font from the network, and without spaces at a text's edge.

    Renderers outside browsers drop those spaces and move what follows them.
    """
    svg = re.sub(r"@font-face \{[^}]*\}\s*", "", svg)
    svg = svg.replace("font-family: Fira Code, monospace", f"font-family: {_FONTS}")

    def trimmed(found: re.Match[str]) -> str:
        before, x, middle, length, after, text, end = found.groups()
        spaces = text.replace("&#160;", " ")
        size = len(_ESCAPE.sub("?", spaces))
        if not spaces.strip(" ") or not size:
            return ""
        cell = float(length) / size
        lead = len(spaces) - len(spaces.lstrip(" "))
        kept = size - lead - (len(spaces) - len(spaces.rstrip(" ")))
        shown = spaces.strip(" ").replace(" ", "&#160;")
        return f"{before}{float(x) + lead * cell:.1f}{middle}{kept * cell:.1f}{after}{shown}{end}"

    return _TEXT.sub(trimmed, svg)


_FONTS = '"Fira Code", "Cascadia Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace'
