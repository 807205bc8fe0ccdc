"""What one of several ranks tries, for test_ranks.py: ``python rank.py RANK RANKS FOLDER``.

Every case is tried in one process, since torch takes seconds to import; what came of each is written as JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import stormtorch as storm

CPU = torch.device("cpu")
BUDGET: dict[str, Any] = {"vram": 24_000, "device": "cpu"}
Made = tuple[Any, torch.optim.Optimizer]


def make() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def in_fsdp(model: Any, **settings: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=CPU, **settings)


def sharded(model: Any) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))


def prepared(model: Any) -> Any:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    return Accelerator(cpu=True).prepare(model)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DDP": DistributedDataParallel,
    "FSDP": in_fsdp,
    "FSDP with the model's own parameters": lambda model: in_fsdp(model, use_orig_params=True),
    "fully_shard": sharded,
    "fully_shard of a block": lambda model: sharded(model[1]) and model,
}
if importlib.util.find_spec("accelerate") is not None:
    WRAPPERS["accelerate"] = prepared


def train(model: Any, optimizer: Any, steps: int = 3, around: Any = None) -> list[Any]:
    losses: list[Any] = []
    for step in range(steps):
        torch.manual_seed(step + 10 * int(sys.argv[1]))
        x = torch.randn(4, 32)
        if around is None:
            loss = model(x).square().mean()
        else:
            with around:
                loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, [parameter.detach().double().sum().item() for parameter in model.parameters()]]


def tried(action: Callable[[], Any]) -> Any:
    """What came of it: a refusal of ours in its words, another error with its class, or the result."""
    try:
        return {"result": action()}
    except storm.StormError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def join(rank: int, ranks: int, file: Path) -> None:
    distributed.init_process_group(
        "gloo", rank=rank, world_size=ranks, init_method=f"file://{file}", timeout=timedelta(seconds=200)
    )


def offloaded(mode: str) -> Any:
    """DDP around a model that is not streamed, whose activations leave or are computed again."""
    model, optimizer = make()
    wrapped = DistributedDataParallel(model)
    if mode == "plain":
        return train(wrapped, optimizer)
    activations = storm.offload_activations(model, mode=mode, device="cpu")
    try:
        return train(wrapped, optimizer, around=activations)
    finally:
        activations.close()


def streamed_in(wrapper: str) -> Any:
    """Wrapped first, then streamed."""
    model, _ = make()
    wrapped = WRAPPERS[wrapper](model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, fused=True)
    with storm.stream(wrapped, optimizer, **BUDGET):
        return train(wrapped, optimizer)


def trainer() -> None:
    from transformers import TrainingArguments

    from stormtorch.integrations.huggingface import StormTrainer

    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(output_dir=output, use_cpu=True, report_to=[])
        StormTrainer(model=make()[0], args=args, train_dataset=[])


def stepped(model: Any, optimizer: Any) -> Any:
    """Gradients that came before the process group did."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        optimizer.step()
    finally:
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def streamed_now() -> dict[str, tuple[Any, Any, storm.Session]]:
    made = {}
    for name in (*WRAPPERS, "call", "step"):
        model, optimizer = make()
        made[name] = (model, optimizer, storm.stream(model, optimizer, **BUDGET))
    model = made["step"][0]
    model(torch.ones(2, 32)).sum().backward()
    return made


def wrap_all(streamed: dict[str, tuple[Any, Any, storm.Session]]) -> dict[str, Any]:
    """Every wrapper around a streamed model, and streaming inside of each."""
    found: dict[str, Any] = {}
    for wrapper, wrap in WRAPPERS.items():
        model, optimizer, session = streamed[wrapper]

        def around(model: Any = model, optimizer: Any = optimizer, wrap: Any = wrap) -> Any:
            return train(wrap(model), optimizer)

        found[f"{wrapper} around"] = tried(around)
        found[f"{wrapper} around, closed"] = tried(session.close)
        found[f"{wrapper} inside"] = tried(lambda wrapper=wrapper: streamed_in(wrapper))  # type: ignore[misc]
    return found


def among_ranks(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"plain": train(*make())}
    streamed = streamed_now()
    join(rank, ranks, folder)  # after streaming has begun
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    found.update(wrap_all(streamed))
    found["call"] = tried(lambda: train(*streamed["call"][:2]))
    found["step"] = tried(lambda: stepped(*streamed["step"][:2]))
    found["stream"] = tried(lambda: storm.stream(*make(), **BUDGET).close())
    for mode in ("plain", "offload", "recompute"):
        found[f"offloaded: {mode}"] = tried(lambda mode=mode: offloaded(mode))  # type: ignore[misc]
    if os.environ.get("STORM_WIDE") and importlib.util.find_spec("transformers") is not None:
        found["trainer"] = tried(trainer)
    distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    found["call, alone again"] = tried(lambda: train(*streamed["call"][:2]))
    found["step, alone again"] = tried(streamed["step"][1].step)
    for name in ("call", "step"):
        streamed[name][2].close()
    found["hooks left"] = len(torch.nn.modules.module._global_module_registration_hooks)
    return found


def alone(folder: Path) -> dict[str, Any]:
    """A process group of one rank."""
    if "accelerate" in WRAPPERS:
        from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

        AcceleratorState._reset_state(reset_partial_state=True)  # or it goes on with two
    join(0, 1, folder)
    streamed = streamed_now()
    found = {"plain": train(*make()), **wrap_all(streamed)}
    found["call"] = tried(lambda: train(*streamed["call"][:2]))
    model, optimizer = make()
    wrapped = DistributedDataParallel(model)
    with storm.stream(model, optimizer, **BUDGET):  # which does not know who calls it
        found["inside of DDP"] = train(wrapped, optimizer)
    for name in ("call", "step"):
        streamed[name][2].close()
    found["hooks left"] = len(torch.nn.modules.module._global_module_registration_hooks)
    distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    number, count, place = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    both = [among_ranks(number, count, place / "all"), alone(place / f"alone-{number}")]
    (place / f"rank-{number}.json").write_text(json.dumps(both))
