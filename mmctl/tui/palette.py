"""Roles to styles: the themes. Hues are told apart with any colour vision, and none carries a
meaning alone: every modality, level and state has its own character or word beside it.
"""

from __future__ import annotations

from typing import NamedTuple

from rich.style import Style
from textual.theme import Theme

HEAT_LEVELS = 9  # nothing, then eight steps; "heat0" … "heat8"


class Palette(NamedTuple):
    """The colours of one theme; ``heat`` runs from little to much in even steps of lightness."""

    dark: bool
    background: str
    raised: str
    border: str
    foreground: str
    dim: str
    accent: str
    vision: str
    text: str
    other: str
    free: str
    good: str
    warn: str
    bad: str
    held: str
    heat: tuple[str, ...]


PALETTES: dict[str, Palette] = {
    "calm": Palette(
        dark=True, background="#12161c", raised="#1b212a", border="#36404d", foreground="#cdd5df",
        dim="#808b99", accent="#7fb4e6", vision="#e8a33d", text="#5aaee8", other="#9aa4b5",
        free="#56616f", good="#46b892", warn="#e6c84f", bad="#f2745f", held="#d18bb8",
        heat=("#4a4f5e", "#4b3a78", "#75358a", "#a0397f", "#c8456b", "#e65f4f", "#f58a3c",
              "#f9b945", "#f7e586"),
    ),
    "light": Palette(
        dark=False, background="#fbfbf8", raised="#eeeee8", border="#b9bcb6", foreground="#24292f",
        dim="#69707a", accent="#0a5fa8", vision="#a65f00", text="#0068a8", other="#5d6673",
        free="#a2a9b2", good="#0b7a57", warn="#8a6d00", bad="#b83218", held="#963a78",
        heat=("#b5b9c0", "#f2e2ac", "#eec36f", "#e69b4b", "#d9713f", "#bf4a46", "#952f58",
              "#651f60", "#35134f"),
    ),
    "contrast": Palette(
        dark=True, background="#000000", raised="#000000", border="#ffffff", foreground="#ffffff",
        dim="#d0d0d0", accent="#66d9ff", vision="#ffb000", text="#66c2ff", other="#e0e0e0",
        free="#a0a0a0", good="#4dffb8", warn="#ffff4d", bad="#ff7a66", held="#ff99e0",
        heat=("#9a9a9a", "#7a5cff", "#b04dff", "#e64dff", "#ff4db8", "#ff5c5c", "#ff8f1f",
              "#ffc21f", "#ffffff"),
    ),
    # The sixteen colours of a plain terminal, as they are: nothing has to be approximated.
    "sixteen": Palette(
        dark=True, background="#000000", raised="#000000", border="#555555", foreground="#aaaaaa",
        dim="#aaaaaa", accent="#55ffff", vision="#ffff55", text="#55ffff", other="#aaaaaa",
        free="#555555", good="#55ff55", warn="#ffff55", bad="#ff5555", held="#ff55ff",
        heat=("#555555", "#5555ff", "#5555ff", "#aa00aa", "#aa00aa", "#ff5555", "#ff5555",
              "#ffff55", "#ffff55"),
    ),
}  # fmt: skip
THEMES = tuple(PALETTES)


def theme(name: str) -> Theme:
    """Textual's theme for a palette; its variables are the ones that ``top.tcss`` names."""
    p = PALETTES[name]
    return Theme(
        name=name, primary=p.accent, secondary=p.text, accent=p.vision, warning=p.warn,
        error=p.bad, success=p.good, foreground=p.foreground, background=p.background,
        surface=p.background, panel=p.raised, dark=p.dark,
        variables={"line": p.border, "quiet": p.dim, "border-blurred": p.border},
    )  # fmt: skip


def styles(name: str, *, raised: bool = False) -> dict[str, Style]:
    """Every role's style in a theme; a role that is not named is plain text.

    ``raised`` puts them on the ground of the title and key bars.
    """
    p = PALETTES[name]
    ground = p.raised if raised else p.background

    def ink(color: str, bold: bool | None = None) -> Style:
        return Style(color=color, bgcolor=ground, bold=bold)

    found = {
        "": ink(p.foreground),
        "strong": ink(p.foreground, bold=True),
        "dim": ink(p.dim),
        "line": ink(p.border),
        "accent": ink(p.accent),
        "key": ink(p.accent, bold=True),
        "vision": ink(p.vision),
        "text": ink(p.text),
        "other": ink(p.other),
        "free": ink(p.free),
        "unusable": ink(p.bad),
        "good": ink(p.good),
        "warn": ink(p.warn),
        "bad": ink(p.bad),
        "held": ink(p.held),
        "good_strong": ink(p.good, bold=True),
        "warn_strong": ink(p.warn, bold=True),
        "bad_strong": ink(p.bad, bold=True),
        "held_strong": ink(p.held, bold=True),
        "accent_strong": ink(p.accent, bold=True),
        "dim_strong": ink(p.dim, bold=True),
        "cursor": Style(color=p.background, bgcolor=p.accent, bold=True),
    }
    found["heat0"] = ink(p.heat[0])
    for i, color in enumerate(p.heat[1:], 1):
        # Of sixteen colours none is between two others: there the character alone is drawn.
        solid = Style(color=_glyph_on(color), bgcolor=color)
        found[f"heat{i}"] = ink(color) if name == "sixteen" else solid
    return found


def _glyph_on(color: str) -> str:
    """A glyph's colour on a cell: dark on light cells, light on dark ones, never loud."""
    cell = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    lightness = (0.3 * cell[0] + 0.59 * cell[1] + 0.11 * cell[2]) / 255
    goal = 0 if lightness > 0.45 else 255
    return "#" + "".join(f"{round(c + 0.16 * (goal - c)):02x}" for c in cell)
