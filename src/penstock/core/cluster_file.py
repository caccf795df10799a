"""Read a Cluster from a TOML file.

preset = "dgx-a100"        # optional: start from a preset of cluster_presets.py and change what differs
hosts = 2
devices = 8                # a host
kind = "mine"              # of all devices, or a list with one kind a host

[kinds.mine]               # kinds of cluster_presets.py need no table; speed is a multiple of the profiled device's
memory = 80e9
speed = 1.0
host_bandwidth = 32e9      # each way between the device and host memory; without it, nothing can be offloaded

[inside]                   # joins the devices of a host; bytes/s and seconds
bandwidth = 300e9
latency = 5e-6
reduce_bandwidth = 200e9   # of an all-reduce, where it differs; also: reduce_latency, reduce_rings
blocking = false           # true where the copy blocks the sender; also: shared

[between]                  # joins the hosts
bandwidth = 25e9

[[above]]                  # further levels: each joins `size` groups of the level below
size = 4
bandwidth = 12.5e9
"""

from __future__ import annotations

from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

from penstock.core.arguments import named
from penstock.core.cluster import Cluster, Device, Level, require_device_count
from penstock.core.cluster_presets import KINDS, PRESETS
from penstock.core.toml_file import read_toml
from penstock.core.validation import require_path, whole
from penstock.errors import FormatError, InputError

NUMBERS = ("memory", "speed", "host_bandwidth", "bandwidth", "latency", "reduce_bandwidth", "reduce_latency")
MAY_BE_0 = ("host_bandwidth", "latency", "reduce_latency")
WHOLES = ("hosts", "devices", "size")
TRUTHS, TEXTS = ("shared", "reduce_rings", "blocking"), ("preset", "name")
LINK = ("name", "bandwidth", "latency", "reduce_bandwidth", "reduce_latency", "reduce_rings", "shared", "blocking")
KEYS = {
    "": ("preset", "hosts", "devices", "kind", "kinds", "inside", "between", "above"),
    "kinds": ("memory", "speed", "host_bandwidth"),
    "inside": LINK,
    "between": LINK,
    "above": ("size", *LINK),
}


@named
def read_cluster(source: str | Path, hosts: int | None = None) -> Cluster:
    """Return the cluster of a TOML file or of a preset; `hosts` overrides its number of hosts."""
    require_path(source)
    path = Path(source)
    if str(source) in PRESETS and not path.exists():
        return from_table({"preset": str(source)}, str(source), hosts)
    table = read_toml(path, "TOML file" if path.exists() else f"TOML file or a preset ({', '.join(PRESETS)})")
    return from_table(table, str(path), hosts)


def from_table(table: dict[str, Any], where: str, hosts: int | None = None) -> Cluster:
    """Return the cluster that a parsed file describes; `where` is its name in error messages."""
    _require_keys(where, table)
    merged = _on_preset(where, table)
    if hosts is not None:
        merged["hosts"] = whole("hosts", hosts)
    for key, example in (("devices", "8"), ("inside", "a table with bandwidth = ...")):
        if key not in merged:
            raise FormatError(f"{where}: {key}", f"the key, for example {key} = {example}", "none", "add it")
    count = merged.get("hosts", 1)
    above = merged.get("above", [])
    sizes = [merged["devices"], count, *(entry.get("size", 0) for entry in above)]
    tables = [("inside", merged["inside"]), ("between", merged.get("between")), *(("above", entry) for entry in above)]
    try:
        levels = tuple(
            _level(where, name, size, link)
            for size, (name, link) in zip(sizes, tables, strict=True)
            if link is not None
        )
        if merged.get("between") is None and count > 1:
            raise FormatError(f"{where}: between", f"a table that joins the {count} hosts", "none", "add it")
        require_device_count(prod(sizes))
        devices = _devices(where, merged, count * prod(sizes[2:]))
        return Cluster(devices, levels)
    except FormatError:
        raise
    except InputError as error:
        raise FormatError(where, error.expected, error.came, error.do) from None


def _on_preset(where: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return the file's values, completed by those of its preset; tables of links are merged key by key."""
    name = table.get("preset")
    if name is None:
        return dict(table)
    if name not in PRESETS:
        raise FormatError(f"{where}: preset", f"one of {', '.join(PRESETS)}", repr(name), "choose one of them")
    base = PRESETS[name]
    links = {key: {**base.get(key, {}), **table[key]} for key in table if key in ("inside", "between")}
    return {**base, **table, **links}


def _level(where: str, name: str, size: int, link: dict[str, Any]) -> Level:
    if "bandwidth" not in link:
        raise FormatError(f"{where}: {name}.bandwidth", "bytes/s of a transfer", "none", "add it")
    figures = {key: link[key] for key in LINK[1:] if key in link}
    return Level(link.get("name", name), size, **figures)


def _devices(where: str, table: dict[str, Any], hosts: int) -> tuple[Device, ...]:
    """Return all devices, host by host; the devices of a host are of one kind."""
    kind_names = table.get("kind", next(iter(table.get("kinds") or {"device": {}})))
    kinds = [kind_names] * hosts if isinstance(kind_names, str) else list(kind_names)
    if len(kinds) != hosts:
        raise FormatError(
            f"{where}: kind", f"one kind, or one for each of {hosts} hosts", len(kinds), "correct the list"
        )
    figures = {**KINDS, "device": {}, **table.get("kinds", {})}
    for kind in kinds:
        if kind not in figures:
            raise FormatError(
                f"{where}: kind", f"a kind with a table of its own, or one of {', '.join(KINDS)}", repr(kind),
                f"add [kinds.{kind}] with memory and speed",
            )  # fmt: skip
    devices = {kind: Device(kind, **figures[kind]) for kind in kinds}
    return tuple(devices[kind] for kind in kinds for _ in range(table["devices"]))


def _require_keys(where: str, table: dict[str, Any]) -> None:
    """Require valid keys and values of the right type in all tables of the file."""
    _check(where, "", table, KEYS[""])
    for name in ("inside", "between"):
        if name in table:
            _check(where, name, table[name], KEYS[name])
    kinds, above = table.get("kinds", {}), table.get("above", [])
    if not isinstance(kinds, dict) or not isinstance(above, list):
        raise FormatError(where, "tables [kinds.NAME] and [[above]]", "another type", "write them with these headings")
    for kind, entry in kinds.items():
        _check(where, f"kinds.{kind}", entry, KEYS["kinds"])
    for entry in above:
        _check(where, "above", entry, KEYS["above"])
        if "size" not in entry:
            raise FormatError(f"{where}: above.size", "how many groups the level joins", "none", "add it")


def _check(where: str, prefix: str, table: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(table, dict):
        raise FormatError(f"{where}: {prefix}", f"a table with {', '.join(allowed)}", repr(table), f"write [{prefix}]")
    for key, value in table.items():
        place = f"{where}: {prefix}.{key}" if prefix else f"{where}: {key}"
        if key not in allowed:
            near = get_close_matches(key, allowed, n=1)
            do = f"write {near[0]}" if near else "drop it"
            raise FormatError(place, f"one of the keys {', '.join(allowed)}", f"the unknown key {key!r}", do)
        expected = _expected(key, value)
        if expected:
            raise FormatError(place, expected, repr(value), "correct the value")


def _expected(key: str, value: Any) -> str | None:
    """Return a description of the expected value, or None if the value fits."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if key in WHOLES and not (is_whole and value >= 1):
        return "a whole number of at least 1"
    if key in NUMBERS and not (is_whole or isinstance(value, float)):
        return "a number"
    if key in NUMBERS and not (value > 0 or (value == 0 and key in MAY_BE_0)):
        return "a number of 0 or more" if key in MAY_BE_0 else "a number above 0"
    if key in TRUTHS and not isinstance(value, bool):
        return "true or false"
    if key in TEXTS and not isinstance(value, str):
        return "a text"
    if key == "kind" and not isinstance(value, str):
        listed = isinstance(value, list) and value and all(isinstance(kind, str) for kind in value)
        return None if listed else "the name of a kind, or a list of names, one a host"
    return None
