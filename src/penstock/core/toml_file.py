"""Tables from TOML files: a message about one begins with its name, and with the line where that is known."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from penstock.core.given import shown
from penstock.errors import FormatError

LEAST, MOST = -(2**63), 2**63 - 1  # whole numbers that TOML promises, and that tensors and generators can take


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """What the file holds. `what` it should be."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(str(path), f"a readable {what}", error.strerror, "check the path") from None
    except UnicodeDecodeError:
        raise FormatError(str(path), "a TOML file in UTF-8", "another encoding", "save it as UTF-8") from None
    except RecursionError:
        raise FormatError(str(path), "TOML", "brackets within brackets without end", "correct the file") from None
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        line = re.search(r"\(at line (\d+), column (\d+)\)", said)
        where = f"{path}:{line[1]}:{line[2]}" if line else str(path)
        came = said[: line.start()].strip() if line else said
        raise FormatError(where, "TOML", came[:1].lower() + came[1:], "correct the line") from None
    except ValueError:  # Python's limit
        raise FormatError(str(path), "TOML", "a whole number of thousands of digits", "correct it") from None
    require_numbers(table, str(path))
    return table


def require_numbers(value: Any, where: str, key: str = "") -> None:
    """Refuse whole numbers of more than 64 bits, wherever in a table they stand."""
    if isinstance(value, dict):
        for name, inner in value.items():
            require_numbers(inner, where, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            require_numbers(inner, where, f"{key}[{at}]")
    elif isinstance(value, int) and not LEAST <= value <= MOST:
        raise FormatError(f"{where}: {key}", f"a whole number of {LEAST} to {MOST}", shown(value), "correct it")
