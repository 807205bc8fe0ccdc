"""Messages that a user should see once: a fallback that was taken, and its cost.

They go to the ``stormtorch`` logger at WARNING, which Python prints on stderr if logging is not configured.
"""

from __future__ import annotations

import logging
import threading

_logger = logging.getLogger("stormtorch")
_said: set[str] = set()
_lock = threading.RLock()  # a signal handler may have a message, too


def say_once(message: str, *, key: str | None = None) -> bool:
    """Log ``message`` unless its ``key`` (by default the message itself) was logged before in this process."""
    with _lock:
        if (key or message) in _said:
            return False
        _said.add(key or message)
    _logger.warning(message)
    return True


def forget_notices() -> None:
    """Let every notice be logged again. For tests."""
    with _lock:
        _said.clear()
