"""Law: a checkpoint from a stranger is loaded whole or refused in one line, runs no code, reads nothing outside."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch.checkpoint import all_complete, load_weights, newest, sweep
from stormtorch.core.errors import StormError

from ..checkpoint.made import Run, equal, weights
from .strangers import (
    DEEP,
    Outside,
    edit_manifest,
    flip,
    pickled,
    refused,
    sign,
    sparse,
    tensor_file,
    untouched,
    zipped,
)

Spoil = Callable[[Path, Outside], object]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    made = Run()
    made.step()
    yield made
    made.session.close()


@pytest.fixture(scope="module")
def saved(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step-1"

    def files(folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "small"}')
        (folder / "tokenizer.json").write_text("{}")

    run.session.save(path, also={"epoch": 3}, files=files)
    return path


def manifest(edit: Callable[[dict[str, Any]], object]) -> Spoil:
    return lambda folder, _: edit_manifest(folder, edit)


def named(name: str) -> Spoil:
    """One more file in the manifest, with the size and the sum of a file outside."""

    def spoil(folder: Path, outside: Outside) -> None:
        size, full = outside.file.stat().st_size, name.replace("OUTSIDE", str(outside.folder))
        edit_manifest(folder, lambda m: m["files"].update({full: {"bytes": size, "crc32": "00000000"}}))

    return spoil


def text(content: str) -> Spoil:
    return lambda folder, _: (folder / "storm" / "manifest.json").write_text(content)


def state(edit: Callable[[dict[str, Any]], Any]) -> Spoil:
    """What torch.load reads without a word, in a checkpoint whose sums are right."""

    def spoil(folder: Path, _: Outside) -> None:
        path = folder / "storm" / "state.pt"
        content = torch.load(path, weights_only=True)
        edited = edit(content)
        torch.save(content if edited is None else edited, path)
        sign(folder)

    return spoil


def raw_state(content: Callable[[Outside], bytes]) -> Spoil:
    def spoil(folder: Path, outside: Outside) -> None:
        (folder / "storm" / "state.pt").write_bytes(content(outside))
        sign(folder)

    return spoil


def damaged(name: str, at: int = -1) -> Spoil:
    return lambda folder, _: flip(folder / name, at)


def optimizer(header: dict[str, Any], size: int) -> Spoil:
    def spoil(folder: Path, _: Outside) -> None:
        (folder / "storm" / "optimizer.safetensors").write_bytes(tensor_file(header, bytes(size)))
        sign(folder)

    return spoil


def linked(name: str) -> Spoil:
    """The very file, but elsewhere."""

    def spoil(folder: Path, outside: Outside) -> None:
        (folder / name).rename(outside.folder / "theirs")
        (folder / name).symlink_to(outside.folder / "theirs")

    return spoil


def _pipe(folder: Path, _: Outside) -> None:
    os.mkfifo(folder / "pipe")
    edit_manifest(folder, lambda m: m["files"].update({"pipe": {"bytes": 0, "crc32": "00000000"}}))


def _sparse_state(folder: Path, _: Outside) -> None:
    sparse(folder / "storm" / "state.pt")
    size = (folder / "storm" / "state.pt").stat().st_size
    edit_manifest(folder, lambda m: m["files"]["storm/state.pt"].update(bytes=size))


def _huge_states(folder: Path, _: Outside) -> None:
    header = {"embed.weight.exp_avg": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}
    path = folder / "storm" / "optimizer.safetensors"
    path.write_bytes(tensor_file(header))
    size = path.stat().st_size + (1 << 40)
    os.truncate(path, size)
    edit_manifest(folder, lambda m: m["files"]["storm/optimizer.safetensors"].update(bytes=size))


def _first_group(content: dict[str, Any], **changes: Any) -> None:
    content["optimizer"]["groups"][0].update(changes)


def _first_numbers(content: dict[str, Any], numbers: object) -> None:
    name = next(iter(content["optimizer"]["numbers"]))
    content["optimizer"]["numbers"][name] = numbers


CASES: dict[str, Spoil] = {
    "manifest: up": named("../outside/thesis.txt"),
    "manifest: from the root": named("OUTSIDE/thesis.txt"),
    "manifest: up, after down": named("storm/../../outside/thesis.txt"),
    "manifest: a NUL": named("a\0b"),
    "manifest: half a character": named("\ud800"),
    "manifest: a long name": named("a" * 5000),
    "manifest: below a file": named("config.json/a"),
    "manifest: a pipe": _pipe,
    "manifest: a directory": manifest(lambda m: m["files"].update({"storm": {"bytes": 4096, "crc32": "0"}})),
    "manifest: no JSON": text("{"),
    "manifest: deep": text(DEEP),
    "manifest: a list": text("[]"),
    "manifest: null": text("null"),
    "manifest: empty": text(""),
    "manifest: sparse": lambda folder, _: sparse(folder / "storm" / "manifest.json"),
    "manifest: a format that is a word": manifest(lambda m: m.update(format="one")),
    "manifest: a format to come": manifest(lambda m: m.update(format=99)),
    "manifest: a negative step": manifest(lambda m: m.update(step=-1)),
    "manifest: an infinite step": manifest(lambda m: m.update(step=float("inf"))),
    "manifest: files as a list": manifest(lambda m: m.update(files=[1])),
    "manifest: a negative size": manifest(lambda m: m["files"]["config.json"].update(bytes=-1)),
    "manifest: a size that is a word": manifest(lambda m: m["files"]["config.json"].update(bytes="many")),
    "manifest: a sum that is a number": manifest(lambda m: m["files"]["config.json"].update(crc32=5)),
    "manifest: a sum that is none": manifest(lambda m: m["files"]["config.json"].update(crc32="xyz")),
    "manifest: versions as a number": manifest(lambda m: m.update(versions=3)),
    "manifest: no state": manifest(lambda m: m["files"].pop("storm/state.pt")),
    "link: weights": linked("model.safetensors"),
    "link: state": linked("storm/state.pt"),
    "link: config": linked("config.json"),
    "link: manifest": linked("storm/manifest.json"),
    "link: storm": linked("storm"),
    "state: code": raw_state(lambda outside: zipped(pickled(outside))),
    "state: code in an old form": raw_state(pickled),
    "state: empty": raw_state(lambda _: b""),
    "state: text": raw_state(lambda _: b"hello, world"),
    "state: a zip of nothing": raw_state(lambda _: zipped(b"")),
    "state: sparse": _sparse_state,
    "state: a list": state(lambda _: [1, 2, 3]),
    "state: empty dict": state(lambda _: {}),
    "state: no random numbers": state(lambda s: s.pop("random") and None),
    "state: random numbers of another form": state(lambda s: s.update(random={"python": 1})),
    "state: random numbers that are none": state(lambda s: s["random"].update(torch=torch.zeros(3))),
    "state: an optimizer that is a list": state(lambda s: s.update(optimizer=[1])),
    "state: an optimizer without groups": state(lambda s: s["optimizer"].pop("groups") and None),
    "state: groups of another form": state(lambda s: s["optimizer"].update(groups=[1, 2])),
    "state: a learning rate that is a word": state(lambda s: _first_group(s, lr="fast")),
    "state: one beta": state(lambda s: _first_group(s, betas=(0.9,))),
    "state: numbers of no parameter": state(lambda s: s["optimizer"]["numbers"].update({"no.such": {}})),
    "state: numbers as a list": state(lambda s: _first_numbers(s, [1])),
    "state: numbers as text": state(lambda s: s["optimizer"].update(numbers="all")),
    "state: a step that is a word": state(lambda s: s.update(step="three")),
    "state: extra of no module": state(lambda s: s.update(extra={"no.such._extra_state": 1})),
    "state: also as a list": state(lambda s: s.update(also=[1])),
    "states: a name without a dot": optimizer({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4),
    "states: of no parameter": optimizer({"a.exp_avg": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4),
    "states: of another shape": optimizer(
        {"embed.weight.exp_avg": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 4
    ),
    "states: larger than RAM": _huge_states,
    "damaged: config": damaged("config.json"),
    "damaged: tokenizer": damaged("tokenizer.json"),
    "damaged: weights": damaged("model.safetensors"),
    "damaged: states": damaged("storm/optimizer.safetensors"),
    "damaged: state": damaged("storm/state.pt"),
}


@pytest.mark.parametrize("name", CASES)
def test_checkpoints(tmp_path: Path, run: Run, saved: Path, name: str) -> None:
    outside = Outside(tmp_path / "outside")
    folder = tmp_path / "runs" / "step-1"
    shutil.copytree(saved, folder)
    if name != "link: storm":
        CASES[name](folder, outside)
    else:
        shutil.move(folder / "storm", outside.folder / "theirs")
        (folder / "storm").symlink_to(outside.folder / "theirs")
    with untouched(outside):
        said = refused(lambda: run.session.load(folder))
        assert str(folder) in said
        newest(folder.parent)  # whole or not, it is said without an error
        all_complete(folder.parent)
    if name.startswith("damaged"):
        assert "is damaged" in said
    assert run.session.load(saved) == {"epoch": 3}  # the session is none the worse for it


@pytest.mark.parametrize("name", ["damaged: config", "damaged: weights"])
def test_what_is_not_used_is_not_read(tmp_path: Path, run: Run, saved: Path, name: str) -> None:
    """`load_weights` takes weights alone, and finds what is wrong with them."""
    folder = tmp_path / "step-1"
    shutil.copytree(saved, folder)
    CASES[name](folder, Outside(tmp_path / "outside"))
    other = Run(seed=5)
    try:
        if "weights" in name:
            refused(lambda: load_weights(other.model, folder), "is damaged")
        else:
            load_weights(other.model, folder)
            run.session.load(saved)
            assert equal(weights(other.model), weights(run.model))
    finally:
        other.session.close()


def test_what_a_loading_object_raises_is_the_checkpoints(tmp_path: Path, run: Run) -> None:
    class Choosy:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, _: dict[str, int]) -> None:
            raise KeyError("b")

    run.session.save(tmp_path / "step", also={"choosy": Choosy()})
    refused(lambda: run.session.load(tmp_path / "step", also={"choosy": Choosy()}), "KeyError")
    run.session.load(tmp_path / "step")


LEFTOVERS = [
    ".step-1.writing-1-0a",
    ".step-1.removing-99999999999999999999999999-0a",
    ".step-1.replaced-2147483648-0a",
    ".step-1.writing-٣-0a",
]


@pytest.mark.parametrize("kind", ["link", "folder of links", "pipe"])
def test_leftovers(tmp_path: Path, kind: str) -> None:
    """What is swept is what lies there, not where it leads."""
    outside = Outside(tmp_path / "outside")
    runs = tmp_path / "runs"
    runs.mkdir()
    for name in LEFTOVERS:
        if kind == "link":
            (runs / name).symlink_to(outside.folder)
        elif kind == "pipe":
            os.mkfifo(runs / name)
        else:
            (runs / name).mkdir()
            (runs / name / "a").symlink_to(outside.folder)
    with untouched(outside), contextlib.suppress(StormError):
        sweep(runs)


def test_a_link_in_a_checkpoint_of_ones_own_is_no_part_of_it(tmp_path: Path, run: Run) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    def files(folder: Path) -> None:
        (folder / "notes.txt").symlink_to(tmp_path / "notes.txt")
        (folder / "inner").symlink_to("model.safetensors")

    run.session.save(tmp_path / "step", files=files)
    assert "notes.txt" not in json.loads((tmp_path / "step" / "storm" / "manifest.json").read_text())["files"]
    run.session.load(tmp_path / "step")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_checkpoints_of_a_trainer(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    from stormtorch.integrations.huggingface.resume import load_optimizer

    outside = Outside(tmp_path / "outside")
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    load_optimizer(tmp_path, optimizer, scheduler)
    for content in (zipped(pickled(outside)), pickled(outside), b"", b"text"):
        (tmp_path / name).write_bytes(content)
        with untouched(outside):
            refused(lambda: load_optimizer(tmp_path, optimizer, scheduler), name)


def test_the_state_is_read_without_code(tmp_path: Path) -> None:
    """The canary sings: opened as a pickle, these very bytes would run."""
    outside = Outside(tmp_path / "outside")
    torch.load(io.BytesIO(zipped(pickled(outside))), weights_only=False)
    assert outside.ran.exists()
