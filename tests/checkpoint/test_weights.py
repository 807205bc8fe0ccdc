"""`load_weights`: safetensors of others, into models that are streamed, built without memory, or plain."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import stormtorch as storm
from stormtorch.checkpoint import load_weights
from stormtorch.core.errors import CheckpointError, WrongModel

from .made import Run, Small, equal, session_of, small, weights


def write(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """As transformers writes them, with the library."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    names = list(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        index["weight_map"].update(dict.fromkeys(mine, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "streamed", "meta"])
def test_every_tensor_arrives(tmp_path: Path, shards: int, kind: str) -> None:
    folder = write(tmp_path / "w", weights(small(1)), shards)
    expected = weights(small(1))
    if kind == "meta":
        with torch.device("meta"):
            model = Small()
        model.scale = torch.zeros(16)
    else:
        model = small(2)
    session = None if kind == "plain" else session_of(model)
    assert sorted(load_weights(model, folder)) == sorted(expected)
    assert equal(weights(model), expected)
    tokens = torch.arange(8).view(1, 8)
    assert torch.equal(model(tokens), small(1)(tokens))
    if session is not None:
        session.close()


def test_copies_on_the_device_are_stale_and_masters_follow(tmp_path: Path) -> None:
    folder = write(tmp_path / "w", weights(small(1)))
    expected = small(1).to(torch.bfloat16)
    model = small(2).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(8).view(1, 8)
    with session_of(model, optimizer):
        for _ in range(2):
            model(tokens).float().logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        load_weights(model, folder)
        with torch.no_grad():
            assert torch.equal(model(tokens), expected(tokens))
        assert not any(state["master"].any() for state in optimizer.state.values())


@pytest.mark.parametrize("there", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("here", [torch.float32, torch.bfloat16])
def test_dtypes_are_converted_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: torch.dtype, here: torch.dtype
) -> None:
    from stormtorch.checkpoint.files import tensor_files

    monkeypatch.setattr(tensor_files, "CHUNK", 64)
    folder = write(tmp_path / "w", weights(small(1).to(there)))
    model = small(2).to(here)
    with session_of(model):
        load_weights(model, folder)
        assert equal(weights(model), weights(small(1).to(there).to(here)))


def test_other_memory_layouts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    folder = write(tmp_path / "w", weights(source))
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with session_of(model) as session:
        load_weights(model, folder)
        assert equal(weights(model), weights(source))
        session.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert equal(saved, weights(source))


class Tied(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("named", ["embed.weight", "head.weight", "both"])
def test_of_tied_weights_one_name_is_enough(tmp_path: Path, named: str) -> None:
    torch.manual_seed(1)
    source = Tied()
    tensors = weights(source)
    for name in {"embed.weight", "head.weight"} - ({named} if named != "both" else set(tensors)):
        del tensors[name]
    folder = write(tmp_path / "w", tensors)
    model = Tied()
    with session_of(model):
        loaded = load_weights(model, folder)
        assert "embed.weight" in loaded
        assert equal(weights(model), weights(source))


def test_what_is_saved_is_opened_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stormtorch.checkpoint.content import parts

    monkeypatch.setattr(parts, "SHARD_BYTES", 3000)
    run = Run()
    run.step()
    run.session.save(tmp_path / "one")
    expected = weights(run.model)
    files = sorted(path.name for path in (tmp_path / "one").glob("model-*"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    found: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = load_file(tmp_path / "one" / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        found |= tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert len(list((tmp_path / "one" / "storm").glob("optimizer-*"))) > 2
    run.step()
    run.session.load(tmp_path / "one")
    assert equal(weights(run.model), expected)
    (tmp_path / "one" / files[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{files[1]} is missing"):
        run.session.load(tmp_path / "one")
    with pytest.raises(CheckpointError, match=rf"{files[1]} is missing: 1 of the {len(files)} files"):
        load_weights(run.model, tmp_path / "one")
    run.session.close()


def test_sums_are_checked_where_there_are_any(tmp_path: Path) -> None:
    run = Run()
    run.session.save(tmp_path / "one")
    run.session.close()
    path = tmp_path / "one" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged: checksum"):
        load_weights(small(), tmp_path / "one")


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    folder = write(tmp_path / "w", weights(small(1)))
    path = folder / "model.safetensors"
    os.truncate(path, cut if cut > 0 else path.stat().st_size - 1)
    model = small(2)
    before = weights(model)
    with pytest.raises(CheckpointError, match=rf"{path} is (truncated|not a complete)"):
        load_weights(model, folder)
    assert equal(before, weights(model))


def test_names_and_shapes_must_be_those_of_the_model(tmp_path: Path) -> None:
    tensors = weights(small(1))
    model = small(2)
    before = weights(model)

    def refused(tensors: dict[str, torch.Tensor], words: str) -> None:
        with pytest.raises(WrongModel, match=words):
            load_weights(model, write(tmp_path / "w", tensors))
        assert equal(before, weights(model))

    refused(
        {name: tensor for name, tensor in tensors.items() if name != "head.weight"}, "'head.weight' is missing there"
    )
    refused({**tensors, "more.weight": torch.zeros(2)}, "'more.weight' is not in the model")
    refused({**tensors, "head.weight": torch.zeros(3, 16)}, r"'head.weight' has shape \(3, 16\) there and \(32, 16\)")
    refused(
        {f"model.{name}": tensor for name, tensor in tensors.items()},
        r"and 6 more are missing there.*and 6 more are not",
    )


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_weights(small(), tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no model.safetensors and no model.safetensors.index.json\. "):
        load_weights(small(), tmp_path)
    with torch.device("meta"):
        model = Small()
    with pytest.raises(WrongModel, match=r"have no memory \(device meta\). Stream"):
        load_weights(model, write(tmp_path / "w", weights(small())))


def test_public_names() -> None:
    import stormtorch.checkpoint

    assert stormtorch.checkpoint.__all__ == ["all_complete", "complete", "load_weights", "newest", "prune", "sweep"]
    assert hasattr(storm.Session, "save")
    assert hasattr(storm.Session, "load")
