"""A Cluster from a TOML file.

preset = "dgx-a100"        # optional: start from a machine of cluster_presets.py, change what differs
hosts = 2
devices = 8                # a host
kind = "mine"              # of all devices, or a list with one kind a host

[kinds.mine]               # those of cluster_presets.py need no table; speed is a multiple of the profiled device's
memory = 80e9
speed = 1.0
host_bandwidth = 32e9      # each way between the device and its host's memory; without it, nothing can be offloaded

[inside]                   # joins the devices of a host; bytes/s and seconds
bandwidth = 300e9
latency = 5e-6
reduce_bandwidth = 200e9   # what an all-reduce sees, where it differs; also: reduce_latency, reduce_rings
blocking = false           # true where who sends is held up by the copy; also: shared

[between]                  # joins the hosts
bandwidth = 25e9

[[above]]                  # further levels: `size` groups of all that is below
size = 4
bandwidth = 12.5e9
"""

from __future__ import annotations

from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

from penstock.core.arguments import named
from penstock.core.cluster import Cluster, Device, Level, require_room
from penstock.core.cluster_presets import KINDS, PRESETS
from penstock.core.given import require_path, whole
from penstock.core.toml_file import read_toml
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
    """The cluster in a TOML file, or a preset by its name; `hosts` replaces how many hosts it has."""
    require_path(source)
    path = Path(source)
    if str(source) in PRESETS and not path.exists():
        return from_table({"preset": str(source)}, str(source), hosts)
    what = "TOML file" if path.exists() else f"TOML file or a preset ({', '.join(PRESETS)})"
    table = read_toml(path, what)
    return from_table(table, str(path), hosts)


def from_table(table: dict[str, Any], where: str, hosts: int | None = None) -> Cluster:
    """The cluster that a parsed file describes; messages name the file and the key."""
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
        require_room(prod(sizes))
        devices = _devices(where, merged, count * prod(sizes[2:]))
        return Cluster(devices, levels)
    except FormatError:
        raise
    except InputError as error:
        raise FormatError(where, error.expected, error.came, error.do) from None


def _on_preset(where: str, table: dict[str, Any]) -> dict[str, Any]:
    """The file's values on those of the preset it names, tables of links key by key."""
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
    known = {key: link[key] for key in LINK[1:] if key in link}
    return Level(link.get("name", name), size, **known)


def _devices(where: str, table: dict[str, Any], hosts: int) -> tuple[Device, ...]:
    """Host by host, each of one kind."""
    named = table.get("kind", next(iter(table.get("kinds") or {"device": {}})))
    kinds = [named] * hosts if isinstance(named, str) else list(named)
    if len(kinds) != hosts:
        raise FormatError(f"{where}: kind", f"one kind, or one for each of {hosts} hosts", len(kinds), "complete it")
    known = {**KINDS, "device": {}, **table.get("kinds", {})}
    for kind in kinds:
        if kind not in known:
            raise FormatError(
                f"{where}: kind", f"a kind with a table of its own, or one of {', '.join(KINDS)}", repr(kind),
                f"add [kinds.{kind}] with memory and speed",
            )  # fmt: skip
    made = {kind: Device(kind, **known[kind]) for kind in kinds}
    return tuple(made[kind] for kind in kinds for _ in range(table["devices"]))


def _require_keys(where: str, table: dict[str, Any]) -> None:
    """Every key known and every value of its type, in all tables of the file."""
    _check(where, "", table, KEYS[""])
    for name in ("inside", "between"):
        if name in table:
            _check(where, name, table[name], KEYS[name])
    kinds, above = table.get("kinds", {}), table.get("above", [])
    if not isinstance(kinds, dict) or not isinstance(above, list):
        raise FormatError(where, "tables [kinds.NAME] and [[above]]", "others", "write them with these headings")
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
        wanted = _wanted(key, value)
        if wanted:
            raise FormatError(place, wanted, repr(value), "correct the value")


def _wanted(key: str, value: Any) -> str | None:
    """What the value should have been, where it is something else."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key in WHOLES and not (whole and value >= 1):
        return "a whole number of at least 1"
    if key in NUMBERS and not (whole or isinstance(value, float)):
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
