"""Streamed parameters as arguments of a ``torch.autograd.Function``: the one door that does not ask their class.

What torch computes passes through ``__torch_function__``, where parameter.py puts the device view of a parameter in its
place. ``Function.apply`` does not, and a fused loss that is given ``lm_head.weight`` would get the weight in home
memory. So, while a session is open, the same exchange stands on the way from ``Function.apply`` to torch's C++: as
``apply`` of the class between the two, which has none of its own. ``Function`` itself stays as it is, and
``mul = Mul.apply``, taken before, comes by here too.

The road not taken: modules whose attributes are twins, while a forward runs, for whoever reads a weight without calling
its module. That brings a unit to the device for a mere ``weight.dtype``, and whoever swaps parameters, as
``torch.func.functional_call`` does, would put the twin back in the parameter's place.
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
    """From now on functions get the twins of these parameters."""
    with _lock:
        _sessions.add(access)
        FUNCTION_BASE.apply = _exchanging
    weakref.finalize(access, _leave).atexit = False


def detach(access: Access) -> None:
    """The last one leaves torch as it was."""
    with _lock:
        _sessions.discard(access)
    _leave()


def _leave() -> None:
    with _lock:
        if not [*_sessions] and vars(FUNCTION_BASE).get("apply") is _exchanging:
            del FUNCTION_BASE.apply


@never_traced
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if cls is not Fetch:  # whose leaves are the parameters themselves
        for arg in args:
            if isinstance(arg, (HomeParameter, HomeView)):
                args = for_function(args)
                break
    return super(FUNCTION_BASE, cls).apply(*args, **kwargs)


_exchanging = classmethod(_apply)
