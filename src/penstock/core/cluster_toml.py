"""Write a Cluster as the TOML that cluster_file.py reads; reading it gives an equal cluster."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields

from penstock.core.cluster import Cluster, Device, Level
from penstock.errors import InputError

HEADINGS = ("inside", "between")


def to_toml(cluster: Cluster, notes: Iterable[str] = ()) -> str:
    """Return the TOML text of a cluster, with `notes` as comment lines at its top."""
    if not cluster.levels:
        raise InputError("a cluster with at least one level", "none", "give the levels that join its devices")
    sizes = [level.size for level in cluster.levels]
    kinds = _kinds(cluster.devices, sizes[0])
    is_uniform = len(set(kinds)) == 1
    lines = [*(f"# {note}" for note in notes)]
    if len(sizes) > 1:
        lines.append(f"hosts = {sizes[1]}")
    lines.append(f"devices = {sizes[0]}")
    lines.append(f"kind = {_text(kinds[0]) if is_uniform else '[' + ', '.join(map(_text, kinds)) + ']'}")
    for device in dict.fromkeys(cluster.devices):
        lines += ["", f"[kinds.{_text(device.kind)}]", *_values(device, skip=("kind",))]
    for at, level in enumerate(cluster.levels):
        lines += ["", *_link(at, level)]
    return "\n".join(lines) + "\n"


def _kinds(devices: tuple[Device, ...], per_host: int) -> list[str]:
    """Return the kind of every host. The format allows one kind per host, and one set of figures per kind."""
    hosts = [devices[at : at + per_host] for at in range(0, len(devices), per_host)]
    for number, host in enumerate(hosts):
        if len(set(host)) > 1:
            raise InputError(
                "devices of one kind on each host", f"several kinds on host {number}", "describe them as hosts"
            )
    figures: dict[str, Device] = {}
    for device in devices:
        if figures.setdefault(device.kind, device) != device:
            raise InputError(
                f"the same figures for all devices of kind {device.kind!r}",
                "different ones",
                "give them kinds of their own",
            )
    return [host[0].kind for host in hosts]


def _link(at: int, level: Level) -> Iterator[str]:
    heading = HEADINGS[at] if at < len(HEADINGS) else "above"
    yield f"[{heading}]" if at < len(HEADINGS) else f"[[{heading}]]"
    if at >= len(HEADINGS):
        yield f"size = {level.size}"
    yield from _values(level, skip=("size", "name") if level.name == heading else ("size",))


def _values(entry: Device | Level, skip: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of keys and values that differ from the defaults."""
    for field in fields(entry):
        value = getattr(entry, field.name)
        if field.name not in skip and value != field.default:
            yield f"{field.name} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, str):
        return _text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(text: str) -> str:
    """Return a TOML basic string: JSON's escapes are valid in TOML, and DEL has to be escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
