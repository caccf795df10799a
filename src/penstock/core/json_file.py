"""Read objects from JSON files, with errors that begin with the file's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import FormatError, InputError

T = TypeVar("T")


def read_json(path: str | Path, what: str, read: Callable[[Any], T], do: str) -> T:
    """Return `read(data)` for the file's JSON. Error messages contain `what` is expected and what to `do`."""
    try:
        return read(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise FormatError(str(path), f"a readable {what}", error.strerror, "check the path") from None
    except RecursionError:
        raise FormatError(str(path), f"a {what} as JSON", "brackets nested too deeply", do) from None
    except InputError as error:
        raise FormatError(str(path), error.expected, error.came, error.do) from None
    except ValueError as error:
        raise FormatError(str(path), f"a {what} as JSON", f"not JSON: {error}", do) from None
