"""What is wrong with a config: each fault with its place, all of them in one message."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from penstock.errors import FormatError

LONGEST = 60  # signs of a value that a message repeats


@dataclass(frozen=True)
class Fault:
    """A dotted key, what was expected there, what came, and what to do where that is not plain."""

    path: str
    expected: str
    came: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, but got {self.came}" + (f"; {self.do}" if self.do else "")


def shown(value: Any) -> str:
    """A value as a TOML file would have it, or nearly."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def unknown_key(name: str, section: str, homes: dict[str, set[str]]) -> Fault:
    """A key that is none: with the nearest right one, or the section it belongs to."""
    path = f"{section}.{name}" if section else name
    do = nearest(name, homes[section])
    home = next((home for home, keys in homes.items() if name in keys and home != section), None)
    if home is not None:
        do = f"it belongs in [{home}]" if home else f"write it as [{name}]"
    return Fault(path, f"a key of [{section}]" if section else "a section", "an unknown one", do)


def nearest(name: str, known: set[str]) -> str:
    """What may have been meant."""
    near = get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(sorted(known))}"


def require_none(where: str, faults: list[Fault]) -> None:
    """One error for all faults."""
    if len(faults) == 1:
        fault = faults[0]
        do = fault.do or "correct it"
        raise FormatError(f"{where}: {fault.path}", fault.expected, fault.came, do)
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise FormatError(where, "a config without faults", f"{len(faults)} of them", f"correct each:{lines}")
