"""What the tests of native/ share: the library or a skip, both kinds of worker, flag words, and tensors to update."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from stormtorch.native import library as library_module
from stormtorch.native.library import Library, describe, library
from stormtorch.native.split import split
from stormtorch.native.update import AdamTensors
from stormtorch.native.worker.jobs import FlagValue, Worker
from stormtorch.native.worker.open import open_worker

MakeTensors = Callable[..., AdamTensors]


@pytest.fixture
def native() -> Library:
    found = library()
    if found is None:
        pytest.skip(describe())
    return found


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package had been installed without a compiler."""
    monkeypatch.setattr(library_module, "_load", lambda: "hidden by a test")


@pytest.fixture(params=["native", "fallback"])
def open_any(request: pytest.FixtureRequest) -> Iterator[Callable[..., Worker]]:
    """``open_worker`` for each kind of worker in turn; what a test leaves open is closed."""
    request.getfixturevalue("native" if request.param == "native" else "no_library")
    opened: list[Worker] = []

    def open_one(threads: int | None = None) -> Worker:
        opened.append(open_worker(threads=threads))
        return opened[-1]

    yield open_one
    for worker in opened:
        worker.close()


class Words:
    """Flag words of this process, by index."""

    def __init__(self, count: int) -> None:
        self.tensor = torch.zeros(count, dtype=torch.int32)

    def at(self, index: int, value: int = 1) -> FlagValue:
        return FlagValue(self.tensor.data_ptr() + 4 * index, value, owner=self.tensor)

    def __getitem__(self, index: int) -> int:
        return int(self.tensor[index])

    def __setitem__(self, index: int, value: int) -> None:
        """Whatever was there before; `FlagValue.write` only moves forward."""
        ctypes.c_uint32.from_address(self.tensor.data_ptr() + 4 * index).value = value


@pytest.fixture
def words() -> Words:
    return Words(1024)


@pytest.fixture
def make_tensors() -> MakeTensors:
    """Tensors of ``count`` elements in the middle of a run, moments not zero. ``offset`` spoils the alignment."""

    def make(
        count: int,
        weight: torch.dtype = torch.float32,
        grad: torch.dtype = torch.float32,
        seed: int = 0,
        offset: int = 0,
    ) -> AdamTensors:
        generator = torch.Generator().manual_seed(seed)

        def normal() -> torch.Tensor:
            return torch.randn(count + offset, generator=generator)[offset:]

        value = normal()
        image, master = value, None
        if weight == torch.bfloat16:
            image, master = split(value)
        elif weight == torch.float16:
            image, master = value.half(), value
        return AdamTensors(
            weight=image,
            master=master,
            exp_avg=normal() * 0.1,
            exp_avg_sq=normal() ** 2 * 0.01,
            grad=normal().to(grad),
        )

    return make
