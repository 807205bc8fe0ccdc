"""Gathers a unit's gradients on the device in one flat bucket, measures them, and stores them home in one copy.

A unit's home gradients are in one of three forms:

    none   no gradient; the buffers hold garbage
    own    in the parameters' dtypes: one backward pass has contributed
    wide   in fp32: several passes have contributed, or user code has added to it; same as own for fp32 parameters

``present`` says which parameters have a gradient: a parameter that was not used has none, and the optimizer skips it,
as torch does. Gradients are added up on the device in the order of plain PyTorch: first all uses within one backward
pass, then that sum to the earlier gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ...core.errors import StormError
from ...core.tags import Tag
from ...memory.lanes.build import Lanes
from ...memory.lanes.lane import Lane
from ...memory.lanes.waits import WaitMeter
from ..bridge.lock import locked
from ..bridge.torch_private import at_end_of_backward, current_pass, without_torch_function
from ..home.fetch import Token
from ..home.parameter import HomeView, joined, move_views, plain
from ..home.torch_grad import has_sparse_grad, real_grad, reception, set_real_grad
from ..units.unit import Place, Unit
from ..weights.stream import ParameterStream
from .buckets import Buckets
from .home import GradHome, Partial


class GradientStream:
    """Collects, adds up, measures and stores gradients."""

    def __init__(
        self,
        homes: list[GradHome],
        *,
        lanes: Lanes,
        parameters: ParameterStream,
        waits: WaitMeter,
        make_own: Callable[[], list[torch.Tensor]],
        make_wide: Callable[[Unit], torch.Tensor],
        serial: bool,
        poison: Lane | None,
    ) -> None:
        """``make_own`` gives the home buffers when the first gradient comes, ``make_wide`` gives an fp32 one on
        demand."""
        self.homes, self._lanes, self._parameters = homes, lanes, parameters
        self._waits = waits
        self._make_own, self._make_wide, self._serial = make_own, make_wide, serial
        # Set when an optimizer is taken over:
        self.consume: Callable[[GradHome], None] | None = None  # for step="backward"
        self.before_dropping: Callable[[], None] = lambda: None  # user code drops gradients that backward has used
        self.join_readers: Callable[[Unit], None] = lambda _unit: None  # block until no update reads home gradients
        self.settle: Callable[[], None] = lambda: None  # do deferred clipping now, on the host
        self.before_storing: Callable[[Unit], None] = lambda _unit: None
        self.update_here: Callable[[GradHome, torch.Tensor], bool] = lambda _home, _bucket: False
        # Device bytes where a unit's gradients may remain until its update, or None.
        self.staying: Callable[[Unit, int], torch.Tensor | None] = lambda _unit, _size: None
        for home in homes:
            home.bring = self._bring_home
        self.has_added = False  # whether a gradient was added to that of an earlier pass
        self._ending: set[int] = set()  # passes at whose end gradients are to be finished
        self.lock = parameters.lock
        self._buckets = Buckets(parameters.residency, lanes, waits, poison=poison)

    # --- in backward

    @locked
    def collect(
        self, token: Token, grads: Sequence[torch.Tensor | None], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Take the gradients of one use of a unit; return those that torch itself has to deliver, on the CPU.

        ``wanted``: the gradients that the running backward accumulates.
        """
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
                self.fold(place)  # of earlier passes: torch delivers this one's when all nodes of the unit have run
            if by_torch:
                returned[number] = grad.detach().to("cpu")
                continue
            if frozen:  # frozen since forward
                continue
            grad = grad.detach()  # noqa: PLW2901
            partial[index] = partial[index] + grad if index in partial else grad
        del grads
        if any(other.is_to_come() for other in home.live_tokens() if other is not token):  # more uses in this pass
            if now not in self._ending:
                self._ending.add(now)
                at_end_of_backward(functools.partial(self._end_pass, now))
        else:
            self._finish(home, now)
        return returned

    def forget(self) -> None:
        """Release memory: graphs that outlive the session keep this object alive."""
        self.homes = []
        self._buckets.forget()

    @locked
    def _end_pass(self, number: int) -> None:
        self._ending.discard(number)
        for home in self.homes:
            if number in home.partial:
                self._finish(home, number)

    @locked
    def abandon(self) -> None:
        """Forget the partial results of backward passes that failed."""
        self._ending.clear()
        for home in self.homes:
            home.partial.clear()

    def _finish(self, home: GradHome, number: int) -> None:
        """Gather the gradients of backward pass ``number``, which are complete."""
        partial = home.partial.pop(number, None)
        if partial is not None and partial.grads:
            grads, consume = partial.grads, self.consume
            if set(grads) & (home.consumed_places | (home.present if consume is not None else set())):
                raise _used_up(home.unit.name)
            self.before_storing(home.unit)
            if home.awaits_outer_pass(partial):
                # The outer pass updates the unit when it brings the rest, or step() does if there is none.
                consume = None
            with torch.no_grad():
                stored = self._gather(home, grads, consume=consume is not None)
            if consume is not None and stored:
                consume(home)
            elif stored:
                self._parameters.residences[home.unit.index].outdated = True
        self._parameters.leave(home.unit)

    def _gather(self, home: GradHome, grads: dict[int, torch.Tensor], *, consume: bool) -> bool:
        """Fill the unit's bucket and send it home; False if an update on the device used it up instead."""
        unit, lanes = home.unit, self._lanes
        self._ensure_own()
        self.settle()
        widen = bool(home.present) and unit.has_wide_form
        if widen and home.wide is None:
            home.wide = self._make_wide(unit)
        to_wide = home.is_wide or widen
        size = unit.wide_bytes if to_wide else unit.grad_bytes
        if home.there is not None and home.is_held():
            home.join()  # user code holds views of home memory, and the bucket may lie where the gradients are
        staying = self.staying(unit, size)
        if staying is None:
            self._open_buckets()
        bucket = self._buckets.lend(size) if staying is None else staying
        before = set(home.present), home.is_wide
        try:
            return self._fill(home, grads, bucket, to_wide, stays=staying is not None, consume=consume)
        except BaseException:
            if self._buckets.is_lent:  # compute may have begun to write to it
                self._buckets.take_back(lanes.compute.record())
                if home.there is bucket:  # it has not gone home
                    home.there = None
                    if not home.consumed:
                        home.present, home.is_wide = before
                        home.norms.clear()
            raise

    def _fill(
        self,
        home: GradHome,
        grads: dict[int, torch.Tensor],
        bucket: torch.Tensor,
        to_wide: bool,
        *,
        stays: bool,
        consume: bool,
    ) -> bool:
        unit, lanes = home.unit, self._lanes
        before = set(home.present)
        here = sorted(before | set(grads))
        in_bucket = unit.gradients(here, bucket, wide=to_wide)
        if before:
            self._add_earlier(home, grads, before, in_bucket)
        fresh = [index for index in grads if index not in before]
        if fresh:
            torch._foreach_copy_([in_bucket[index] for index in fresh], [grads[index] for index in fresh])
        norms = _norms([in_bucket[index] for index in here])
        del in_bucket
        for index in here if to_wide != home.is_wide else fresh:  # of the rest, user code keeps the views it holds
            self._let_go_of_views(home, index)
        home.present, home.is_wide = set(here), to_wide
        home.norms = dict(zip(here, norms, strict=True))
        home.there, home.ready = bucket, lanes.compute.record()
        grads.clear()
        if consume and self.update_here(home, bucket):
            home.there = None
            if not stays:
                self._buckets.take_back(lanes.compute.record())
            return False
        if not stays:
            self._bring_home(home)
            assert home.stored is not None
            self._buckets.take_back(home.stored)
        if self._serial:
            home.join()
        return True

    def _bring_home(self, home: GradHome) -> None:
        """Store gradients that are on the device to home memory."""
        target, bucket, lanes = home.wide if home.is_wide else home.own, home.there, self._lanes
        assert target is not None
        assert bucket is not None
        # The worker may still read the gradients of the step before.
        self._parameters.residences[home.unit.index].gate.hold(lanes.store)
        assert home.ready is not None
        lanes.store.wait(home.ready)
        lanes.store.copy(target, bucket, Tag.GRADIENTS, home.unit.index)
        home.arrivals += 1
        lanes.store.write_flag(home.arrived, home.arrivals)
        home.stored, home.there = lanes.store.record(), None

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
        source = home.there if home.there is not None else home.wide if home.is_wide else home.own
        assert source is not None
        lane = lanes.compute if home.there is not None else lanes.load
        earlier = self._parameters.residency.room(source.nbytes, lane, Tag.GRADIENTS)
        uses = []
        if home.there is not None:
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
            place = unit.places[index]
            at, dtype = (place.wide_at, place.wide_dtype) if home.is_wide else (place.grad_at, place.dtype)
            target = in_bucket[index]
            target.copy_(place.view(earlier.bytes, at, dtype))
            if index in grads:
                target.add_(grads[index])
        self._parameters.residency.give(earlier, *uses, lanes.compute.record())

    def prepare(self) -> None:
        """Take the buffers now, before the first gradient."""
        if any(home.unit.trained for home in self.homes):
            self._ensure_own()
            self._open_buckets()

    @locked
    def return_buckets(self) -> None:
        """Return the buckets to the pool for weights: no gradients come for a while."""
        self._buckets.close()

    def _open_buckets(self) -> None:
        self._buckets.open(max(home.unit.grad_bytes for home in self.homes))

    def _ensure_own(self) -> None:
        if self.homes[0].own is None:
            for home, own in zip(self.homes, self._make_own(), strict=True):
                home.own = own

    # --- for user code

    @locked
    def grad(self, place: Place, watch: Callable[[torch.Tensor, Place, str], HomeView]) -> torch.Tensor | None:
        """``p.grad``; does not wait for its values."""
        home = self.homes[place.unit.index]
        if not place.trained or self._is_sparse(place):
            return real_grad(place)
        real = real_grad(place)
        if real is not None and real.requires_grad:
            return self._with_graph(home, place, real)
        self.fold(place)
        if place.index in home.consumed_places:
            return watch(self._consumed_view(home, place), place, "grad")
        if place.index not in home.present:
            return None
        return home.watch(place, watch(home.view(place), place, "grad"))

    def _is_sparse(self, place: Place) -> bool:
        """Whether the gradient is only sparse; where there is a dense one too, the sparse one is added to it."""
        return has_sparse_grad(place) and place.index not in self.homes[place.unit.index].present

    def _with_graph(self, home: GradHome, place: Place, real: torch.Tensor) -> torch.Tensor:
        """Keep a gradient made with ``create_graph=True`` in the parameter's own slot until a step asks for it, with
        the earlier gradient added."""
        if place.index not in home.present:
            return real
        self.settle()
        home.join()
        with torch.enable_grad():
            real = (home.view(place).clone() + real).to(place.dtype)
        self.set_grad(place, None)
        set_real_grad(place, real)
        return real

    def _let_go_of_views(self, home: GradHome, index: int | None = None) -> None:
        """Move views that user code holds to a copy: they keep their values when the buffer is overwritten."""
        for number in list(home.views) if index is None else [index]:
            family = home.views.pop(number, None)
            if family and not home.consumed:
                self.settle()
                home.join()
                place = home.unit.places[number]
                with torch.no_grad():
                    source = home.view(place).as_strided((place.count,), (1,))
                    move_views(family, source, source.clone(), "past")

    @locked
    def set_grad(self, place: Place, value: torch.Tensor | None) -> None:
        """``p.grad = value``."""
        home = self.homes[place.unit.index]
        if not place.trained:
            set_real_grad(place, value)
            return
        if value is not None:
            _refuse_unlike(value, place)  # before anything is dropped
        if value is None or value.layout is not torch.strided:
            self._drop(home, place)
            set_real_grad(place, None if value is None else value.to("cpu"))
            return
        set_real_grad(place, None)
        if place.index in home.present - home.consumed_places and _is_same(value, home.view(place)):
            value._storm_whole = True  # type: ignore[attr-defined]
            return  # p.grad = p.grad, which is how p.grad *= 2 ends: existing views remain valid
        joined(value)
        self._let_go_of_views(home, place.index)
        self._write(home, place, plain(value).detach().to("cpu"), add=False)

    def _drop(self, home: GradHome, place: Place) -> None:
        """Forget the gradient in home memory."""
        if place.index in home.consumed_places:
            self.before_dropping()
        self._let_go_of_views(home, place.index)
        home.present.discard(place.index)
        home.shared.discard(place.index)
        home.consumed_places.discard(place.index)
        home.norms.pop(place.index, None)
        if not home.present:
            home.there = None
            home.is_wide = False
            home.consumed = False
            self._parameters.residences[place.unit.index].outdated = False

    @locked
    def fold(self, place: Place) -> None:
        """Add the gradient in the parameter's own slot: torch puts those of hooked parameters and regularisers
        there."""
        real = real_grad(place)
        if real is None or not place.trained or self._is_sparse(place):
            return
        set_real_grad(place, None)
        home = self.homes[place.unit.index]
        if place.index in home.consumed_places:
            raise _used_up(place.name)
        self.settle()
        self._write(home, place, real.detach(), add=place.index in home.present)

    @locked
    def clear(self) -> None:
        """``zero_grad(set_to_none=True)`` of all gradients. Does not wait: a store that ends later leaves garbage."""
        for home in self.homes:
            for place in home.unit.trained:
                if real_grad(place) is not None:
                    set_real_grad(place, None)
            if home.is_held():
                self._let_go_of_views(home)
            home.present.clear()
            home.norms.clear()
            home.shared.clear()
            home.consumed_places.clear()
            home.there = None
            home.is_wide = home.consumed = False
            self._parameters.residences[home.unit.index].outdated = False

    def _write(self, home: GradHome, place: Place, value: torch.Tensor, *, add: bool) -> None:
        """Write ``value`` to home memory from the host."""
        self._ensure_own()
        home.join()
        self.join_readers(home.unit)
        with torch.no_grad():
            if add and home.unit.has_wide_form and not home.is_wide:
                self._widen(home)
            target = home.view(place)
            if add and value.layout is not torch.strided:  # torch's add_ of these counts a view's offset twice
                target.copy_(target.clone().add_(value.to(target.dtype)))
            elif add:
                target.add_(value)
            else:
                target.copy_(value)
        home.present.add(place.index)
        home.norms.pop(place.index, None)
        self._parameters.residences[home.unit.index].outdated = True

    def _widen(self, home: GradHome) -> None:
        """Convert own gradients to wide ones, on the host."""
        if home.wide is None:
            home.wide = self._make_wide(home.unit)
        self._let_go_of_views(home)
        old = {index: home.view(home.unit.places[index]) for index in home.present}
        home.is_wide = True
        for index, tensor in old.items():
            home.view(home.unit.places[index]).copy_(tensor)

    def _consumed_view(self, home: GradHome, place: Place) -> torch.Tensor:
        assert home.own is not None
        return place.view(home.own, place.grad_at, place.dtype)


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Norms as torch's clipping takes them, but at least in fp32."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        return [_norms([tensor])[0] for tensor in tensors]
    return list(torch._foreach_norm(tensors, 2.0, dtype=torch.float32 if dtypes.pop().itemsize < 4 else None))


def _refuse_unlike(value: torch.Tensor, place: Place) -> None:
    """Raise for values that torch refuses as a gradient. A gradient in fp32 may be assigned as such."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"assigned grad expected to be a Tensor or None but got grad of type {type(value).__name__}")
    if value.shape != place.shape:
        raise RuntimeError(
            f"assigned grad has data of a different size: {tuple(value.shape)} for the parameter {place.name!r} of "
            f"shape {tuple(place.shape)}"
        )
    if value.dtype not in (place.dtype, place.wide_dtype):
        raise RuntimeError(
            f"assigned grad has data of a different type: {value.dtype} for the parameter {place.name!r} of "
            f"{place.dtype}"
        )


def _is_same(value: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether ``value`` is the whole gradient in home memory, not a part or a converted view of it."""
    if not isinstance(value, HomeView):
        return False
    with without_torch_function():
        own = (value.data_ptr(), value.dtype, value.shape, value.stride())
        return own == (view.data_ptr(), view.dtype, view.shape, view.stride())


def _used_up(name: str) -> StormError:
    return StormError(
        f"The gradients of {name!r} were used up in backward, or came from a backward inside of it (reentrant "
        "checkpointing), or belong to no optimizer and were not set to None, and there is more to add to them. "
        'step="backward" updates each unit as its gradients arrive: call optimizer.step() and zero_grad() after each '
        'backward, freeze what is not trained (requires_grad_(False)), or use step="forward" to accumulate.'
    )
