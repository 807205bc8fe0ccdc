"""What user code does with ``p.grad``: it reads, replaces, adds to and clears gradients in home memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ...core.errors import StormError
from ..bridge.lock import locked
from ..bridge.torch_private import without_torch_function
from ..gradients.home import GradHome
from ..home.parameter import Access, HomeView, home_view, joined, plain
from ..home.torch_grad import has_sparse_grad, real_grad, set_real_grad
from ..units.unit import Place
from .updater import Conductor


class UserGradients:
    """Gradients as user code sees them."""

    def __init__(self, schedule: Conductor) -> None:
        self._schedule, self._gradients, self._residences = schedule, schedule.gradients, schedule.weights.residences
        self.lock = schedule.gradients.lock

    def grad(self, place: Place, access: Access) -> torch.Tensor | None:
        """``p.grad``; does not wait for its values."""
        home = self._gradients.homes[place.unit.index]
        if place.index not in home.consumed_places and real_grad(place) is None:  # without the lock: changes nothing
            if place.index not in home.present:
                return None
            if (view := _given(home, place)) is not None:
                return view
        return self._made_grad(home, place, access)

    @locked
    def _made_grad(self, home: GradHome, place: Place, access: Access) -> torch.Tensor | None:
        real = real_grad(place)
        if real is not None:
            if not place.trained or self._is_sparse(place):
                return real
            if real.requires_grad:
                return self._with_graph(home, place, real)
            self.fold(place)
        if place.index in home.consumed_places:
            return home_view(home.memory.spent(place), access, place, "grad")
        if place.index not in home.present:
            return None
        if (view := _given(home, place)) is None:
            view = home.latest = home_view(home.view(place), access, place, "grad")
            home.given[place.index] = weakref.ref(view)
        return view

    def norm(self, place: Place) -> torch.Tensor | None:
        """The 2-norm of ``p.grad``, on the CPU; None if the device has none, or the gradient is to be scaled."""
        home = self._gradients.homes[place.unit.index]
        if not home.has_norm(place.index) or place.index in home.consumed_places or self._schedule.updater.is_scaled():
            return None
        home.measure()
        if home.norms_here is None or home.norms_here[0] is not home.norms:
            self._fetch_norms()
        assert home.norms_here is not None
        return home.norms_here[1][place.index]

    @locked
    def _fetch_norms(self) -> None:
        """Copy all norms to the CPU at once: each copy waits for the device."""
        for home in self._gradients.homes:
            home.measure()
        homes = [home for home in self._gradients.homes if home.norms]
        norms = [norm for home in homes for norm in home.norms.values()]
        here = iter(torch.stack([norm.to(torch.float64) for norm in norms]).cpu().unbind())
        for home in homes:
            values = {index: next(here).to(norm.dtype) for index, norm in home.norms.items()}
            home.norms_here = home.norms, values

    @locked
    def scale(self, place: Place, factor: torch.Tensor) -> bool:
        """Multiply ``p.grad`` by ``factor`` when its values are next used; False if that cannot be deferred."""
        home = self._gradients.homes[place.unit.index]
        # A gradient that user code has written or could write without our notice has no norm.
        is_untouched = home.has_norm(place.index) and place.index not in home.consumed_places
        return is_untouched and self._schedule.updater.scale(home, place.index, factor)

    def _is_sparse(self, place: Place) -> bool:
        """Whether the gradient is only sparse; where there is a dense one too, the sparse one is added to it."""
        return has_sparse_grad(place) and place.index not in self._gradients.homes[place.unit.index].present

    def _with_graph(self, home: GradHome, place: Place, real: torch.Tensor) -> torch.Tensor:
        """Keep a gradient made with ``create_graph=True`` in the parameter's own slot until a step asks for it, with
        the earlier gradient added."""
        if place.index not in home.present:
            return real
        self._schedule.updater.apply_factor()
        home.join()
        with torch.enable_grad():
            real = (home.view(place).clone() + real).to(place.dtype)
        self.set_grad(place, None)
        set_real_grad(place, real)
        return real

    def _let_go_of_views(self, home: GradHome, indices: Iterable[int]) -> None:
        if home.held(indices):
            self._schedule.updater.apply_factor()
        home.let_go_of_views(indices)

    @locked
    def set_grad(self, place: Place, value: torch.Tensor | None) -> None:
        """``p.grad = value``."""
        home = self._gradients.homes[place.unit.index]
        if not place.trained:
            set_real_grad(place, value)
            return
        if value is not None:
            _refuse_unlike(value, place)  # before anything is dropped
        if value is None or value.layout is not torch.strided:
            self._drop(home, place)
            set_real_grad(place, None if value is None else value.to("cpu"))
            return
        if place.index not in home.consumed_places:
            home.home_bytes()  # raises if there is no room for it, before anything is dropped
        set_real_grad(place, None)
        if place.index in home.present - home.consumed_places and _is_same(value, home.view(place)):
            value._storm_whole = True  # type: ignore[attr-defined]
            return  # p.grad = p.grad, which is how p.grad *= 2 ends: existing views remain valid
        joined(value)
        self._let_go_of_views(home, [place.index])
        self._write(home, place, plain(value).detach().to("cpu"), add=False)

    def _drop(self, home: GradHome, place: Place) -> None:
        """Forget the gradient in home memory."""
        if place.index in home.consumed_places:
            self._schedule.before_dropping()
        self._let_go_of_views(home, [place.index])
        home.present.discard(place.index)
        home.shared.discard(place.index)
        home.consumed_places.discard(place.index)
        home.forget_norm(place.index)
        if not home.present:
            home.there, home.is_wide = None, False
            self._residences[place.unit.index].outdated = False

    @locked
    def fold(self, place: Place) -> None:
        """Add the gradient in the parameter's own slot: torch puts those of hooked parameters and regularisers
        there."""
        real = real_grad(place)
        if real is None or not place.trained or self._is_sparse(place):
            return
        home = self._gradients.homes[place.unit.index]
        if place.index in home.consumed_places:
            set_real_grad(place, None)
            raise used_up(place.name)
        home.home_bytes()  # raises if there is no room for it, while the gradient is in the slot
        set_real_grad(place, None)
        self._schedule.updater.apply_factor()
        self._write(home, place, real.detach(), add=place.index in home.present)

    @locked
    def clear(self) -> None:
        """``zero_grad(set_to_none=True)`` of all gradients. Does not wait: a store that ends later leaves garbage."""
        for home in self._gradients.homes:
            for place in home.unit.trained:
                if real_grad(place) is not None:
                    set_real_grad(place, None)
            self._let_go_of_views(home, list(home.given))
            home.present.clear()
            home.forget_norms()
            home.shared.clear()
            home.consumed_places.clear()
            home.there, home.is_wide = None, False
            self._residences[home.unit.index].outdated = False

    def _write(self, home: GradHome, place: Place, value: torch.Tensor, *, add: bool) -> None:
        """Write ``value`` to home memory from the host."""
        self._gradients.memory.prepare()
        home.join()
        self._schedule.updater.join(home.unit)
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
        home.forget_norm(place.index)
        self._residences[home.unit.index].outdated = True

    def _widen(self, home: GradHome) -> None:
        """Convert own gradients to wide ones, on the host."""
        home.memory.wide(home.unit)
        self._let_go_of_views(home, list(home.given))
        old = {index: home.view(home.unit.places[index]) for index in home.present}
        home.is_wide = True
        for index, tensor in old.items():
            home.view(home.unit.places[index]).copy_(tensor)


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


def used_up(name: str) -> StormError:
    """The error where gradients come for a parameter whose gradients an update in backward has used."""
    return StormError(
        f"The gradients of {name!r} were used up in backward, or came from a backward inside of it (reentrant "
        "checkpointing), or belong to no optimizer and were not set to None, and there is more to add to them. "
        'step="backward" updates each unit as its gradients arrive: call optimizer.step() and zero_grad() after each '
        'backward, freeze what is not trained (requires_grad_(False)), or use step="forward" to accumulate.'
    )


def _given(home: GradHome, place: Place) -> HomeView | None:
    """The view that user code holds of this gradient: ``p.grad`` is the same object each time."""
    given = home.given.get(place.index)
    return None if given is None else given()
