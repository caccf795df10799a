"""How long a rank has really waited: the time in which it was itself stopped does not count."""

from __future__ import annotations

import threading

PAUSE = 2.0  # seconds between two questions of one wait, which come every 0.2: nobody was there to ask


class Patience(threading.local):
    """Of one thread."""

    def __init__(self) -> None:
        self.began = self.last = self.away = 0.0

    def counted(self, now: float, waited: float) -> float:
        """Seconds of the wait in which this process was running."""
        began = now - waited
        if abs(began - self.began) > 0.05:
            self.began, self.away = began, 0.0
        elif now - self.last > PAUSE:
            self.away += now - self.last
        self.last = now
        return waited - self.away
