"""Nouns from JSON files: whatever is wrong with one, the message begins with its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import FormatError, InputError

Noun = TypeVar("Noun")


def read_json(path: str | Path, what: str, read: Callable[[Any], Noun], do: str) -> Noun:
    """What `read` makes of the file's JSON. `what` the file should hold; `do`: what writes such a file."""
    try:
        return read(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise FormatError(str(path), f"a readable {what}", error.strerror, "check the path") from None
    except RecursionError:
        raise FormatError(str(path), f"a {what} as JSON", "brackets within brackets without end", do) from None
    except InputError as error:
        raise FormatError(str(path), error.expected, error.came, error.do) from None
    except ValueError as error:
        raise FormatError(str(path), f"a {what} as JSON", f"not JSON: {error}", do) from None
