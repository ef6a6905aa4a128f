"""Which response, or sequence of them, is cheapest: decided by a dry run after each piece.

Freed bytes mislead: memory comes back in whole segments, so freeing less in the right place can
fit more. The batch is capped before anything is taken from requests that run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mmctl.engine.profiles import Responses
from mmctl.engine.records import Fits

TRIES = 96
"""Dry runs that a choice may take: some 0.1 s at the usual pool."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be done: a response on one target (a request, a tensor).

    ``cosine`` is the expected mean token cosine afterwards, 1 for what loses nothing.
    """

    response: str
    target: str
    frees_bytes: int
    cost_s: float
    host_bytes: int = 0
    cosine: float = 1.0


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces in order, whether the batch fits after them, and what they cost."""

    name: str
    pieces: tuple[Piece, ...]
    fits: Fits
    cost_s: float
    frees_bytes: int


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What to do: admit ``batch`` items (0: none fits), after ``chosen``'s pieces.

    ``before`` is the dry run of the batch that was wanted; ``refused`` says of pieces why they
    were not considered.
    """

    wanted: int
    batch: int
    chosen: Way | None
    alternatives: tuple[Way, ...]
    before: Fits
    refused: dict[str, str]
    dry_runs: int


DryRun = Callable[[Sequence[Piece], int], Fits]
"""Does a batch of so many items fit once these pieces are done? Nothing is changed by asking."""


def choose(
    pieces: Sequence[Piece],
    dry_run: DryRun,
    wanted: int,
    settings: Responses,
    host_free_bytes: int,
) -> Choice:
    """The cheapest way to let a batch of up to ``wanted`` items in.

    First a smaller batch, which costs no request that runs; then, for the smallest one, pieces
    until it fits: by each response alone, and mixed by cost for bytes. Pieces that are not
    needed in the end are taken out again.
    """
    tries = 0

    def fits(done: Sequence[Piece], batch: int) -> Fits:
        nonlocal tries
        tries += 1
        return dry_run(done, batch)

    before = fits((), wanted)
    if before.fits:
        return Choice(wanted=wanted, batch=wanted, chosen=None, alternatives=(), before=before,
                      refused={}, dry_runs=tries)  # fmt: skip
    capped = next((size for size in range(wanted - 1, 0, -1) if fits((), size).fits), 0)
    allowed, refused = _allowed(pieces, settings, host_free_bytes)
    batch = capped or 1
    # Where a smaller batch fits, the ways to fit the whole one are shown beside it.
    goal = wanted if capped else 1
    found: list[Way] = []
    for name, order in _orders(allowed):
        if tries >= TRIES:
            refused[name] = f"not tried: {TRIES} dry runs were taken"
            continue
        found.append(_until_it_fits(name, order, goal, fits, host_free_bytes, settings))
    ways = sorted(found, key=lambda way: (not way.fits.fits, way.cost_s, way.frees_bytes))
    fitting = [way for way in ways if way.fits.fits]
    if capped:
        return Choice(wanted=wanted, batch=batch, chosen=None, alternatives=tuple(ways),
                      before=before, refused=refused, dry_runs=tries)  # fmt: skip
    return Choice(
        wanted=wanted, batch=1 if fitting else 0, chosen=fitting[0] if fitting else None,
        alternatives=tuple(way for way in ways if not fitting or way is not fitting[0]),
        before=before, refused=refused, dry_runs=tries,
    )  # fmt: skip


def _allowed(
    pieces: Sequence[Piece], settings: Responses, host_free_bytes: int
) -> tuple[list[Piece], dict[str, str]]:
    room = host_free_bytes - settings.host_reserve_bytes
    allowed, refused = [], {}
    for piece in pieces:
        name = f"{piece.response} {piece.target}"
        if piece.cosine < settings.quality_floor:
            refused[name] = (
                f"expected cosine {piece.cosine:.3g} is below the quality floor "
                f"{settings.quality_floor:g}"
            )
        elif piece.host_bytes > room:
            refused[name] = "the host has no memory to spare for it"
        else:
            allowed.append(piece)
    return allowed, refused


def _orders(pieces: Sequence[Piece]) -> list[tuple[str, list[Piece]]]:
    """Orders to try: each response alone, the greatest first, and all by cost for a byte."""
    orders = []
    for response in dict.fromkeys(piece.response for piece in pieces):
        own = [piece for piece in pieces if piece.response == response]
        orders.append((response, sorted(own, key=lambda p: -p.frees_bytes)))
    if len(orders) > 1:
        cheap = sorted(pieces, key=lambda p: p.cost_s / max(1, p.frees_bytes))
        orders.append(("mixed", cheap))
    return orders


def _until_it_fits(
    name: str, order: list[Piece], batch: int, fits: DryRun, host_free_bytes: int,
    settings: Responses,
) -> Way:  # fmt: skip
    room = host_free_bytes - settings.host_reserve_bytes
    done: list[Piece] = []
    result = None
    for piece in order:
        # A target gives its memory back once: what is offloaded is not merged as well.
        if piece.host_bytes > room or any(piece.target == other.target for other in done):
            continue
        room -= piece.host_bytes
        done.append(piece)
        result = fits(done, batch)
        if result.fits:
            break
    if result is None:
        result = fits(done, batch)
    if result.fits:
        for piece in list(done[:-1]):
            fewer = [other for other in done if other is not piece]
            without = fits(fewer, batch)
            if without.fits:
                done, result = fewer, without
    return Way(
        name=name, pieces=tuple(done), fits=result, cost_s=sum(p.cost_s for p in done),
        frees_bytes=sum(p.frees_bytes for p in done),
    )  # fmt: skip


def evidence(choice: Choice) -> dict[str, Any]:
    """The choice and its alternatives, for the event that reports it."""
    found: dict[str, Any] = msgspec.to_builtins(choice)
    return found
