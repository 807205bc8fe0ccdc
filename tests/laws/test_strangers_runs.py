"""Law: `storm train` in a folder from a stranger writes and removes nothing outside of it, and raises our errors alone.

A damaged checkpoint gives way to the one before it, a damaged cache of tokens is made again, and both are said."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stormtorch.cli.main import main
from stormtorch.core.errors import StormError
from stormtorch.training.run import loop
from stormtorch.training.settings.train_settings import TrainSettings
from stormtorch.training.text import prepare

from ..training.tiny import (
    Quiet,
    checkpoint,
    losses,
    one_thread,  # noqa: F401
    run,
    settings,
    with_weights,
)
from ..training_text.made import byte_tokenizer, json_lines, rows_of
from .strangers import (
    DEEP,
    Outside,
    flip,
    link_to,
    make_pipe,
    pickled,
    refused,
    sign,
    sparse,
    untouched,
    zipped,
)

pytest.importorskip("transformers")

Spoil = Callable[[Path, Outside], object]


def link(name: str, target: str = "") -> Spoil:
    """A link at a name that a run uses; ``target`` within the folder outside."""

    def spoil(folder: Path, outside: Outside) -> None:
        place = folder / name
        if place.is_dir():
            shutil.rmtree(place)
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(outside.folder / target)

    return spoil


def pipe(name: str) -> Spoil:
    return lambda folder, _: os.mkfifo(folder / name)


def directory(name: str) -> Spoil:
    return lambda folder, _: (folder / name).mkdir(parents=True)


REFUSED: dict[str, Spoil] = {
    "the lock leads to a file": link(".lock", "thesis.txt"),
    "the lock leads to nothing": link(".lock", "new"),
    "the lock is a pipe": pipe(".lock"),
    "the lock is a directory": directory(".lock"),
    "the metrics lead to a file": link("metrics.jsonl", "thesis.txt"),
    "the metrics lead to nothing": link("metrics.jsonl", "new"),
    "checkpoints lead to a folder": link("checkpoints"),
    "checkpoints lead to nothing": link("checkpoints", "new"),
    "checkpoints are a file": lambda folder, _: (folder / "checkpoints").write_text(""),
    "data leads to a folder": link("data", "empty"),
    "data leads to nothing": link("data", "new"),
    "what is damaged goes to a folder": link("damaged", "empty"),
    "TensorBoard leads to a folder": link("tensorboard", "empty"),
    "a checkpoint to come leads to a folder": link("checkpoints/step-00000008", "empty"),
    "a checkpoint to come leads to nothing": link("checkpoints/step-00000008", "new"),
    "a checkpoint leads to a folder": link("checkpoints/step-00000002"),
    "metrics half written are a directory": directory(".metrics.jsonl.writing-7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_run_folders(tmp_path: Path, name: str) -> None:
    outside = Outside(tmp_path / "outside")
    folder = tmp_path / "run"
    folder.mkdir()
    REFUSED[name](folder, outside)
    chosen = TrainSettings(model="none", data=("none",), output=str(folder))
    with untouched(outside):
        refused(lambda: run(chosen), str(folder))


def test_an_output_that_is_a_link_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").symlink_to("large disk")
    chosen = settings(tmp_path, steps=1)
    assert run(chosen) == 0
    assert (tmp_path / "large disk" / "metrics.jsonl").is_file()


def test_errors_are_written_beside_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = Outside(tmp_path / "outside")
    chosen = settings(tmp_path, steps=1)
    link("error.txt", "thesis.txt")(Path(chosen.output), outside)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(loop, "forward_backward", fails)
    flags = ["--model", str(chosen.model), "--data", chosen.data[0], "--output", chosen.output, "--device", "cpu"]
    with untouched(outside):
        assert main(["train", *flags, "--sequence", "32", "--batch", "2", "--steps", "1", "--dtype", "fp32"]) == 1
    assert "not foreseen" in capsys.readouterr().err
    assert "not foreseen" in (Path(chosen.output) / "error.txt").read_text()
    assert not (Path(chosen.output) / "error.txt").is_symlink()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    chosen = settings(tmp_path_factory.mktemp("finished"), steps=4, save_every=2, keep=2)
    assert run(chosen) == 0
    return chosen


def copied(finished: TrainSettings, folder: Path) -> TrainSettings:
    shutil.copytree(finished.output, folder / "run", symlinks=True)
    return TrainSettings(**{**finished.as_mapping(), "output": str(folder / "run")})


def _code(step: Path, outside: Outside) -> None:
    (step / "storm" / "state.pt").write_bytes(zipped(pickled(outside)))
    sign(step)


def _text(step: Path, _: Outside) -> None:
    (step / "storm" / "state.pt").write_text("hello")
    sign(step)


def _weights_elsewhere(step: Path, outside: Outside) -> None:
    shutil.move(step / "model.safetensors", outside.folder / "theirs")
    link_to(step / "model.safetensors", outside.folder / "theirs")


def _name_of_a_weight(step: Path, _: Outside) -> None:
    content = (step / "model.safetensors").read_bytes()
    flip(step / "model.safetensors", content.index(b"q_proj"))


def _run_file(edit: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(step: Path, _: Outside) -> None:
        path = step / "storm" / "run.json"
        content = json.loads(path.read_text())
        edited = edit(content)
        path.write_text(edited if isinstance(edited, str) else json.dumps(content))
        sign(step)

    return spoil


FALLEN_BACK: dict[str, Spoil] = {
    "code in the state": _code,
    "a state that is cut": lambda step, _: os.truncate(step / "storm" / "state.pt", 100),
    "a state of text": _text,
    "a bit of the config": lambda step, _: flip(step / "config.json"),
    "a bit of the tokenizer": lambda step, _: flip(step / "tokenizer.json", 100),
    "a bit of a weight's name": _name_of_a_weight,
    "a bit of the run's record": lambda step, _: flip(step / "storm" / "run.json", 20),
    "a record nested deeply": _run_file(lambda _: DEEP),
    "a record of a negative step": _run_file(lambda content: content.update(step=-1)),
    "a record of a negative number of steps": _run_file(lambda content: content.update(total=-4)),
    "a record of infinitely many steps": _run_file(lambda content: content.update(total=float("inf"))),
    "a record of true steps": _run_file(lambda content: content.update(total=True)),
    "a record with another config": _run_file(lambda content: content["identity"].update({"config of the model": [1]})),
    "weights elsewhere": _weights_elsewhere,
}


NOT_COMPLETE = ("a state that is cut", "weights elsewhere")


@pytest.mark.parametrize("name", FALLEN_BACK)
def test_a_damaged_checkpoint_gives_way(tmp_path: Path, finished: TrainSettings, name: str) -> None:
    outside = Outside(tmp_path / "outside")
    chosen = copied(finished, tmp_path)
    FALLEN_BACK[name](checkpoint(chosen, 4), outside)
    watcher = Quiet()
    with untouched(outside):
        assert run(chosen, watcher) == 0
    assert losses(chosen) == losses(finished)
    if name in NOT_COMPLETE:  # so that they are not even tried
        assert any("step-00000004: moved there" in line for line in watcher.said)
    else:
        assert "Trying the checkpoint before it" in watcher.warned[0]
    assert any("2 of 4 steps are done" in line for line in watcher.said)
    assert (checkpoint(chosen, 4) / "model.safetensors").read_bytes() == (
        checkpoint(finished, 4) / "model.safetensors"
    ).read_bytes()


def test_links_to_checkpoints_elsewhere_are_not_taken(tmp_path: Path, finished: TrainSettings) -> None:
    outside = Outside(tmp_path / "outside")
    chosen = copied(finished, tmp_path)
    shutil.move(checkpoint(chosen, 4), outside.folder / "theirs")
    (checkpoint(chosen, 4).parent / "best").symlink_to(outside.folder / "theirs")
    watcher = Quiet()
    with untouched(outside):
        assert run(chosen, watcher) == 0
    assert any("2 of 4 steps are done" in line for line in watcher.said)


def test_a_header_of_two_to_the_62_under_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = with_weights(tmp_path / "model")
    (model / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + bytes(64))
    refused(lambda: run(settings(tmp_path, model=str(model), lora_rank=2)), "model.safetensors")


# Tokens that were made before

VOCABULARY = 257


def cached(folder: Path) -> tuple[Path, Callable[[Callable[[str], None]], Any]]:
    """A cache of tokens, and how it is used again."""
    tokenizer = byte_tokenizer()
    source = json_lines(folder / "a.jsonl", *({"text": f"{number} storms"} for number in range(9)))

    def again(warn: Callable[[str], None]) -> Any:
        return prepare([source], tokenizer, sequence=8, cache=folder / "data", vocabulary=VOCABULARY, warn=warn)

    return again(lambda _: None).arrays["labels"].parent, again


def _facts(**changes: Any) -> Spoil:
    def spoil(made: Path, _: Outside) -> None:
        facts = json.loads((made / "prepared.json").read_text())
        facts.pop("sum", None)
        (made / "prepared.json").write_text(json.dumps(facts | changes))

    return spoil


def _tokens(name: str, value: int) -> Spoil:
    """Other tokens, with the sum of these."""

    def spoil(made: Path, _: Outside) -> None:
        import zlib

        path = made / f"{name}.npy"
        array = np.load(path)
        array[0, 3] = value
        path.write_bytes(path.read_bytes()[:128] + array.tobytes())
        facts = json.loads((made / "prepared.json").read_text())
        facts.pop("sum", None)
        facts["marks"][name] = [zlib.crc32(array.tobytes())]
        (made / "prepared.json").write_text(json.dumps(facts))

    return spoil


def _moved(name: str) -> Spoil:
    def spoil(made: Path, outside: Outside) -> None:
        shutil.move(made / name, outside.folder / "theirs")
        (made / name).symlink_to(outside.folder / "theirs")

    return spoil


def _moved_all(made: Path, outside: Outside) -> None:
    shutil.move(made, outside.folder / "theirs")
    made.symlink_to(outside.folder / "theirs")


CACHES: dict[str, Spoil] = {
    "a bit of the tokens": lambda made, _: flip(made / "input_ids.npy"),
    "a bit of the labels": lambda made, _: flip(made / "labels.npy", 200),
    "a bit of a header": lambda made, _: flip(made / "input_ids.npy", 30),
    "a bit of the facts": lambda made, _: flip(
        made / "prepared.json", (made / "prepared.json").read_bytes().index(b'"tokens": ') + 10
    ),
    "cut short": lambda made, _: os.truncate(made / "labels.npy", 200),
    "sparse": lambda made, _: sparse(made / "labels.npy"),
    "no facts": lambda made, _: (made / "prepared.json").unlink(),
    "facts: no JSON": lambda made, _: (made / "prepared.json").write_text("{"),
    "facts: deep": lambda made, _: (made / "prepared.json").write_text(DEEP),
    "facts: a list": lambda made, _: (made / "prepared.json").write_text("[]"),
    "facts: more rows": _facts(rows=1 << 60),
    "facts: negative rows": _facts(rows=-1),
    "facts: rows as text": _facts(rows="many"),
    "facts: marks as a list": _facts(marks=[1]),
    "facts: marks of another form": _facts(marks={"input_ids": "x", "labels": []}),
    "facts: one more": _facts(code="x"),
    "facts: sparse": lambda made, _: sparse(made / "prepared.json"),
    "facts: a pipe": lambda made, _: make_pipe(made / "prepared.json"),
    "tokens beyond the vocabulary": _tokens("input_ids", 1 << 20),
    "negative tokens": _tokens("input_ids", -5),
    "labels beyond the vocabulary": _tokens("labels", 1 << 20),
    "labels below those left out": _tokens("labels", -101),
    "tokens elsewhere": _moved("input_ids.npy"),
    "facts elsewhere": _moved("prepared.json"),
    "all elsewhere": _moved_all,
    "tokens are a pipe": lambda made, _: make_pipe(made / "labels.npy"),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches_of_tokens(tmp_path: Path, name: str) -> None:
    outside = Outside(tmp_path / "outside")
    made, again = cached(tmp_path)
    expected = rows_of(again(pytest.fail))
    assert again(pytest.fail).reused
    CACHES[name](made, outside)
    said: list[str] = []
    with untouched(outside):
        found = again(said.append)
        assert not found.reused
    assert rows_of(found) == expected
    assert len(said) == 1
    assert "Making them again" in said[0]
    assert str(made) in said[0]


def _digests(text: str) -> Spoil:
    return lambda made, _: (made.parent / "digests.cache").write_text(text)


BESIDE: dict[str, Spoil] = {
    "digests: a list": _digests("[1]"),
    "digests: deep": _digests(DEEP),
    "digests: no JSON": _digests("{"),
    "digests: elsewhere": lambda made, outside: link_to(made.parent / "digests.cache", outside.file),
    "digests: a pipe": lambda made, _: make_pipe(made.parent / "digests.cache"),
    "half written: a pipe": lambda made, _: os.mkfifo(made.parent / ".a.writing-1-0a"),
    "half written: elsewhere": lambda made, outside: (made.parent / ".a.writing-1-0a").symlink_to(outside.folder),
    "half written: a folder of links": lambda made, outside: link_to(
        made.parent / ".a.writing-1-0a" / "b", outside.folder
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_cached_tokens(tmp_path: Path, name: str) -> None:
    outside = Outside(tmp_path / "outside")
    made, again = cached(tmp_path)
    BESIDE[name](made, outside)
    with untouched(outside):
        assert again(pytest.fail).reused


def test_a_damaged_cache_is_said_to_the_user(tmp_path: Path, finished: TrainSettings) -> None:
    chosen = copied(finished, tmp_path)
    [file] = Path(chosen.output).glob("data/*/input_ids.npy")
    flip(file)
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert "Making them again" in watcher.warned[0]
    assert losses(chosen) == losses(finished)


def test_a_directory_where_digests_go(tmp_path: Path) -> None:
    made, again = cached(tmp_path)
    (made.parent / "digests.cache").unlink()
    (made.parent / "digests.cache").mkdir()
    with pytest.raises(StormError):
        again(pytest.fail)
