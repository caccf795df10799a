"""Read TOML files, with errors that begin with the file's name, and the line where it is known."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from penstock.core.validation import shown
from penstock.errors import FormatError

LEAST, MOST = -(2**63), 2**63 - 1  # range of whole numbers in TOML, tensors and random generators


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the table in a TOML file; error messages call the file `what`."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(str(path), f"a readable {what}", error.strerror, "check the path") from None
    except UnicodeDecodeError:
        raise FormatError(str(path), "a TOML file in UTF-8", "another encoding", "save it as UTF-8") from None
    except RecursionError:
        raise FormatError(str(path), "TOML", "brackets nested too deeply", "correct the file") from None
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        line = re.search(r"\(at line (\d+), column (\d+)\)", message)
        where = f"{path}:{line[1]}:{line[2]}" if line else str(path)
        came = message[: line.start()].strip() if line else message
        raise FormatError(where, "TOML", came[:1].lower() + came[1:], "correct the line") from None
    except ValueError:  # beyond Python's limit of digits
        raise FormatError(str(path), "TOML", "a whole number of thousands of digits", "correct it") from None
    require_numbers(table, str(path))
    return table


def require_numbers(value: Any, where: str, key: str = "") -> None:
    """Raise FormatError for whole numbers of more than 64 bits anywhere in a table."""
    if isinstance(value, dict):
        for name, inner in value.items():
            require_numbers(inner, where, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            require_numbers(inner, where, f"{key}[{at}]")
    elif isinstance(value, int) and not LEAST <= value <= MOST:
        raise FormatError(f"{where}: {key}", f"a whole number of {LEAST} to {MOST}", shown(value), "correct it")
