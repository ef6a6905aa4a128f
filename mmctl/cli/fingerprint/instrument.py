"""``mmctl fingerprint instrument`` and ``paths``: what every token of a kernel touches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmctl.cli.app import note, output, to_write
from mmctl.cli.fingerprint import load
from mmctl.cli.main import Exit
from mmctl.cli.render import emit, to_json, to_table
from mmctl.engine import atomic, recording
from mmctl.engine.errors import MmctlError, UsageError
from mmctl.engine.records import SCHEMA, Memory

if TYPE_CHECKING:
    from mmctl.engine.access.paths import Columns, Region
    from mmctl.engine.access.ptx import Site


def instrument(
    source: Annotated[Path, typer.Argument(metavar="IN.ptx", help="A module as nvcc emits it.")],
    out: Annotated[Path, to_write("Where the new module goes.", metavar="OUT.ptx")],
    sites: Annotated[Path | None, to_write("Write the sites here, for 'paths'.")] = None,
) -> int:
    """Put a trace call before every load, store and atomic on global and shared memory.

    Records of 24 bytes (token, pc, kind, address) go to a ring that the host places: set the
    module's globals mmctl_ring and mmctl_slots (cuModuleGetGlobal) before the launch, read
    mmctl_count and the ring after it. A token is a warp unless mmctl_threads_per_token says
    otherwise; mmctl_first_token and mmctl_token_count select. The module is only added to;
    instructions that touch memory but cannot be traced are listed.

    \b
    Examples:
      mmctl fingerprint instrument kernel.ptx --out traced.ptx
      mmctl fingerprint instrument kernel.ptx --out traced.ptx --sites sites.json -o csv
    """
    from mmctl.engine.access import ptx

    wanted = output()
    made = ptx.instrument(_text(source))
    atomic.write(out, made.text)
    document = {
        "schema": SCHEMA, "source": str(source), "out": str(out), "globals": ptx.GLOBALS,
        "record_bytes": 24, "sites": made.sites, "skipped": made.skipped,
    }  # fmt: skip
    if sites:
        atomic.write(sites, to_json(document, indent=2) + "\n")
    if made.skipped:
        note(f"not traced: {', '.join(made.skipped)}")
    emit(document, [_site_row(site) for site in made.sites], wanted)
    return Exit.DONE


def _site_row(site: Site) -> dict[str, Any]:
    row = {name: getattr(site, name) for name in site.__struct_fields__}
    file = row.pop("source_file")
    line = row.pop("source_line")
    return {**row, "source": f"{file}:{line}" if file else None}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise MmctlError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MmctlError(f"{path} is no text: give the PTX, not a cubin") from None


def paths(
    records: Annotated[
        str, typer.Argument(metavar="RECORDS", help="A dumped ring, or a recording of accesses.")
    ],
    sites: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Sites written by 'instrument'.")
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Snapshot, memory records or allocations to join."),
    ] = None,
    token: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Only these tokens (repeatable).")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens to show.")] = 20,
    count: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="mmctl_count, where the ring went round.")
    ] = None,
) -> int:
    """The path of each token through memory: which instruction, which tensor, in order.

    RECORDS is the ring of an instrumented kernel as it lay in memory, or a recording with access
    records that carry token_id. --memory joins addresses to the blocks of a PyTorch snapshot, to
    memory records, or to a JSON list of allocations. Everything is measured.

    \b
    Examples:
      mmctl fingerprint paths ring.bin --sites sites.json --memory snapshot.pickle
      mmctl fingerprint paths ring.bin --token 7 -o json
      mmctl fingerprint paths accesses.ndjson
    """
    from mmctl.engine.access import paths as engine

    wanted = output()
    columns, lost = _columns(records, count)
    regions = _regions(memory) if memory else []
    found, totals = engine.rebuild(columns, regions, _sites(sites), token or (), limit)
    if token and not found:
        raise UsageError(f"no record of token {', '.join(map(str, token))}")
    document = {"schema": SCHEMA, "basis": "measured", **totals, "lost": lost, "paths": found}
    rows = [
        {"token_id": t.token_id, "accesses": t.accesses, "loads": t.loads, "stores": t.stores,
         "size_bytes": t.size_bytes, "regions": t.regions}
        for t in found
    ]  # fmt: skip
    text = to_table(rows)
    if token:
        steps = [{"token_id": t.token_id, **_plain(step)} for t in found for step in t.steps]
        text += "\n\n" + to_table(steps)
    if lost:
        note(f"{lost} older records were overwritten: a larger ring keeps them")
    emit(document, rows, wanted, text)
    return Exit.DONE


def _plain(step: Any) -> dict[str, Any]:
    from msgspec import to_builtins

    plain: dict[str, Any] = to_builtins(step)
    return {**plain, "first_address": hex(step.first_address),
            "last_address": hex(step.last_address)}  # fmt: skip


def _columns(name: str, count: int | None) -> tuple[Columns, int]:
    from mmctl.engine.access import paths as engine

    path = Path(name)
    if name != "-" and path.is_file():
        with open(path, "rb") as file:
            start = file.read(4096)
        if start[:1] not in (b"{", b"[") and start[:4] != b"\x28\xb5\x2f\xfd":
            return engine.read_ring(path, count)
    return engine.from_accesses(load.one(name, load.profile())), 0


def _sites(path: Path | None) -> list[Site]:
    import msgspec

    from mmctl.engine.access.ptx import Site

    if path is None:
        return []
    try:
        return msgspec.convert(msgspec.json.decode(path.read_bytes())["sites"], list[Site])
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError):
        raise MmctlError(f"{path} holds no sites: write it with 'instrument --sites'") from None


def _regions(path: Path) -> list[Region]:
    """Named ranges of addresses from whatever tells them."""
    import msgspec

    with open(path, "rb") as file:
        start = file.read(4096)
    if start[:1] == b"\x80":
        return _blocks(path)
    if b'"type"' in start.split(b"\n", 1)[0]:
        return _live(path)
    from mmctl.engine.access.paths import Region

    try:
        items = msgspec.json.decode(path.read_bytes())
        return [
            Region(
                address=int(item.get("device_ptr", item.get("address"))),
                size_bytes=int(item.get("num_bytes", item.get("size_bytes"))),
                name=str(item.get("name") or item.get("allocation_name") or f"allocation {index}"),
            )
            for index, item in enumerate(items)
        ]
    except (msgspec.DecodeError, TypeError, ValueError, AttributeError):
        raise MmctlError(f"{path} is no snapshot, recording or list of allocations") from None


def _blocks(path: Path) -> list[Region]:
    """The live blocks of a snapshot, named by the innermost frame that allocated them."""
    from mmctl.engine.access.paths import Region
    from mmctl.engine.memory import snapshot

    taken = snapshot.read(path)
    names = ("address", "size", "state", "stack")
    rows = zip(*(taken.blocks[name].tolist() for name in names), strict=True)
    found = []
    for address, size, state, stack in rows:
        if state:
            frames = taken.stack(stack)
            name = "{} ({}:{})".format(*frames[0]) if frames else f"block {address:#x}"
            found.append(Region(address=address, size_bytes=size, name=name))
    return found


def _live(path: Path) -> list[Region]:
    """Allocations of a recording; of those at one address, the last."""
    from mmctl.engine.access.paths import Region

    found = {
        r.address: Region(
            address=r.address, size_bytes=r.size_bytes,
            name=f"{r.modality} {r.address:#x}", modality=r.modality,
        )
        for r in recording.read(path)
        if isinstance(r, Memory) and r.action == "alloc"
    }  # fmt: skip
    return list(found.values())
