"""Law: a run that is resumed from a checkpoint is the run that was not interrupted, bit for bit, wherever it runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from stormtorch.checkpoint.content import parts
from stormtorch.core.errors import WrongModel
from stormtorch.session.api import Session

from ..thinning import daily
from .models import (
    CHAIN,
    MAX_NORM,
    OTHERS,
    Case,
    adamw,
    frozen,
    on,
    one_thread,  # noqa: F401  # a fixture
    same,
    stream,
)

LORA = next(case for case in OTHERS if case.name == "lora")
TIED = next(case for case in OTHERS if case.name == "tied")
CONV = next(case for case in OTHERS if case.name == "conv")
DROPOUT = next(case for case in OTHERS if case.name == "dropout")
MOE = next(case for case in OTHERS if case.name == "moe")


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


MAKERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adamw": adamw,
    "adam": lambda model: optim.Adam(_trained(model), lr=1e-2, foreach=False),
    "amsgrad": lambda model: optim.AdamW(_trained(model), lr=1e-2, amsgrad=True, foreach=False),
    "sgd-momentum": lambda model: optim.SGD(_trained(model), lr=0.1, momentum=0.9, foreach=False),
    "sgd": lambda model: optim.SGD(_trained(model), lr=0.1, foreach=False),
    "adafactor": lambda model: optim.Adafactor(_trained(model), lr=1e-2, foreach=False),
    "groups": lambda model: optim.AdamW(
        [{"params": _trained(model)[::2], "lr": 1e-2}, {"params": _trained(model)[1::2], "weight_decay": 0.3}]
    ),
    "lbfgs": lambda model: optim.LBFGS(_trained(model), lr=0.1, max_iter=2),
}


class Run:
    """A loop with everything that a checkpoint must hold: a scheduler, clipping, accumulation, random numbers."""

    def __init__(
        self,
        case: Case,
        maker: str,
        *,
        dtype: torch.dtype = torch.float32,
        accumulate: int = 1,
        clip: bool = False,
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.case, self.accumulate, self.clip, self.maker = case, accumulate, clip, maker
        self.model = case.build().to(dtype)
        self.optimizer = MAKERS[maker](self.model)
        self.scheduler = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.device = torch.device(device)
        self.session: Session = stream(self.model, self.optimizer, device=device, **settings)

    def losses(self, start: int, stop: int) -> list[Any]:
        return [self._step(number) for number in range(start, stop)]

    def _step(self, number: int) -> Any:
        found: list[Any] = [random.random(), float(np.random.rand())]

        def backward() -> torch.Tensor:
            total = torch.zeros(()).to(self.device)
            for part in range(self.accumulate):
                batch = on(self.case.batch(number * self.accumulate + part), self.device)
                loss = self.case.loss(self.model, batch) / self.accumulate
                loss.backward()
                total = total + loss.detach().float()
            return total

        if self.maker == "lbfgs":

            def closure() -> torch.Tensor:
                self.optimizer.zero_grad()
                return backward()

            found.append(self.optimizer.step(closure))  # type: ignore[arg-type]
        else:
            found.append(backward())
            if self.clip:
                found.append(self.session.clip_grad_norm_(MAX_NORM).clone())
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return frozen(found)

    def everything(self) -> Any:
        states = [frozen(dict(self.optimizer.state.get(p, {}))) for p in self.model.parameters()]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return frozen(self.model.state_dict()), states, groups, self.scheduler.state_dict()

    def save(self, path: Path, **how: Any) -> None:
        self.session.save(path, also={"scheduler": self.scheduler, "note": {"epoch": 3}}, **how)

    def load(self, path: Path) -> None:
        assert self.session.load(path, also={"scheduler": self.scheduler}) == {"note": {"epoch": 3}}


END = daily(6, 7)


def resumes(
    tmp_path: Path, case: Case, maker: str, *, there: dict[str, Any] | None = None, wait: bool = True, **settings: Any
) -> None:
    """Steps up to ``END``, and four with the rest in another session, which is placed ``there``."""
    random.seed(5)
    np.random.seed(5)
    straight = Run(case, maker, **settings)
    straight.losses(0, 4)
    straight.save(tmp_path / "four", wait=wait)
    expected = straight.losses(4, END)
    everything = straight.everything()
    straight.session.close()
    random.seed(77)
    np.random.seed(77)
    resumed = Run(case, maker, **{**settings, **(there or {})})
    resumed.losses(0, daily(1, 2))  # what it did before must not matter
    resumed.load(tmp_path / "four")
    same(resumed.losses(4, END), expected, "losses")
    same(resumed.everything(), everything, "everything")
    resumed.session.close()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.daily("adamw", "amsgrad", "sgd-momentum", "groups", "lbfgs")
def test_every_optimizer(tmp_path: Path, maker: str) -> None:
    resumes(tmp_path, CHAIN, maker)


@pytest.mark.parametrize(
    ("maker", "dtype"),
    [
        ("adamw", torch.bfloat16),
        ("sgd-momentum", torch.bfloat16),
        ("sgd", torch.bfloat16),
        ("adafactor", torch.bfloat16),
        ("adamw", torch.float16),
        ("sgd-momentum", torch.float16),
    ],
    ids=str,
)
@pytest.mark.daily("adamw-torch.bfloat16", "sgd-momentum-torch.bfloat16", "adafactor", "adamw-torch.float16")
def test_masters(tmp_path: Path, maker: str, dtype: torch.dtype) -> None:
    """Kept as remainders beside bf16, whole beside fp16 and wherever torch's own step runs."""
    resumes(tmp_path, CHAIN, maker, dtype=dtype)


class Scaled(nn.Module):
    """One of its parameters is a number, as the temperature of a contrastive loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = CHAIN.make(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x) * self.scale.exp()
        return y


SCALED = Case("scaled", Scaled, CHAIN.batch, CHAIN.loss)


@pytest.mark.parametrize(
    ("maker", "dtype"),
    [
        *((maker, torch.float32) for maker in ("adamw", "adam", "amsgrad", "sgd-momentum", "adafactor")),
        *((maker, torch.bfloat16) for maker in ("adamw", "adam", "amsgrad", "sgd-momentum", "adafactor")),
        *((maker, torch.float16) for maker in ("adamw", "sgd-momentum", "adafactor")),
    ],
    ids=str,
)
@pytest.mark.daily(
    "adamw-torch.float32", "amsgrad-torch.bfloat16", "adafactor-torch.float16", "sgd-momentum-torch.bfloat16"
)
def test_a_parameter_that_is_one_number(tmp_path: Path, maker: str, dtype: torch.dtype) -> None:
    """Its moments are numbers too, but not of those that lie beside the files."""
    resumes(tmp_path, SCALED, maker, dtype=dtype)


@pytest.mark.parametrize(
    ("maker", "dtype"),
    [("adamw", torch.float32), ("adam", torch.bfloat16), ("adamw", torch.float16), ("sgd-momentum", torch.bfloat16)],
    ids=str,
)
@pytest.mark.daily("adamw-torch.float32", "sgd-momentum")
def test_a_parameter_that_is_one_number_beside_the_files(
    tmp_path: Path, maker: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where earlier versions put its moments. They lie there alone, not with the memory that they are views of."""
    has_file_form = parts._has_file_form
    monkeypatch.setattr(parts, "_has_file_form", lambda key, value, _at_home: has_file_form(key, value, False))
    resumes(tmp_path, SCALED, maker, dtype=dtype)
    assert (tmp_path / "four" / parts.STATE).stat().st_size < 64 << 10


@pytest.mark.parametrize("maker", ["adamw", "amsgrad", "adafactor", "sgd"])
@pytest.mark.daily("adamw", "sgd")
def test_a_master_of_what_is_left_on_the_device_is_refused(tmp_path: Path, maker: str) -> None:
    """torch's own step would fail with the states that belong to one; nothing is changed."""
    run = Run(CHAIN, maker, dtype=torch.bfloat16)
    run.losses(0, 2)
    run.save(tmp_path / "two")
    run.session.close()
    other = Run(CHAIN, maker, dtype=torch.bfloat16, leave=["blocks.3"])
    other.losses(0, 1)
    before = other.everything()
    with pytest.raises(WrongModel, match=r"an fp32 master of 'blocks\.3.*is not streamed here.*leave="):
        other.load(tmp_path / "two")
    same(other.everything(), before, "everything")
    other.losses(1, 2)
    other.session.close()


@pytest.mark.parametrize(
    ("case", "maker"),
    [
        (LORA, "adamw"),
        (TIED, "adamw"),
        (CONV, "sgd-momentum"),
        (DROPOUT, "adamw"),
        (MOE, "sgd-momentum"),
        (MOE, "adamw"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_frozen_tied_buffers_random_and_unused(tmp_path: Path, case: Case, maker: str) -> None:
    resumes(tmp_path, case, maker)


PLACES: dict[str, dict[str, Any]] = {
    "tight": {},
    "serial": {"step": "serial"},
    "backward": {"step": "backward"},
    "kept": {"kept": 99},
    "some kept": {"kept": 3},
    "roomy": {"vram": "1GiB"},
    "delays": {"seed": 1},
    "left": {"leave": ["blocks.3"]},
}


@pytest.mark.parametrize(("here", "there"), [*pairwise([*PLACES, "tight"]), ("kept", "backward"), ("left", "left")])
@pytest.mark.daily("tight-serial", "backward-kept", "some kept-roomy", "delays-left", "left-left")
def test_saved_in_one_placement_loaded_in_another(tmp_path: Path, here: str, there: str) -> None:
    settings = {"step": "forward", "kept": 0, "seed": None, "vram": "tight", "leave": []}
    resumes(
        tmp_path,
        CHAIN,
        "adamw",
        dtype=torch.bfloat16 if "left" not in (here, there) else torch.float32,
        there={**settings, **PLACES[there]},
        **PLACES[here],
    )


@pytest.mark.parametrize(("maker", "dtype"), [("adamw", torch.bfloat16), ("sgd-momentum", torch.float32)], ids=str)
def test_accumulating_and_clipping(tmp_path: Path, maker: str, dtype: torch.dtype) -> None:
    resumes(tmp_path, CHAIN, maker, accumulate=2, clip=True, dtype=dtype)


STREAMED = [name for name in PLACES if name != "left"]


@pytest.mark.gpu
@pytest.mark.parametrize(("here", "there"), [*pairwise([*STREAMED, "tight"]), ("kept", "backward"), ("left", "left")])
def test_on_a_gpu(tmp_path: Path, here: str, there: str) -> None:
    """What is left there is updated by torch's own kernel, which rounds in another way: it has to stay left."""
    settings = {"step": "forward", "kept": 0, "seed": None, "vram": "tight", "leave": []}
    resumes(
        tmp_path,
        CHAIN,
        "adamw",
        device="cuda",
        dtype=torch.bfloat16 if "left" not in (here, there) else torch.float32,
        there={**settings, **PLACES[there]},
        **PLACES[here],
    )


def test_without_masters(tmp_path: Path) -> None:
    resumes(tmp_path, CHAIN, "adamw", dtype=torch.bfloat16, master_dtype=None)


def test_a_scaler(tmp_path: Path) -> None:
    run = Run(CHAIN, "adamw")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.update(512.0)
    run.session.save(tmp_path / "one", also={"scaler": scaler})
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert run.session.load(tmp_path / "one", also={"scaler": other}) == {}
    assert other.get_scale() == 512.0
    run.session.close()


def test_saving_again_after_loading_writes_the_same_files(tmp_path: Path) -> None:
    """The state itself makes the round trip, every byte of it."""
    run = Run(CHAIN, "adamw", dtype=torch.bfloat16, kept=3)
    run.losses(0, 3)
    run.save(tmp_path / "one")
    run.losses(3, 5)
    run.load(tmp_path / "one")
    run.save(tmp_path / "two")
    run.session.close()
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == 4
    for file in files:
        if file.name != "manifest.json":
            assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_steps_are_counted_through(tmp_path: Path) -> None:
    from stormtorch.checkpoint.folders.manifest import read_manifest

    run = Run(CHAIN, "adamw")
    run.losses(0, 3)
    run.save(tmp_path / "three")
    run.session.close()
    run = Run(CHAIN, "adamw")
    run.load(tmp_path / "three")
    run.losses(3, 5)
    run.save(tmp_path / "five")
    run.session.close()
    assert [read_manifest(tmp_path / name).step for name in ("three", "five")] == [3, 5]


def test_a_save_in_a_hook_of_the_step_is_of_that_step(tmp_path: Path) -> None:
    from stormtorch.checkpoint.folders.manifest import read_manifest

    run = Run(CHAIN, "adamw")
    run.losses(0, 2)
    run.optimizer.register_step_post_hook(lambda *_: run.save(tmp_path / "hook"))
    run.losses(2, 3)
    run.session.close()
    assert read_manifest(tmp_path / "hook").step == 3


def test_saving_changes_no_number(tmp_path: Path) -> None:
    def losses(save: bool) -> Any:
        run = Run(DROPOUT, "adamw")
        torch.manual_seed(3)
        found = []
        for number in range(4):
            found.append(run.losses(number, number + 1)[0][2:])
            if save:
                run.save(tmp_path / f"{number}", wait=number % 2 == 0)
        run.session.close()
        return found

    same(losses(True), losses(False), "losses")
