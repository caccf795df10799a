"""Chromium, for tests that open pages in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found on the path")

SIZE = {"width": 1280, "height": 900}


@contextmanager
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Page:
    """A page that is open, and what it complained about or asked for."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        self.file = file
        self.context = browser.new_context(**{"viewport": SIZE} | context)
        self.tab = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(file.as_uri())

    def get(self, what: str) -> Any:
        """What the script of a timeline's page says of itself."""
        return self.tab.evaluate(f"penstock.{what}")

    def settle(self) -> None:
        """Wait for the frame that has been asked for."""
        self.tab.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def wheel(self, amount: int, key: str | None = None) -> None:
        """Turn it where the pointer is, with a key held down or without."""
        if key:
            self.tab.keyboard.down(key)
        self.tab.mouse.wheel(0, amount)
        self.settle()
        if key:
            self.tab.keyboard.up(key)

    def point(self, slot: int, moment: float, kind: str = "boxes", panel: int = 0) -> tuple[float, float]:
        place = self.tab.evaluate("([p, s, t, k]) => penstock.place(p, s, t, k)", [panel, slot, moment, kind])
        self.tab.mouse.move(place["x"], place["y"])
        self.settle()
        return place["x"], place["y"]

    def close(self) -> None:
        """It said nothing and asked no network for anything."""
        self.context.close()
        assert self.complaints == []
        assert self.requests == [self.file.as_uri()]
