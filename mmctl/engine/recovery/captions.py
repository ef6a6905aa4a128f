"""Do two captions say the same? Decided by the facts in them, not by their words.

N-gram overlap and embedding distance rank a caption with one wrong colour above a right
paraphrase. So the facts are read out of both: which things, how many, of what colour, what is
written, what is left of or above what, and what is denied; then contradictions are listed. The
lexicon covers the canaries and everyday things; words outside it are not judged.
"""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec

_COLOURS = {
    "red": "red crimson scarlet ruby maroon", "blue": "blue navy azure cobalt cyan",
    "green": "green emerald lime olive", "yellow": "yellow golden lemon",
    "purple": "purple violet magenta lilac", "orange": "orange amber tangerine",
    "black": "black ebony", "white": "white ivory", "grey": "grey gray silver",
    "brown": "brown tan beige", "pink": "pink rose",
}  # fmt: skip

_THINGS = {
    "circle": "circle disc disk dot ball round sphere", "square": "square box cube",
    "triangle": "triangle pyramid", "rectangle": "rectangle bar stripe", "star": "star",
    "hexagon": "hexagon", "cross": "cross", "heart": "heart", "arrow": "arrow",
    "half": "half",
    "car": "car automobile sedan vehicle taxi", "truck": "truck lorry",
    "bus": "bus coach", "bicycle": "bicycle bike cycle", "motorcycle": "motorcycle motorbike",
    "train": "train locomotive", "plane": "plane airplane aeroplane aircraft jet",
    "boat": "boat ship sailboat", "dog": "dog puppy hound", "cat": "cat kitten kitty",
    "horse": "horse pony", "cow": "cow bull cattle", "sheep": "sheep lamb", "bird": "bird",
    "person": "person people someone human pedestrian",
    "man": "man men guy gentleman", "woman": "woman women lady",
    "child": "child children kid toddler boy girl", "tree": "tree", "flower": "flower blossom",
    "house": "house home building", "street": "street road", "table": "table desk",
    "chair": "chair seat", "sofa": "sofa couch", "bed": "bed", "bottle": "bottle", "cup": "cup mug",
    "apple": "apple", "banana": "banana", "pizza": "pizza", "cake": "cake", "book": "book",
    "phone": "phone telephone smartphone", "laptop": "laptop notebook computer",
    "umbrella": "umbrella parasol", "hat": "hat cap", "bag": "bag handbag", "clock": "clock watch",
    "background": "background backdrop canvas", "digit": "digit number numeral figure",
    "word": "word letter letters lettering text sign writing",
}  # fmt: skip

_NUMBERS = {
    word: number
    for number, words in enumerate(
        ["zero", "one single lone", "two pair couple both", "three trio", "four", "five", "six",
         "seven", "eight", "nine", "ten", "eleven", "twelve dozen"]
    )
    for word in words.split()
}  # fmt: skip

_RELATIONS = {
    "left": ("left", False), "right": ("left", True),
    "above": ("above", False), "over": ("above", False), "atop": ("above", False),
    "below": ("above", True), "under": ("above", True), "underneath": ("above", True),
    "beneath": ("above", True),
}  # fmt: skip
_NEGATIONS = {"no", "not", "without", "never", "nor", "neither", "none", "lacks", "lacking"}
_BREAKS = {"but", "while", "whereas", ".", ";"}
_SCENERY = {"background", "digit", "word"}

_COLOUR_OF = {word: name for name, words in _COLOURS.items() for word in words.split()}
_THING_OF = {word: name for name, words in _THINGS.items() for word in words.split()}
_TOKEN = re.compile(r"\"[^\"]+\"|“[^”]+”|'[A-Za-z0-9 ]+'(?![a-z])|[A-Za-z]+(?:n't)?|\d+|[.,;]")


class Phrase(msgspec.Struct):
    """A thing as one phrase of a caption names it."""

    thing: str
    colours: frozenset[str] = frozenset()
    count: int | None = None
    denied: bool = False
    not_colours: frozenset[str] = frozenset()


class Facts(msgspec.Struct, frozen=True):
    """What a caption says: things, what is written, and (relation, a, b): a left of or above b."""

    phrases: tuple[Phrase, ...]
    written: frozenset[str]
    relations: frozenset[tuple[str, str, str]]

    def things(self) -> set[str]:
        """The things that are said to be there, scenery apart."""
        return {p.thing for p in self.phrases if not p.denied} - _SCENERY

    def colours(self, thing: str) -> set[str]:
        """The colours ``thing`` is said to have."""
        found = (p.colours for p in self.phrases if p.thing == thing and not p.denied)
        return {colour for colours in found for colour in colours}

    def count(self, thing: str, colour: str | None = None) -> int | None:
        """How many of ``thing`` there are said to be; absent where no number is named."""
        counts = [
            p.count
            for p in self.phrases
            if p.thing == thing and not p.denied and (colour is None or colour in p.colours)
        ]
        named = [count for count in counts if count is not None]
        return sum(named) if named else None


class _Pending:
    """Modifiers that wait for their noun."""

    def __init__(self) -> None:
        self.count: int | None = None
        self.article = False
        self.colours: set[str] = set()
        self.not_colours: set[str] = set()
        self.denied = False

    @property
    def empty(self) -> bool:
        return self.count is None and not self.colours and not self.not_colours


def facts(caption: str) -> Facts:
    """The facts of ``caption``, by one pass over its words."""
    phrases: list[Phrase] = []
    written: set[str] = set()
    relations: set[tuple[str, str, str]] = set()
    waiting: list[_Pending] = []
    now = _Pending()
    relation: tuple[str, bool, str] | None = None
    tokens = _TOKEN.findall(caption)
    shouting = caption.isupper()
    for place, token in enumerate(tokens):
        word = token.lower()
        following = tokens[place + 1].lower() if place + 1 < len(tokens) else ""
        thing = _thing(word)
        if token[0] in "\"“'" or (token.isupper() and len(token) > 1 and not shouting):
            written.add(token.strip("\"“”'").lower())
        elif _names_text(phrases, now, word, following):
            written.add(str(_number(word)))
            now = _Pending()
        elif word in _NEGATIONS or word.endswith("n't"):
            now.denied = True
        elif word in ("a", "an"):
            now.article = True
        elif word in _COLOUR_OF and not (thing and following in ("", ".", "on")):
            (now.not_colours if now.denied else now.colours).add(_COLOUR_OF[word])
        elif (number := _number(word)) is not None:
            now.count = number
        elif word in _RELATIONS and phrases:
            _settle(phrases, [*waiting, now])
            waiting, now = [], _Pending()
            name, turned = _RELATIONS[word]
            relation = (name, turned, phrases[-1].thing)
        elif thing:
            modifiers = [*waiting, now]
            phrases += [_phrase(thing, pending, plural=_plural(word)) for pending in modifiers]
            if relation:
                name, turned, other = relation
                relations.add((name, thing, other) if turned else (name, other, thing))
                relation = None
            waiting, now = [], _Pending()
        elif word in ("and", ","):
            if not now.empty and (now.count is not None or now.article):
                waiting.append(now)
                now = _Pending()
        elif word in _BREAKS:
            _settle(phrases, [*waiting, now])
            waiting, now, relation = [], _Pending(), None
    _settle(phrases, [*waiting, now])
    return Facts(tuple(phrases), frozenset(written), frozenset(relations))


def _number(word: str) -> int | None:
    return int(word[:9]) if word.isdigit() else _NUMBERS.get(word)


def _plural(word: str) -> bool:
    return word.endswith("s") or word in ("people", "men", "women", "children", "cattle")


def _thing(word: str) -> str | None:
    for form in (word, word.removesuffix("s"), word.removesuffix("es"), word[:-3] + "y"):
        if form in _THING_OF:
            return _THING_OF[form]
    return "half" if word == "halves" else None


def _names_text(phrases: list[Phrase], now: _Pending, word: str, following: str) -> bool:
    """Is this number something written (the digit 7, a black 7), and not a count?"""
    if _number(word) is None:
        return False
    if phrases and phrases[-1].thing in ("digit", "word") and now.empty:
        return True
    counts = _thing(following) or following in _COLOUR_OF or following in ("of", "and")
    return word.isdigit() and now.article and not counts


def _phrase(thing: str, pending: _Pending, plural: bool) -> Phrase:
    count = pending.count
    if count is None and pending.article and not plural:
        count = 1
    # "a circle that is not red" denies the colour, "no red circle" the circle.
    denied = pending.denied and not (pending.not_colours and pending.article)
    colours = pending.colours | (pending.not_colours if denied else set())
    return Phrase(
        thing, frozenset(colours), count, denied or count == 0,
        frozenset() if denied else frozenset(pending.not_colours),
    )  # fmt: skip


def _settle(phrases: list[Phrase], pending: list[_Pending]) -> None:
    """Modifiers after their noun ("the squares are green") belong to the last thing named."""
    if not phrases:
        return
    last = next((p for p in reversed(phrases) if p.thing not in _SCENERY), phrases[-1])
    for extra in pending:
        last.colours |= extra.colours
        last.not_colours |= extra.not_colours
        if extra.count is not None and last.count is None:
            last.count = extra.count


def contradictions(golden: str, candidate: str) -> list[str]:
    """Where ``candidate`` says something else than ``golden``, in words; empty where nowhere."""
    a, b = facts(golden), facts(candidate)
    found: list[str] = []
    # "the letters spell cat" reads CAT and names no cat.
    words = [token.lower() for token in _TOKEN.findall(candidate)]
    read = b.written | (a.written & {*words, *(str(_number(word)) for word in words)})
    ours, theirs = a.things(), b.things() - {_THING_OF.get(text, text) for text in read}
    if a.phrases or a.written:
        found += [f"names a {thing}" for thing in sorted(theirs - ours)]
        omitted = sorted(ours - theirs)
        if omitted and (omitted == sorted(ours) or _stranger(golden, words)):
            found.append(f"says nothing of a {', '.join(omitted)}")
    for thing in sorted(ours | _SCENERY):
        for phrase in b.phrases:
            if phrase.thing == thing and phrase.denied and thing in ours:
                if not phrase.colours or phrase.colours & a.colours(thing):
                    found.append(f"denies a {thing}")
            elif phrase.thing == thing and phrase.not_colours & a.colours(thing):
                found.append(f"denies the colour of the {thing}")
        found += _other_colours(a, b, thing) + _other_counts(a, b, thing)
    for phrase in a.phrases:
        if phrase.denied and phrase.thing in theirs and phrase.thing not in ours:
            found.append(f"affirms a {phrase.thing}")
    if a.written and not a.written & read:
        found.append(f"does not read '{', '.join(sorted(a.written))}'")
    for name, first, second in sorted(b.relations):
        if first != second and (name, second, first) in a.relations:
            found.append(f"puts the {first} {name} of the {second}")
    return list(dict.fromkeys(found))


def _stranger(golden: str, words: list[str]) -> bool:
    """Does a caption of ``words`` name something that neither ``golden`` nor the lexicon knows?"""
    known = {token.lower() for token in _TOKEN.findall(golden)}
    return any(
        (before in ("a", "an") or before in _COLOUR_OF or _number(before) is not None)
        and word not in known and word.isalpha() and not _thing(word) and word not in _COLOUR_OF
        and _number(word) is None
        for before, word in pairwise(words)
    )  # fmt: skip


def _other_colours(a: Facts, b: Facts, thing: str) -> list[str]:
    ours, theirs = a.colours(thing), b.colours(thing)
    return [f"says {colour} {thing}" for colour in sorted(theirs - ours)] if ours else []


def _other_counts(a: Facts, b: Facts, thing: str) -> list[str]:
    if thing in _SCENERY:
        return []
    for colour in (None, *sorted(a.colours(thing) & b.colours(thing))):
        ours, theirs = a.count(thing, colour), b.count(thing, colour)
        if ours is not None and theirs is not None and ours != theirs:
            return [f"counts {theirs} {colour + ' ' if colour else ''}{thing}"]
    return []


def closed_answer(text: str) -> str | None:
    """The one colour, number, thing or yes/no that a short answer names; absent if not one.

    "It is red." and "Red" are one answer, "red or blue" is none.
    """
    words = [token.lower() for token in _TOKEN.findall(text)]
    found: set[str] = set()
    for word in words:
        number = _number(word)
        if word in ("yes", "no"):
            found.add(word)
        elif word in _COLOUR_OF:
            found.add(_COLOUR_OF[word])
        elif number is not None:
            found.add(str(number))
        elif (thing := _thing(word)) and thing not in _SCENERY:
            found.add(thing)
        elif word in _NEGATIONS or word.endswith("n't"):
            return None
    return found.pop() if len(found) == 1 else None
