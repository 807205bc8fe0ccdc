"""Law: frozen weights that RAM has no room for are read from the model's own files, and every number stays the same."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stormtorch.checkpoint import load_weights
from stormtorch.checkpoint.files.tensor_files import read_header
from stormtorch.checkpoint.loading.mapped import map_weights
from stormtorch.core.errors import OutOfBudget, StorageError, StormError, WrongModel
from stormtorch.core.tags import Tag, Tier
from stormtorch.memory.disk.mapped import Mappings
from stormtorch.native.library import library
from stormtorch.session.api import Session
from stormtorch.streams.settings import Settings, Trial
from stormtorch.streams.units import placement

from .checker import Checker, Wait
from .happens_before import checking
from .models import (
    Llama,
    adamw,
    adapt,
    cross_entropy,
    frozen,
    huggingface,
    jitter,
    one_thread,  # noqa: F401  # a fixture
    same,
    tight,
    tokens,
)

safetensors = pytest.importorskip("safetensors.torch")
CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


def lora() -> nn.Module:
    return adapt(Llama(blocks=6))


def tied() -> nn.Module:
    return adapt(Llama(blocks=6, tied=True))


def plain() -> nn.Module:
    return Llama(blocks=6)


def built(make: Make, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def mapped(model: nn.Module, folder: Path, *, trained_too: bool = False, files: int = 2) -> nn.Module:
    """``model``, whose frozen parameters are views of files, as ``from_pretrained`` makes them."""
    chosen = {name: p for name, p in model.named_parameters() if trained_too or not p.requires_grad}
    names = sorted(chosen)
    for number in range(files):
        mine = {name: chosen[name].data.clone() for name in names[number::files]}
        path = folder / f"model-{number}.safetensors"
        safetensors.save_file({**mine, f"odd{number}": torch.zeros(3 + number)}, path)
        with safetensors.safe_open(path, "pt") as file:
            for name in mine:
                chosen[name].data = file.get_tensor(name)
    return model


def least_ram(model: nn.Module, optimizer: torch.optim.Optimizer | None, **settings: Any) -> int:
    """The least that suffices: all that can be is left in files."""
    with pytest.raises(OutOfBudget) as caught:
        Session(model, optimizer, Settings(ram=1, device="cpu", **settings))
    found = re.search(r", (\d+) bytes", caught.value.numbers)
    assert found is not None
    return int(found[1])


def opened(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    more_ram: int = 0,
    vram: int | None = None,
    seed: int | None = None,
    **settings: Any,
) -> Session:
    """A session that leaves in files all that it can, with poison; with a ``seed`` lanes are late."""
    given = {"vram": tight(model) if vram is None else vram, "disk": "/tmp", **settings}
    ram = least_ram(model, optimizer, **given) + more_ram
    trial = Trial(delay=None if seed is None else jitter(CPU, seed), poison=True)
    return Session(model, optimizer, Settings(ram=ram, device="cpu", **given), trial=trial)


def in_files(session: Session) -> list[str]:
    return [place.name for unit in session.units for place in unit.places if place.in_file]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[torch.Tensor]:
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        loss = cross_entropy(model, tokens(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def is_mapped(parameter: torch.Tensor) -> bool:
    return Mappings().span(parameter.data_ptr(), parameter.nbytes) is not None


@pytest.mark.parametrize("loose", [False, True], ids=["tight", "loose"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [lora, pytest.param(tied, marks=pytest.mark.wide)])
def test_adapters_train_with_the_same_numbers(make: Make, dtype: torch.dtype, loose: bool, tmp_path: Path) -> None:
    model = mapped(built(make, dtype), tmp_path)
    twin = copy.deepcopy(model)
    ours, theirs = adamw(model), adamw(twin)
    whole = sum(p.nbytes for p in model.parameters()) * 4
    with Session(twin, theirs, Settings(device="cpu", vram=tight(twin))):
        expected = steps(twin, theirs, 5)
        weights = frozen(twin.state_dict())
    with opened(model, ours, vram=whole if loose else None, seed=0) as session:
        base = {name for name, p in model.named_parameters() if not p.requires_grad}
        there = in_files(session)
        assert base >= set(there)
        assert len(there) >= len(base) * 3 // 4, "the last pages of RAM may have room for a small unit"
        same(steps(model, ours, 5), expected, "losses")
        same(frozen(model.state_dict()), weights, "weights")
        assert session.ledger.used_bytes(Tier.HOST, Tag.PARAMETERS) < sum(p.nbytes for p in model.parameters()) // 2
        session.ledger.check()
        disk, use = session.report().disk, session.plan.disk
        assert disk is not None
        assert use is not None
        if not loose:
            size = sum(model.get_parameter(name).nbytes for name in there)
            assert use.weights_bytes >= size
            assert size <= disk.read_bytes, "in every step"
    same(frozen(model.state_dict()), weights, "weights after close")
    assert all(is_mapped(model.get_parameter(name)) for name in there)


@pytest.mark.parametrize("step", ["forward", "backward", "serial"])
@pytest.mark.parametrize("activations", ["recompute", pytest.param("offload", marks=pytest.mark.wide)])
def test_in_every_mode(step: str, activations: str, tmp_path: Path) -> None:
    model = mapped(built(lora, torch.bfloat16), tmp_path)
    twin = copy.deepcopy(model)
    ours, theirs = adamw(model), adamw(twin)
    with Session(twin, theirs, Settings(device="cpu", vram=tight(twin), step=step)):
        expected = steps(twin, theirs, 3)
    with opened(model, ours, step=step, activations=activations, more_ram=1 << 15) as session:
        assert in_files(session)
        same(steps(model, ours, 3), expected, "losses")


@pytest.mark.parametrize("loose", [False, True], ids=["tight", "loose"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_without_an_optimizer(dtype: torch.dtype, loose: bool, tmp_path: Path) -> None:
    model = mapped(built(plain, dtype), tmp_path, trained_too=True)
    with torch.no_grad():
        expected = [model(tokens(number)[0]) for number in range(4)]
    whole = sum(p.nbytes for p in model.parameters()) * 4
    with opened(model, None, vram=whole if loose else None, seed=1) as session, torch.no_grad():
        assert len(in_files(session)) >= sum(1 for _ in model.parameters()) - 4, "the last pages of RAM may have room"
        same([model(tokens(number)[0]) for number in range(4)], expected, "answers")


def test_only_as_many_units_as_ram_is_short_of(tmp_path: Path) -> None:
    model = mapped(built(plain, torch.float32), tmp_path, trained_too=True)
    with torch.no_grad():
        expected = model(tokens(0)[0])
    whole = sum(p.nbytes for p in model.parameters())
    with opened(model, None, more_ram=whole // 2) as session, torch.no_grad():
        there = [unit.index for unit in session.units if unit.home_bytes < unit.image_bytes]
        assert 0 < len(there) < len(session.units)
        assert max(there) - min(there) >= len(there), "they are spread over the model"
        same([model(tokens(0)[0]) for _ in range(3)], [expected] * 3, "answers")


def test_ram_with_room_holds_all(tmp_path: Path) -> None:
    model = mapped(built(lora, torch.float32), tmp_path)
    with Session(model, adamw(model), Settings(device="cpu", vram=tight(model), disk="/tmp")) as session:
        assert not in_files(session)


def test_without_disk_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = mapped(built(lora, torch.float32), tmp_path)
    optimizer = adamw(model)
    ram = least_ram(model, optimizer, vram=tight(model), disk="/tmp")
    with pytest.raises(OutOfBudget, match="Cannot hold this model"):
        Session(model, optimizer, Settings(device="cpu", vram=tight(model), ram=ram))
    assert all(is_mapped(p) for p in model.parameters() if not p.requires_grad)


def test_weights_that_were_written_before_have_a_home_in_ram(tmp_path: Path) -> None:
    model = mapped(built(plain, torch.float32), tmp_path, trained_too=True)
    name = "blocks.3.q.weight"
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] += 1
        expected = model(tokens(0)[0])
    with opened(model, None) as session, torch.no_grad():
        assert name not in in_files(session)
        same(model(tokens(0)[0]), expected, "answer")


def _add(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(1)


def _assign(weight: nn.Parameter) -> None:
    weight.data = torch.zeros_like(weight.data)


def _through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(2)


WRITES: list[Callable[[nn.Parameter], None]] = [_add, _assign, _through_data]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused(write: Callable[[nn.Parameter], None], tmp_path: Path) -> None:
    model = mapped(built(plain, torch.float32), tmp_path, trained_too=True)
    with torch.no_grad():
        expected = model(tokens(0)[0])
    before = frozen(model.state_dict())
    with opened(model, None), torch.no_grad():
        with pytest.raises(StormError, match=r"Cannot write 'blocks.2.q.weight'.* it is read from .*safetensors"):
            write(model.get_parameter("blocks.2.q.weight"))
        same(frozen(model.state_dict()), before, "weights")
        same(model(tokens(0)[0]), expected, "answer")
    write(model.get_parameter("blocks.2.q.weight"))  # an ordinary parameter again


def test_a_write_through_an_array_is_noticed(tmp_path: Path) -> None:
    model = mapped(built(plain, torch.float32), tmp_path, trained_too=True)
    with opened(model, None), torch.no_grad():
        expected = model(tokens(0)[0])
        array = model.get_parameter("blocks.2.q.weight").detach().numpy()
        same(model(tokens(0)[0]), expected, "answer")
        array[0, 0] += 1
        with pytest.raises(StormError, match=r"'blocks.2.q.weight' is read from .* was written through"):
            model(tokens(0)[0])


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 64)


def _write(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(data) // 2)
        file.write(b"\x01")


def _replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.replace(path)


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (_truncate, "bytes in place of"),
    (_write, "was written"),
    (_replace, "was replaced"),
    (Path.unlink, "cannot be found"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_file_that_changes_is_an_error(change: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    model = mapped(built(lora, torch.float32), tmp_path)
    optimizer = adamw(model)
    with opened(model, optimizer):
        steps(model, optimizer, 1)
        change(tmp_path / "model-1.safetensors")
        with pytest.raises(StorageError, match=rf"model-1.safetensors.*{message}") as caught:
            steps(model, optimizer, 1)
        assert "\n" not in str(caught.value)


def test_a_read_that_fails_is_an_error_before_any_number(tmp_path: Path) -> None:
    model = mapped(built(plain, torch.float32), tmp_path, trained_too=True)
    session = opened(model, None)
    with torch.no_grad():
        expected = model(tokens(0)[0])
        files = session._parts.ground.files
        assert files is not None
        broken = Path("/proc/self/mem").open("rb", buffering=0)  # noqa: SIM115  # reading address 0 is EIO
        for reads in files._whole.values():
            reads[:] = [read._replace(range=replace(read.range, number=broken.fileno(), offset=0)) for read in reads]
        with pytest.raises(StorageError, match="EIO"):
            model(tokens(1)[0])
        with pytest.raises(StormError):
            model(tokens(1)[0])
    with pytest.raises(StormError):
        session.synchronize()
    with contextlib.suppress(StormError):  # work that was queued may have failed
        session.close()
    broken.close()
    with torch.no_grad():
        same(model(tokens(0)[0]), expected, "answer of the ordinary model")


def _watched(folder: Path, missing: Wait | None = None, **settings: Any) -> Checker:
    """Train adapters, and tell the checker of all work."""
    if library() is None:
        pytest.skip("a Python thread looks at abort words, which the checker knows nothing of")
    model = mapped(built(lora, torch.float32), folder)
    optimizer = adamw(model)
    given = {"vram": tight(model), "disk": "/tmp", **settings}
    ram = least_ram(model, optimizer, **given)
    with (
        checking(missing) as checker,
        Session(model, optimizer, Settings(ram=ram, device="cpu", **given), trial=Trial(poison=True)) as session,
    ):
        assert in_files(session)
        steps(model, optimizer, 2)
    return checker


@pytest.mark.parametrize("step", ["forward", pytest.param("backward", marks=pytest.mark.wide)])
def test_no_lane_and_no_read_meet_in_memory(step: str, tmp_path: Path) -> None:
    _watched(tmp_path, step=step).check()


WAITS = {
    "weights are copied after their read": Wait("files", "Files.load"),
    "a slot is read again after its copies": Wait("read", "Files.load"),
}


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.daily("a slot is read again after its copies")
def test_a_missing_wait_is_found(name: str, tmp_path: Path) -> None:
    checker = _watched(tmp_path, WAITS[name])
    assert checker.missed, "there is no such wait"
    assert checker.races


def _peft(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    adapted: nn.Module = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    layers: Any = adapted.modules()
    for module in layers:
        if hasattr(module, "reset_lora_parameters"):
            for part in (module.lora_A["default"], module.lora_B["default"]):
                part.to_empty(device="cpu")
            module.reset_lora_parameters("default", True)
    return adapted


def _huggingface_steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> list[torch.Tensor]:
    losses = []
    for step in range(count):
        batch = tokens(step)[0]
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    "meta", [pytest.param(False, marks=pytest.mark.wide), True], ids=["from_pretrained", "from meta"]
)
def test_adapters_of_peft(meta: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    torch.manual_seed(0)
    huggingface(tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")  # type: ignore[operator]
    twin = _peft(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    if meta:
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(twin.config, dtype=torch.bfloat16)
        empty.tie_weights()
        for name, buffer in twin.get_base_model().named_buffers():  # type: ignore[operator]
            owner, _, last = name.rpartition(".")
            empty.get_submodule(owner)._buffers[last] = buffer
        model = _peft(empty)
        assert map_weights(model, folder)
    else:
        model = _peft(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    same(frozen(model.state_dict()), frozen(twin.state_dict()), "weights")
    ours, theirs = adamw(model), adamw(twin)
    with Session(twin, theirs, Settings(device="cpu", vram=tight(twin))):
        expected = _huggingface_steps(twin, theirs, 5)
        weights = frozen(twin.state_dict())
        answer = twin.generate(tokens(0)[0], max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    with opened(model, ours) as session:
        assert all("lora" not in name for name in in_files(session))
        assert sum(p.nbytes for p in model.parameters()) > 4 * session.ledger.used_bytes(Tier.HOST, Tag.PARAMETERS)
        same(_huggingface_steps(model, ours, 5), expected, "losses")
        same(frozen(model.state_dict()), weights, "weights")
        same(model.generate(tokens(0)[0], max_new_tokens=8, do_sample=False), answer, "answer")  # type: ignore[operator]
        session.save(tmp_path / "saved")
        same(load_weights(model, folder), sorted(safe_names(folder)), "names")
        same(_huggingface_steps(model, ours, 1), _after(twin, theirs, tmp_path), "loss after loading")


def _after(twin: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> list[torch.Tensor]:
    with Session(twin, optimizer, Settings(device="cpu", vram=tight(twin))) as session:
        session.load(folder / "saved")
        return _huggingface_steps(twin, optimizer, 1)


def safe_names(folder: Path) -> list[str]:
    return [name for file in folder.glob("*.safetensors") for name in read_header(file)]


def test_a_whole_model_is_saved_part_by_part_and_loaded_again(tmp_path: Path) -> None:
    model = mapped(built(lora, torch.float32), tmp_path)
    optimizer = adamw(model)
    with opened(model, optimizer) as session:
        steps(model, optimizer, 2)
        session.save(tmp_path / "saved")
        weights, expected = frozen(model.state_dict()), steps(model, optimizer, 2)
        session.load(tmp_path / "saved")
        same(frozen(model.state_dict()), weights, "weights")
        same(steps(model, optimizer, 2), expected, "losses")
        name = in_files(session)[0]
        with torch.no_grad():
            other = {key: value.clone() for key, value in weights.items()}
        other[name].view(-1)[0] += 1
        (tmp_path / "other").mkdir()
        safetensors.save_file(other, tmp_path / "other" / "model.safetensors")
        with pytest.raises(WrongModel, match=rf"other values of '{name}'"):
            load_weights(model, tmp_path / "other")
    plain_model = built(lora, torch.float32)
    load_weights(plain_model, tmp_path / "saved")
    same(frozen(plain_model.state_dict()), weights, "weights elsewhere")


def test_of_fused_experts_only_those_of_a_call_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from . import test_fused_experts as fused  # which needs transformers

    monkeypatch.setattr(placement, "headroom", lambda limit: limit // 50)
    model = mapped(fused.made("grouped"), tmp_path, trained_too=True)
    total = sum(p.nbytes for p in model.parameters())
    given = [fused.tokens(number, length) for number, length in enumerate([20, 1, 1, 1, 20])]
    with torch.no_grad():
        expected = [model(each).logits for each in given]
        with opened(model, None, vram=int(total * 0.75)) as session:
            files, read = session._parts.ground.files, []
            assert files is not None
            for each, answer in zip(given, expected, strict=True):
                before = files.read_bytes
                same(model(each).logits, answer, "answer")
                read.append(files.read_bytes - before)
    assert max(read[2:4]) < total // 4, read


def test_two_sessions_on_one_file(tmp_path: Path) -> None:
    model = mapped(built(plain, torch.float32), tmp_path, trained_too=True)
    other = built(plain, torch.float32)
    for mine, parameter in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = mine.data
    with torch.no_grad():
        expected = model(tokens(0)[0])
        with opened(model, None), opened(other, None, seed=1):
            for _ in range(3):
                same(model(tokens(0)[0]), expected, "one")
                same(other(tokens(0)[0]), expected, "other")
