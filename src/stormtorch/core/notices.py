"""Things a user should hear once: a fallback that was taken, and what it costs.

They go to the ``stormtorch`` logger at WARNING, which Python prints on stderr when nobody configured logging.
"""

from __future__ import annotations

import logging
import threading

_logger = logging.getLogger("stormtorch")
_said: set[str] = set()
_lock = threading.RLock()  # a signal handler may have something to say, too


def say_once(message: str, *, key: str | None = None) -> bool:
    """Log ``message`` unless its ``key`` (by default the message itself) was said before in this process."""
    with _lock:
        if (key or message) in _said:
            return False
        _said.add(key or message)
    _logger.warning(message)
    return True


def forget_notices() -> None:
    """Let every notice be said again. For tests."""
    with _lock:
        _said.clear()
