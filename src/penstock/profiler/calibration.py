"""A calibration: a TOML file with the measured throughput of a device. Keys that it leaves out keep their known values.

device = "h100"            # which; another name makes another device, and then peaks and bandwidth are needed
bandwidth = 3.35e12        # bytes/s
memory_share = 0.85        # of it, by large kernels that are bound by memory
memory_ramp = 1e-6         # seconds; a kernel of that length reaches half of it
matmul_share = 0.75        # of a peak, by large matrix products; also matmul_ramp
attention_share = 0.5
launch = 5e-6              # seconds from one kernel to the next

[peaks]                    # operations/s: fp64, fp32, tf32, bf16, fp16
bf16 = 989e12
"""

from __future__ import annotations

from dataclasses import asdict, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from penstock.core.toml_file import read_toml
from penstock.errors import FormatError, InputError
from penstock.profiler.devices import ARITHMETICS, MACHINES, Machine, full_name, machine_of

SHARES = ("matmul_share", "attention_share", "memory_share")
SECONDS = ("launch", "matmul_ramp", "memory_ramp")
NUMBERS = ("bandwidth", *SHARES, *SECONDS)
KEYS = ("device", "peaks", *NUMBERS)


def read_machine(device: str | None, calibration: str | Path | None = None) -> Machine:
    """Return a device by its name, corrected by a calibration."""
    if calibration is None:
        if device is None:
            raise InputError("a device to estimate for", "none", f"give device, such as {', '.join(MACHINES)}")
        return machine_of(device)
    table, where = read_toml(Path(calibration), "calibration"), str(calibration)
    _require_keys(where, table)
    kind = _kind(where, device, table)
    given: dict[str, Any] = {key: float(table[key]) for key in NUMBERS if key in table}
    peaks = {key: float(value) for key, value in table.get("peaks", {}).items()}
    if kind in MACHINES:
        base = MACHINES[kind]
        return replace(base, **given, peaks={**base.peaks, **peaks})
    for key, value in (("peaks", peaks), ("bandwidth", given.get("bandwidth"))):
        if not value:
            expected = f"{key}, for a device that is not known ({', '.join(MACHINES)} are)"
            raise FormatError(f"{where}: {key}", expected, "none", "add it, or correct device")
    least = min(peaks.values())
    return Machine(kind, **given, peaks={name: peaks.get(name, least) for name in ARITHMETICS})


def calibration_text(machine: Machine) -> str:
    """Return a calibration file that defines this machine completely."""
    table = asdict(machine)
    lines = [f'device = "{machine.kind}"', *(f"{key} = {table[key]:.6g}" for key in NUMBERS)]
    return "\n".join([*lines, "", "[peaks]", *(f"{key} = {value:.6g}" for key, value in machine.peaks.items()), ""])


def _require_keys(where: str, table: dict[str, Any]) -> None:
    for key, value in table.items():
        _require_known(where, key, KEYS)
        if key == "device" and not (isinstance(value, str) and value):
            raise FormatError(f"{where}: device", "the name of a device", repr(value), "correct it")
        if key == "peaks" and not isinstance(value, dict):
            raise FormatError(f"{where}: peaks", "a table of operations/s", repr(value), "write it as [peaks]")
        if key in NUMBERS:
            _require_number(f"{where}: {key}", value, key)
    for key, value in table.get("peaks", {}).items():
        _require_known(f"{where}: peaks", key, ARITHMETICS)
        _require_number(f"{where}: peaks.{key}", value, key)


def _require_known(where: str, key: str, keys: tuple[str, ...]) -> None:
    if key not in keys:
        near = get_close_matches(key, keys, n=1)
        do = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(keys)}"
        raise FormatError(f"{where}: {key}", "a key of a calibration", "an unknown one", do)


def _require_number(where: str, value: object, key: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if key in SECONDS:
        expected, good = "seconds, 0 or more", number and value >= 0  # type: ignore[operator]
    elif key in SHARES:
        expected, good = "a share above 0 and at most 1", number and 0 < value <= 1  # type: ignore[operator]
    else:
        expected, good = "a number above 0", number and value > 0  # type: ignore[operator]
    if not good:
        raise FormatError(where, expected, repr(value), "correct it")


def _kind(where: str, device: str | None, table: dict[str, Any]) -> str:
    """Return the device: the file's or the argument's; both must agree."""
    named = full_name(table["device"]) if "device" in table else None
    if device is None and named is None:
        raise FormatError(f"{where}: device", "the name of a device, here or as a flag", "none", "add it")
    if device is None or named is None or full_name(device) == named:
        kind = named or full_name(str(device))
        return kind if named else machine_of(kind).kind
    raise FormatError(
        f"{where}: device", f"{device!r}, as requested", repr(table["device"]), "give the calibration of that device"
    )
