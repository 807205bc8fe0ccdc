"""Gathers a unit's gradients on the device in one flat bucket, measures them, and stores them home in one copy.

Gradients are in the parameters' dtypes if one backward pass has contributed. They are in fp32 (wide) if several have,
or if user code has added to them; for fp32 parameters both forms are the same. `GradState` says where they are.

``present`` says which parameters have a gradient: a parameter that was not used has none, and the optimizer skips it,
as torch does. Gradients are added up on the device in the order of plain PyTorch: first all uses within one backward
pass, then that sum to the earlier gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...core.errors import StormError
from ...core.tags import Tag
from ...memory.lanes.build import Lanes
from ...memory.lanes.lane import Lane
from ...memory.lanes.waits import WaitMeter
from ..bridge.lock import locked
from ..bridge.torch_private import current_pass
from ..home.fetch import Token
from ..home.torch_grad import reception
from ..units.unit import Place
from ..weights.residency import Residency
from .buckets import Buckets
from .home import GradHome, GradState, Partial, norms_of
from .memory import GradMemory
from .parts import Parts, laid_out


class GradientStream:
    """Collects, adds up, measures and stores gradients."""

    def __init__(
        self,
        homes: list[GradHome],
        *,
        lanes: Lanes,
        residency: Residency,
        waits: WaitMeter,
        memory: GradMemory,
        bucket_bytes: int,
        serial: bool,
        poison: Lane | None,
    ) -> None:
        """``bucket_bytes``: gradients of units that need more go home in parts; 0: of none."""
        self.homes, self._lanes, self._residency, self._waits = homes, lanes, residency, waits
        self.memory, self._serial = memory, serial
        self.has_added = False  # whether a gradient was added to that of an earlier pass
        self.lock = residency.lock
        self._buckets = Buckets(residency, lanes, waits, poison=poison)
        self._bucket_bytes = bucket_bytes
        self._parts = Parts(self._buckets, lanes, waits)
        self._added_in_parts: set[int] = set()  # units for whose sums the device had no room

    # --- in backward

    def collect(
        self,
        token: Token,
        grads: Sequence[torch.Tensor | None],
        wanted: Sequence[bool],
        fold: Callable[[Place], None],
    ) -> list[torch.Tensor | None]:
        """Take the gradients of one use of a unit; return those that torch itself has to deliver, on the CPU.

        ``wanted``: the gradients that the running backward accumulates. ``fold`` adds what lies in a parameter's own
        slot to its gradient at home."""
        if not self.homes:
            raise StormError("Cannot run backward: the session that this forward ran in was closed.")
        unit, home = token.unit, self.homes[token.unit.index]
        token.passed = now = current_pass()
        partial = home.partial.setdefault(now, Partial(token.made_in_backward)).grads
        returned: list[torch.Tensor | None] = [None] * len(grads)
        for number, (index, grad) in enumerate(zip(token.places, grads, strict=True)):
            if grad is None or not wanted[number]:
                continue
            place = unit.places[index]
            if torch.is_grad_enabled():  # create_graph=True: p.grad keeps its graph
                returned[number] = grad.to("cpu")
                continue
            real, hooked, frozen = reception(place)
            by_torch = not place.trained or grad.layout is not torch.strided or hooked
            if real is not None and real.layout is not torch.strided and index not in home.present:
                by_torch = True  # sparse, from an earlier pass: torch adds the two up
            if real is not None and not by_torch:
                home.shared.add(index)  # user code computes with the parameter itself: torch adds up both parts
            by_torch = by_torch or index in home.shared
            if real is not None and (index in home.present or index in home.shared or not by_torch):
                fold(place)  # of earlier passes: torch delivers this one's when all nodes of the unit have run
            if by_torch:
                returned[number] = grad.detach().to("cpu")
                continue
            if frozen:  # frozen since forward
                continue
            grad = grad.detach()  # noqa: PLW2901
            partial[index] = partial[index] + grad if index in partial else grad
        return returned

    def forget(self) -> None:
        """Release memory: graphs that outlive the session keep this object alive."""
        self.homes = []
        self.memory.forget()
        self._buckets.forget()

    def prepare_sum(self, home: GradHome) -> bool:
        """Make sure of home memory for the sum of the unit's gradients and new ones; True if it will be in fp32."""
        self.memory.prepare()
        widen = bool(home.present) and home.unit.has_wide_form
        if widen:
            self.memory.wide(home.unit)
        if home.state is GradState.ON_DEVICE and home.held(home.given):
            home.join()  # user code holds views of home memory, and the bucket may lie where the gradients are
        return home.is_wide or widen

    def goes_in_parts(self, home: GradHome, *, stays: bool) -> bool:
        """Whether the device has no room for the unit's gradients in one piece, or had none for their sum. ``stays``:
        there is memory of the unit's own."""
        is_large = 0 < self._bucket_bytes < home.unit.grad_bytes and not stays
        return is_large or (bool(home.present) and home.unit.index in self._added_in_parts)

    def adds_in_parts(self, home: GradHome) -> bool:
        """There was no room to add gradients in one piece; True if parts will do from now on."""
        if home.present:
            self._added_in_parts.add(home.unit.index)
        return bool(home.present)

    def send_in_parts(self, home: GradHome, grads: dict[int, torch.Tensor], *, to_wide: bool, passing: bool) -> None:
        """Add the unit's gradients to earlier ones and store them, part by part. ``passing``: an update follows at
        once."""
        self._open_buckets()
        if home.state is GradState.ON_DEVICE:
            home.bring()
        unit, before, store = home.unit, set(home.present), self._lanes.store
        self.has_added |= bool(before)
        if passing:
            target = self.memory.lend(unit, home.gate, store)
        else:
            target = self.memory.wide(unit) if to_wide else self.memory.own(unit)
            home.gate.hold(store)  # the worker may still read the gradients of the step before
        for index, grad in grads.items():
            grads[index] = laid_out(unit.places[index], grad)  # a norm's bits depend on that
        fresh = [index for index in sorted(grads) if index not in before]
        norms = dict(zip(fresh, norms_of([grads[index] for index in fresh]), strict=True)) if fresh else {}
        try:
            self._parts.send(home, grads, target, to_wide=to_wide)
        except BaseException:
            if self._buckets.is_lent:  # compute may have begun to write to it
                self._buckets.take_back(self._lanes.compute.record())
            home.stored = store.record()  # parts that are on their way must not overwrite what comes next
            for index in before & grads.keys():
                home.forget_norm(index)
            raise
        if to_wide != home.is_wide:
            home.let_go_of_views(before)
        home.present, home.passing = before | grads.keys(), target if passing else None
        changed = before if to_wide != home.is_wide else before & grads.keys()
        home.norms = {index: norm for index, norm in home.norms.items() if index not in changed} | norms
        home.unmeasured, home.is_wide = (home.unmeasured - grads.keys()) | changed, to_wide
        grads.clear()
        if self._serial:
            home.join()

    def lend(self, size: int) -> torch.Tensor:
        """A bucket for ``size`` bytes; compute waits for its last use."""
        self._open_buckets()
        return self._buckets.lend(size)

    def fill(self, home: GradHome, grads: dict[int, torch.Tensor], bucket: torch.Tensor, *, to_wide: bool) -> None:
        """Add up and measure the unit's gradients in ``bucket``."""
        unit = home.unit
        before = set(home.present)
        here = sorted(before | set(grads))
        in_bucket = unit.gradients(here, bucket, wide=to_wide)
        if before:
            self._add_earlier(home, grads, before, in_bucket)
        fresh = [index for index in grads if index not in before]
        if fresh:
            torch._foreach_copy_([in_bucket[index] for index in fresh], [grads[index] for index in fresh])
        norms = norms_of([in_bucket[index] for index in here])
        del in_bucket
        if to_wide != home.is_wide:  # else user code keeps the views that it holds
            home.let_go_of_views(before)
        home.present, home.is_wide = set(here), to_wide
        home.norms, home.unmeasured = dict(zip(here, norms, strict=True)), set()
        home.there, home.ready = bucket, self._lanes.compute.record()
        grads.clear()

    def end_sum(self, home: GradHome, *, used: bool, stays: bool, passing: bool) -> None:
        """Send a full bucket home, unless an update has ``used`` it. ``stays``: its memory is the unit's own.
        ``passing``: an update follows at once."""
        if used:
            home.there = None
            if not stays:
                self._buckets.take_back(self._lanes.compute.record())
            return
        if not stays:
            home.bring(passing=passing)
            assert home.stored is not None
            self._buckets.take_back(home.stored)
        if self._serial:
            home.join()

    def undo(self, home: GradHome, bucket: torch.Tensor, before: tuple[set[int], bool]) -> None:
        """Free ``bucket`` after an error. ``before``: which gradients were present, and whether in fp32."""
        if self._buckets.is_lent:  # compute may have begun to write to it
            self._buckets.take_back(self._lanes.compute.record())
            if home.there is bucket:  # it has not gone home
                home.there = None
                if not home.consumed:
                    home.present, home.is_wide = before
                    home.forget_norms()

    def _add_earlier(
        self,
        home: GradHome,
        grads: dict[int, torch.Tensor],
        before: set[int],
        in_bucket: dict[int, torch.Tensor],
    ) -> None:
        """Add the new gradients to those of earlier backward passes, in the bucket."""
        self.has_added = True
        lanes, unit = self._lanes, home.unit
        source, on_device = home.flat(), home.state is GradState.ON_DEVICE
        lane = lanes.compute if on_device else lanes.load
        earlier = self._residency.room(source.nbytes, lane, Tag.GRADIENTS)
        uses = []
        if on_device:
            assert home.ready is not None
            lane.wait(home.ready)
            earlier.bytes.copy_(source)  # the bucket lies in the same memory, perhaps in another form
        else:
            if home.stored is not None:
                lane.wait(home.stored)
            lane.copy(earlier.bytes, source, Tag.GRADIENTS, unit.index)
            uses.append(lane.record())
            self._waits.wait(uses[0], "gradients", unit.index)
        for index in before:
            target = in_bucket[index]
            target.copy_(unit.places[index].gradient(earlier.bytes, wide=home.is_wide))
            if index in grads:
                target.add_(grads[index])
        self._residency.give(earlier, *uses, lanes.compute.record())

    def prepare(self) -> None:
        """Take the buffers now, before the first gradient."""
        if any(home.unit.trained for home in self.homes):
            self.memory.prepare()
            self._open_buckets()

    @locked
    def return_buckets(self) -> None:
        """Return the buckets to the pool for weights: no gradients come for a while."""
        self._buckets.close()

    def _open_buckets(self) -> None:
        self._buckets.open(self._bucket_bytes or max(home.unit.grad_bytes for home in self.homes))
