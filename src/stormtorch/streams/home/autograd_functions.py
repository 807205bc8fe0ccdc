"""Passes device views of streamed parameters to ``torch.autograd.Function``, which does not ask their class.

All other torch functions pass through ``__torch_function__``, where parameter.py replaces a parameter by its device
view (twin). ``Function.apply`` does not, so a fused loss that is given ``lm_head.weight`` would get the weight in home
memory. While a session is open, the same replacement is done between ``Function.apply`` and torch's C++: it is set as
``apply`` of the class between the two, which has none of its own. ``Function`` itself is unchanged, and
``mul = Mul.apply``, taken before, is covered too.

The road not taken: setting twins as attributes of all modules while a forward runs, for code that reads a weight
without calling its module. That brings a unit to the device for a mere ``weight.dtype``, and code that swaps
parameters, such as ``torch.func.functional_call``, would put the twin back in the parameter's place.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from ..bridge.torch_private import FUNCTION_BASE, never_traced
from .fetch import Fetch
from .parameter import Access, HomeParameter, HomeView, for_function

_sessions: weakref.WeakSet[Access] = weakref.WeakSet()
_lock = threading.RLock()  # a session may end in the middle of a call


def attach(access: Access) -> None:
    """Pass twins of this session's parameters to functions from now on."""
    with _lock:
        _sessions.add(access)
        FUNCTION_BASE.apply = _exchanging
    weakref.finalize(access, _leave).atexit = False


def detach(access: Access) -> None:
    """Stop that; the last session restores torch."""
    with _lock:
        _sessions.discard(access)
    _leave()


def _leave() -> None:
    with _lock:
        if not [*_sessions] and vars(FUNCTION_BASE).get("apply") is _exchanging:
            del FUNCTION_BASE.apply


@never_traced
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if cls is not Fetch:  # Fetch takes the parameters themselves, as leaves
        for arg in args:
            if isinstance(arg, (HomeParameter, HomeView)):
                args = for_function(args)
                break
    return super(FUNCTION_BASE, cls).apply(*args, **kwargs)


_exchanging = classmethod(_apply)
