"""Teams of real processes, for the tests of all reductions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from team import Team, here


@pytest.fixture(scope="module", params=[2, 3, 4])
def team(request) -> Iterator[Team]:
    """Two to four ranks of this host."""
    started = Team(here(request.param))
    yield started
    started.end()


@pytest.fixture(scope="module")
def four() -> Iterator[Team]:
    started = Team(here(4))
    yield started
    started.end()
