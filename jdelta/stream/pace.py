"""How often a reader looks for a new version.

Versions come at some cadence. A reader that looks 20 times between two of them learns
of each within 5 % of that time, and while nothing comes it looks ever less often.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

LOOKS = 20
SHORTEST_SECONDS = 0.1
LONGEST_SECONDS = 30.0
_VERSIONS = 5


class Pace:
    """Seconds from one look at a bucket to the next.

    A twentieth of the usual time between versions, or of the time since the last one
    where that is longer, but at least 0.1 s and at most 30 s. So a version is seen
    within 5 % of the cadence at 20 looks a version. A look is three small requests: at
    most 108,000 an hour, where versions come every two seconds or faster, 3,600 where
    one comes a minute, 360 where nothing is published.

    Args:
        fixed: Always this many seconds.
    """

    def __init__(self, fixed: float | None = None):
        """Starts as if a version had just come."""
        self._fixed = fixed
        self._last = time.monotonic()
        self._between: deque[float] = deque(maxlen=_VERSIONS)

    def came(self, versions: int = 1) -> None:
        """So many new versions were seen at once."""
        now = time.monotonic()
        self._between.append((now - self._last) / max(1, versions))
        self._last = now

    def wait(self) -> float:
        """Seconds until the next look."""
        if self._fixed is not None:
            return self._fixed
        usual = statistics.median(self._between) if self._between else 0.0
        since = time.monotonic() - self._last
        return min(LONGEST_SECONDS, max(SHORTEST_SECONDS, usual / LOOKS, since / LOOKS))
