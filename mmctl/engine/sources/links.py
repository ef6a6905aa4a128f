"""How devices are joined: topology matrices, NCCL's XML, bandwidth and latency matrices, NVML.

``hops`` counts what a transfer passes between two devices, by class: see ``HOPS``.
``crosses_numa`` says whether the path leaves a NUMA node, as nvidia-smi's legend defines the
classes; NVLink and its like between two sockets do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from mmctl.engine.errors import MmctlError, NoSourceError
from mmctl.engine.profiles import Profile
from mmctl.engine.records import AnyRecord, Link
from mmctl.engine.sources.smi import Origin

HOPS: dict[str, int] = {
    "NV": 1, "HCCS": 1, "HCCS_SW": 2, "SIO": 1, "UB": 1, "XGMI": 1, "C2C": 1,
    "PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5, "SOC": 5,
}  # fmt: skip
"""Bridges, switches and host bridges on the way: PIX one bridge, PXB several, PHB a host bridge
between two bridges, NODE two host bridges of one socket, SYS the link between sockets."""

_CROSSES = {"SYS": True, "SOC": True}
_UNKNOWN = "unknown"
_CLASS = re.compile(r"(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|HCCS(?:_SW)?|SIO|UB|XGMI|C2C|NA|N/A)$")
_FIRST = re.compile(r"(?:GPU|NPU)\d+$")
_AFTER = ("CPU", "NUMA", "GPU", "NPU")
_GB_PER_S = 1e9


def hops_of(link_class: str) -> int | None:
    """Switches and bridges on the way over a link class, None for a class that is not known."""
    return HOPS.get("NV" if re.match(r"NV\d+$", link_class) else link_class)


def link(origin: Origin, a: str, b: str, link_class: str, **more: Any) -> Link:
    """A link of a class, with the reasons for what only a measurement gives."""
    known = link_class != _UNKNOWN
    absent = {
        field: "not measured; nvbandwidth or p2pBandwidthLatencyTest does"
        for field in ("latency_us", "bandwidth_bytes_per_s")
        if more.get(field) is None
    }
    if not known:
        absent["class"] = absent["hops"] = absent["crosses_numa"] = (
            "a measurement does not tell; give the topology beside it"
        )
    return Link(
        ts_ns=origin.ts_ns, node=origin.node, a=a, b=b, link_class=link_class,
        hops=hops_of(link_class), crosses_numa=_CROSSES.get(link_class, False) if known else None,
        absent=absent, **more,
    )  # fmt: skip


def matrix(text: str, origin: Origin) -> list[AnyRecord]:
    """``nvidia-smi topo -m`` and ``npu-smi info -t topo``, tabs and blanks as they come."""
    columns: list[str] = []
    found: dict[tuple[str, str], str] = {}
    aliases: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if not words:
            continue
        if legend := re.match(r"\s*(NIC\d+)\s*:\s*(\S+)", line):
            aliases[legend[1]] = legend[2]
        elif not columns:
            if _FIRST.match(words[0]) and "X" not in words:
                columns = words[: _run(words)]
        elif words[0] in columns and len(words) > len(columns):
            cells = words[1 : len(columns) + 1]
            if all(_CLASS.match(cell) for cell in cells):
                found |= {(words[0], c): k for c, k in zip(columns, cells, strict=True)}
        elif words[0] in columns:
            raise MmctlError(f"the row of {words[0]} has fewer cells than the matrix has columns")
    if not found:
        raise MmctlError("no matrix of devices in it")
    records: list[AnyRecord] = []
    for (a, b), kind in found.items():
        back = found.get((b, a))
        once = columns.index(a) < columns.index(b) or (back is not None and back != kind)
        if a != b and once and kind not in ("X", "NA", "N/A"):
            records.append(link(origin, _short(a, aliases), _short(b, aliases), kind))
    if not records:
        raise NoSourceError("no device in it is linked to another")
    return records


def _run(words: list[str]) -> int:
    """How many words are names of devices: those before ``CPU Affinity`` or ``NUMA`` begins."""
    return next((number for number, word in enumerate(words) if word in _AFTER), len(words))


def _short(name: str, aliases: dict[str, str]) -> str:
    if re.match(r"(?:GPU|NPU|CPU)\d+$", name):
        return name.lower()
    return aliases.get(name, name.lower())


_HEADS = re.compile(
    r"(?P<p2p>(?P<two>Uni|Bi)directional P2P=(?P<on>Enabled|Disabled) Bandwidth"
    r"(?: \(P2P (?P<op>\w+)\))? Matrix \(GB/s\))|"
    r"(?P<lat>P2P=(?P<laton>Enabled|Disabled) Latency(?: \(P2P (?P<latop>\w+)\))? Matrix \(us\))|"
    r"(?P<nvb>(?:memcpy|memory latency)\s+\w+\s+(?P<row>CPU|GPU)\(row\)\s*(?P<way><->|->|<-)\s*"
    r"(?P<col>CPU|GPU)\(column\).*\((?P<unit>GB/s|ns)\))"
)
_ROW = re.compile(r"\s*(\d{1,6})((?:\s+(?:-?\d+(?:\.\d+)?|N/A))+)\s*$")


def matrices(text: str, origin: Origin) -> list[AnyRecord]:
    """Output of p2pBandwidthLatencyTest and of nvbandwidth as text."""
    tables: list[tuple[re.Match[str], str, list[tuple[int, list[float | None]]]]] = []
    rows: list[tuple[int, list[float | None]]] | None = None
    title = ""
    for line in text.splitlines():
        if running := re.match(r"Running (\w+)\.", line):
            title = running[1]
        elif head := _HEADS.search(line):
            rows = []
            tables.append((head, title, rows))
        elif (total := re.match(r"SUM (\w+)\s", line)) and tables:
            tables[-1] = (tables[-1][0], total[1], tables[-1][2])
        elif re.match(r"\s*CPU\s+\d", line):
            rows = None  # the second half of a latency matrix: the time on the host
        elif rows is not None and (found := _ROW.match(line)):
            cells = [None if word == "N/A" else float(word) for word in found[2].split()]
            if rows or not (len(cells) > 1 and _counts(cells, int(found[1]))):
                rows.append((int(found[1]), cells))
    records = list(joined(_measured(tables, origin)))
    if not records:
        raise MmctlError("no matrix of bandwidth or latency in it")
    return [*records]


def _counts(cells: list[float | None], first: int) -> bool:
    """Whether a line is a header ``0 1 2 3 …`` that names the columns."""
    return [float(first + 1 + n) for n in range(len(cells))] == cells


def _measured(tables: Iterable[Any], origin: Origin) -> Iterator[Link]:
    """Links of each table, the ones to prefer first: P2P enabled before disabled, one way
    before both ways, one pair at a time before all at once."""
    ranked = sorted(enumerate(tables), key=lambda item: (_rank(item[1][0], item[1][1]), item[0]))
    for _, (head, title, rows) in ranked:
        if re.match(r"(all_to|host_to_all|one_to_all|all_to_one)", title):
            continue
        ns = head["unit"] == "ns"
        for row, cells in rows:
            for column, value in enumerate(cells):
                if value is None or value <= 0:
                    continue
                a, b = f"gpu{row}", f"gpu{column}"
                if head["nvb"]:
                    a = f"{head['row'].lower()}{row}"
                    b = f"{head['col'].lower()}{column}"
                    if head["way"] == "<-":
                        a, b = b, a
                if a == b:
                    continue
                if head["lat"] or ns:
                    yield link(origin, a, b, _UNKNOWN, latency_us=value / 1e3 if ns else value)
                else:
                    yield link(origin, a, b, _UNKNOWN, bandwidth_bytes_per_s=value * _GB_PER_S)


def _rank(head: re.Match[str], title: str) -> int:
    both = head["two"] == "Bi" or (head["way"] == "<->" and head["unit"] == "GB/s")
    off = "Disabled" in (head["on"], head["laton"])
    reads = head["op"] == "Reads" or " SM " in head[0]
    return 4 * both + 2 * off + reads


def joined(links: Iterable[Link]) -> Iterator[Link]:
    """One link a pair and direction: the first value of each field that some source gives. A
    class known for one direction holds for the other."""
    pairs: dict[tuple[str, str], Link] = {}
    for one in links:
        before = pairs.get((one.a, one.b))
        pairs[one.a, one.b] = one if before is None else _filled(before, one)
    for pair, one in list(pairs.items()):
        back = pairs.get((pair[1], pair[0]))
        if back is not None and one.link_class == _UNKNOWN and back.link_class != _UNKNOWN:
            pairs[pair] = _filled(one, msgspec.structs.replace(
                back, latency_us=None, bandwidth_bytes_per_s=None))  # fmt: skip
    yield from pairs.values()


def _filled(first: Link, second: Link) -> Link:
    values: dict[str, Any] = {
        field: getattr(second, field)
        for field in ("hops", "crosses_numa", "latency_us", "bandwidth_bytes_per_s")
        if getattr(first, field) is None and getattr(second, field) is not None
    }
    if first.link_class == _UNKNOWN and second.link_class != _UNKNOWN:
        values["link_class"] = second.link_class
    gone = {*values, "class"} if "link_class" in values else set(values)
    absent = {field: why for field, why in first.absent.items() if field not in gone}
    return msgspec.structs.replace(first, absent=absent, **values)


def nvbandwidth_json(text: str, origin: Origin) -> list[AnyRecord]:
    """``nvbandwidth --json``, even with lines of a log in front."""
    import json

    key = text.find('"nvbandwidth"')
    start = text.rfind("{", 0, key)
    try:
        document, _ = json.JSONDecoder().raw_decode(text, max(start, 0))
        cases = document["nvbandwidth"]["testcases"]
        tables = []
        for case in cases if isinstance(cases, list) else ():
            head = _HEADS.search(str(case.get("bandwidth_description", "")))
            if head is None or not isinstance(case.get("bandwidth_matrix"), list):
                continue
            rows = [
                (number, [_cell(cell) for cell in row])
                for number, row in enumerate(case["bandwidth_matrix"])
                if isinstance(row, list)
            ]
            tables.append((head, str(case.get("name", "")), rows))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise MmctlError(f"not the JSON of nvbandwidth: {error}") from None
    records = list(joined(_measured(tables, origin)))
    if not records:
        raise MmctlError("no test of nvbandwidth has passed")
    return [*records]


def _cell(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def nccl_xml(text: str, origin: Origin) -> list[AnyRecord]:
    """NCCL_TOPO_DUMP_FILE: the tree of bridges with GPUs, NVLinks and NICs in it."""
    from xml.etree import ElementTree

    if "<!ENTITY" in text:
        raise MmctlError("an XML file with entities of its own is not read")
    try:
        root = ElementTree.fromstring(text[max(text.find("<system"), 0) :])
    except (ElementTree.ParseError, RecursionError, ValueError) as error:
        raise MmctlError(f"not well-formed XML: {error}") from None
    places: dict[str, list[str]] = {}
    nvlinks: dict[str, dict[str, int]] = {}
    bus: dict[str, str] = {}
    stack: list[tuple[Any, list[str]]] = [(root, [])]
    while stack:
        node, path = stack.pop()
        for place, child in enumerate(node):
            where = path
            if child.tag == "cpu":
                where = [*path, f"cpu {child.get('host_hash', '')} {child.get('numaid', place)}"]
            elif child.tag == "pci":
                where = [*path, child.get("busid", str(place))]
            elif child.tag == "gpu":
                name = f"gpu{child.get('dev', place)}"
                places[name] = path
                bus[(path[-1] if path else "").lower()] = name
                links_to = nvlinks.setdefault(name, {})
                for own in child.iter("nvlink"):
                    count = own.get("count", "1")
                    target = f"{own.get('target', '')} {own.get('tclass', '')}".lower()
                    links_to[target] = links_to.get(target, 0) + (
                        int(count) if count.isdigit() else 1
                    )
            elif child.tag == "net" and child.get("name"):
                places[child.get("name", "")] = path
            stack.append((child, where))
    names = sorted(places, key=lambda name: (not name.startswith("gpu"), len(name), name))
    records: list[AnyRecord] = []
    for number, a in enumerate(names):
        for b in names[number + 1 :]:
            count = _nvlinks(nvlinks.get(a, {}), nvlinks.get(b, {}), bus, b)
            kind = f"NV{count}" if count else _path_class(places[a], places[b])
            records.append(link(origin, a, b, kind))
    if not records:
        raise MmctlError("a topology of NCCL with fewer than two devices")
    return records


def _nvlinks(a: dict[str, int], b: dict[str, int], bus: dict[str, str], name: str) -> int:
    """NVLinks between two GPUs: direct ones, or the fewer of both to switches (0x0680)."""
    direct = sum(n for target, n in a.items() if bus.get(target.split(" ")[0]) == name)
    if direct:
        return direct
    to_switch = [sum(n for target, n in own.items() if "0x0680" in target) for own in (a, b)]
    return min(to_switch)


def _path_class(a: list[str], b: list[str]) -> str:
    """The class of a PCIe path by the deepest place that two devices share."""
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    if shared == 0:
        return "SYS"
    if shared == 1:
        return "PHB"
    return "PIX" if len(a) - shared <= 1 and len(b) - shared <= 1 else "PXB"


_ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def live(profile: Profile, origin: Origin) -> list[Link]:
    """The links of this node's NVIDIA devices, by NVML: NVLinks counted, else the PCIe path."""
    from mmctl.engine.sources.nvml import Session
    from mmctl.engine.sources.nvml_values import Missing

    session = Session(profile.sources.timeout_s)
    try:
        known = [(i, h) for i, h in enumerate(session.handles) if h is not None]
        pci: dict[int, str] = {}
        ends: dict[int, dict[str, int]] = {}
        for index, handle in known:
            info = session.or_none("nvmlDeviceGetPciInfo", handle)
            if info is not None:
                pci[index] = _bus(info.busId)
            ends[index] = _nvlink_ends(session, handle)
        links = []
        for number, (i, a) in enumerate(known):
            for j, b in known[number + 1 :]:
                count = ends[i].get(pci.get(j, "?"), 0)
                count = count or min(ends[i].get("switch", 0), ends[j].get("switch", 0))
                try:
                    level = session.ask("nvmlDeviceGetTopologyCommonAncestor", a, b)
                    kind = _ANCESTORS.get(int(level), _UNKNOWN)
                except Missing:
                    kind = _UNKNOWN
                links.append(link(origin, f"gpu{i}", f"gpu{j}", f"NV{count}" if count else kind))
        if not links:
            raise NoSourceError("NVML finds fewer than two GPUs that answer: there is no link")
        return links
    finally:
        session.close()


def _bus(text: Any) -> str:
    name = text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)
    domain, _, rest = name.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _nvlink_ends(session: Any, handle: Any) -> dict[str, int]:
    """Active NVLinks of one GPU by what is at their other end: a bus id, or ``switch``."""
    ends: dict[str, int] = {}
    for number in range(18):
        if not session.or_none("nvmlDeviceGetNvLinkState", handle, number):
            if number == 0 and session.or_none("nvmlDeviceGetNvLinkState", handle, 1) is None:
                break
            continue
        kind = session.or_none("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
        remote = session.or_none("nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
        end = "switch" if kind == 2 else _bus(remote.busId) if remote is not None else None
        if end is not None:
            ends[end] = ends.get(end, 0) + 1
    return ends
