"""A Cluster as the TOML that cluster_file.py reads: what is printed here is read back as the same cluster."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields

from penstock.core.cluster import Cluster, Device, Level
from penstock.errors import InputError

HEADINGS = ("inside", "between")


def to_toml(cluster: Cluster, notes: Iterable[str] = ()) -> str:
    """The file's text; `notes` are lines of comment at its head."""
    if not cluster.levels:
        raise InputError("a cluster with at least one level", "none", "say what joins its devices")
    sizes = [level.size for level in cluster.levels]
    kinds = _kinds(cluster.devices, sizes[0])
    same = len(set(kinds)) == 1
    lines = [*(f"# {note}" for note in notes)]
    if len(sizes) > 1:
        lines.append(f"hosts = {sizes[1]}")
    lines.append(f"devices = {sizes[0]}")
    lines.append(f"kind = {_text(kinds[0]) if same else '[' + ', '.join(map(_text, kinds)) + ']'}")
    for device in dict.fromkeys(cluster.devices):
        lines += ["", f"[kinds.{_text(device.kind)}]", *_values(device, skip=("kind",))]
    for at, level in enumerate(cluster.levels):
        lines += ["", *_link(at, level)]
    return "\n".join(lines) + "\n"


def _kinds(devices: tuple[Device, ...], per_host: int) -> list[str]:
    """The kind of every host; the format knows one a host, and one set of figures a kind."""
    hosts = [devices[at : at + per_host] for at in range(0, len(devices), per_host)]
    for number, host in enumerate(hosts):
        if len(set(host)) > 1:
            raise InputError("devices of one kind on each host", f"several on host {number}", "describe them as hosts")
    figures: dict[str, Device] = {}
    for device in devices:
        if figures.setdefault(device.kind, device) != device:
            raise InputError(
                f"the same figures for all devices of kind {device.kind!r}", "others", "give them kinds of their own"
            )
    return [host[0].kind for host in hosts]


def _link(at: int, level: Level) -> Iterator[str]:
    heading = HEADINGS[at] if at < len(HEADINGS) else "above"
    yield f"[{heading}]" if at < len(HEADINGS) else f"[[{heading}]]"
    if at >= len(HEADINGS):
        yield f"size = {level.size}"
    yield from _values(level, skip=("size", "name") if level.name == heading else ("size",))


def _values(noun: Device | Level, skip: tuple[str, ...]) -> Iterator[str]:
    """Keys and values, without those that say what is so anyway."""
    for entry in fields(noun):
        value = getattr(noun, entry.name)
        if entry.name not in skip and value != entry.default:
            yield f"{entry.name} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, str):
        return _text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(text: str) -> str:
    """A basic string: JSON's rules are TOML's, but for one sign."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
