"""The published profiles, where they are: beside the repository, never inside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.text_profile import read_text_profile

FOLDER = Path(__file__).parents[3] / "shared" / "profiles"
needs_profiles = pytest.mark.skipif(not FOLDER.exists(), reason="the published profiles are not here")


def published(name, samples=1):
    return read_text_profile(FOLDER / f"{name}.txt", samples)
