"""What single families need beside the rules of shrink.py: fields of their configurations."""

from __future__ import annotations

from typing import Any

CHANGES: dict[str, dict[str, Any]] = {}
