"""What the rooms know of a profile's values: names, patterns and expressions, beside their kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mmctl.cli.app import note
from mmctl.engine import layers, profiles
from mmctl.engine.errors import UsageError
from mmctl.engine.layers import Origin, Problem


def loaded(name: str | None) -> profiles.Loaded:
    """A profile to decide by: responses that nobody knows are refused, strange variables said."""
    from mmctl.engine.breaker.reload import check

    found = profiles.load(name)
    check(found.profile)
    notes(found.written)
    return found


def notes(written: dict[str, Any]) -> None:
    """Say which variables look like ours and set nothing."""
    for said in layers.unread_variables(written):
        note(said)


def problems(name: str) -> list[Problem]:
    """All problems of a profile at once, whatever else is wrong with it."""
    written, origins = profiles.written(name)
    found = profiles.check(name)[1]
    for key, check in _CHECKS.items():
        table, _, field = key.partition(".")
        content = written.get(table)
        value = content.get(field) if isinstance(content, dict) else None
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and (said := _said(check, item)):
                found.append(
                    Problem(key, said.removeprefix(f"{key}: "), origins.get(key) or origins[""])
                )
    for table, respond in (("breaker", _responses), ("guard", _treatments)):
        for at, rule in _entries(written, table, "rules"):
            found += _of_rule(rule, at, origins, respond)
    for at, family in _entries(written, "guard", "families"):
        match = family.get("match")
        if isinstance(match, str) and (said := _said(_family, match)):
            found.append(Problem(f"{at}.match", said, _origin(origins, at, "match")))
    return [layers.by_name(problem, written) for problem in found]


def _entries(written: dict[str, Any], table: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables of a list of them, each with its dotted place."""
    content = written.get(table)
    entries = content.get(key) if isinstance(content, dict) else None
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, dict):
            yield f"{table}.{key}.{index}", entry


def _origin(origins: dict[str, Origin], at: str, key: str) -> Origin:
    return origins.get(f"{at}.{key}") or origins.get(at) or origins[""]


def _of_rule(
    rule: dict[str, Any], at: str, origins: dict[str, Origin],
    respond: Callable[[list[str]], list[str]],
) -> Iterator[Problem]:  # fmt: skip
    """Expressions that cannot be read or compare what cannot be, and unknown responses."""
    from mmctl.engine.rules.rule import check

    for key in ("when", "clear"):
        text = rule.get(key)
        if isinstance(text, str) and (text or key == "when") and (said := _said(check, text)):
            yield Problem(f"{at}.{key}", said, _origin(origins, at, key))
    names = rule.get("respond")
    if isinstance(names, list):
        for said in respond([name for name in names if isinstance(name, str)]):
            yield Problem(f"{at}.respond", said, _origin(origins, at, "respond"))


def _said(check: Callable[[str], object], value: str) -> str:
    """What ``check`` has against ``value``; empty where it has nothing."""
    try:
        check(value)
    except UsageError as error:
        return str(error)
    return ""


def _responses(names: list[str]) -> list[str]:
    from mmctl.engine.responses.names import unknown

    return unknown(names)


def _treatments(names: list[str]) -> list[str]:
    from mmctl.guard.treatment import unknown

    return unknown(names)


def _response(name: str) -> None:
    for said in _responses([name]):
        raise UsageError(said)


def _source(uri: str) -> None:
    from mmctl.engine.sources import known

    known([uri])


def _key(entry: str) -> None:
    from mmctl.tui import keys, view

    keys.moved((entry,), keys.every(one.keys for one in view.views().values()))


def _pattern(word: str) -> None:
    from mmctl.engine.modality import expression

    expression([word])


def _family(match: str) -> None:
    from mmctl.guard.tokens import pattern

    pattern(match)


def _cache(name: str) -> None:
    from mmctl.engine.access.memory_models import find

    find(name)


_CHECKS: dict[str, Callable[[str], object]] = {
    "sources.default": _source,
    "modality.vision": _pattern,
    "modality.text": _pattern,
    "responses.order": _response,
    "fingerprint.cache": _cache,
    "screen.keys": _key,
}
"""Keys whose values are names that a room knows; each check raises UsageError."""
