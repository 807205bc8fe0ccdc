"""Law: a run that goes on from a checkpoint gives the numbers of one that was never stopped; or it refuses in words."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from stormtorch.checkpoint.folders.folder import complete
from stormtorch.core.errors import CheckpointError, SettingError
from stormtorch.training.output.identity import RUN_FILE, identity
from stormtorch.training.output.metrics import cut_back
from stormtorch.training.settings.train_settings import TrainSettings

from .tiny import (
    Quiet,
    checkpoint,
    losses,
    one_thread,  # noqa: F401
    records,
    run,
    settings,
    steps_saved,
    with_weights,
    write_model,
    write_text,
)

pytest.importorskip("transformers")


def stop_after(step: int, number: signal.Signals = signal.SIGTERM) -> Quiet:
    """Sends the signal to this process when ``step`` has been shown."""
    return Quiet(lambda at: signal.raise_signal(number) if at == step else None)


def elsewhere(chosen: TrainSettings, name: str, **changes: Any) -> TrainSettings:
    return dataclasses.replace(chosen, output=str(Path(chosen.output).parent / name), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2},
        {"dtype": "bf16", "optimizer": "adafactor", "clip": 0},
        {"lora_rank": 2, "lora_dropout": 0.1},
    ],
    ids=["accumulate", "bf16", "lora"],
)
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, changes: dict[str, Any]) -> None:
    if "lora_rank" in changes:
        pytest.importorskip("peft")
    make = with_weights if "lora_rank" in changes else write_model
    model = str(make(tmp_path / "model", attention_dropout=0.1))
    whole = settings(tmp_path, model=model, **changes)
    assert run(whole) == 0
    broken = elsewhere(whole, "broken")
    watcher = stop_after(3)
    assert run(broken, watcher) == 143
    assert "Stopping" in watcher.warned[0]
    assert steps_saved(broken) == [3]
    assert run(broken, stop_after(6, signal.SIGINT)) == 130
    assert run(broken) == 0
    assert losses(broken) == losses(whole)
    assert [record["step"] for record in records(broken, "resume")] == [3, 6]
    weights = "adapter_model.safetensors" if whole.lora_rank else "model.safetensors"
    assert (checkpoint(broken, 8) / weights).read_bytes() == (checkpoint(whole, 8) / weights).read_bytes()


def test_going_on_elsewhere_in_memory(tmp_path: Path) -> None:
    """Budgets, the step's mode and the intervals of saving and logging change no number, so they may change."""
    whole = settings(tmp_path)
    assert run(whole) == 0
    broken = elsewhere(whole, "broken", vram="200KiB")
    assert run(broken, stop_after(5)) == 143
    assert run(dataclasses.replace(broken, vram="auto", step="serial", save_every=1, keep=3)) == 0
    assert losses(broken) == losses(whole)
    assert steps_saved(broken) == [6, 7, 8]


def test_what_happened_after_the_checkpoint_is_written_once(tmp_path: Path) -> None:
    """A kill leaves metrics of steps that no checkpoint has, and half a line."""
    chosen = settings(tmp_path, save_every=3)
    assert run(chosen, stop_after(3)) == 143
    with (Path(chosen.output) / "metrics.jsonl").open("a") as file:
        for step in (4, 5):
            file.write(json.dumps({"kind": "step", "step": step, "loss": 0.0}) + "\n")
        file.write('{"kind": "step", "st')
    assert run(chosen) == 0
    found = losses(chosen)
    assert list(found) == list(range(1, 9))
    assert 0.0 not in found.values()


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    chosen = settings(tmp_path, save_every=2, keep=2)
    assert run(chosen) == 0
    expected = losses(chosen)
    file = checkpoint(chosen, 8) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert len(watcher.warned) == 1
    assert "step-00000008" in watcher.warned[0]
    assert "Trying the checkpoint before it" in watcher.warned[0]
    assert losses(chosen) == expected
    assert [record["step"] for record in records(chosen, "resume")] == [6]
    assert steps_saved(chosen) == [6, 8]
    assert (Path(chosen.output) / "damaged" / "step-00000008" / "model.safetensors").read_bytes() == content


def test_a_damaged_one_does_not_drive_out_a_good_one(tmp_path: Path) -> None:
    """With one checkpoint to keep, the damaged one is still the newest by name when the next is saved."""
    chosen = settings(tmp_path, save_every=2, keep=2)
    assert run(chosen) == 0
    (checkpoint(chosen, 8) / "storm" / "run.json").write_bytes(b"")
    (checkpoint(chosen, 8) / "storm" / "manifest.json").write_bytes(b"")
    chosen = dataclasses.replace(chosen, keep=1, save_every=0)
    assert run(chosen, stop_after(7)) == 143
    assert steps_saved(chosen) == [7]
    assert run(chosen) == 0


def test_what_a_kill_left_unpruned_is_pruned(tmp_path: Path) -> None:
    chosen = settings(tmp_path, save_every=3, keep=3)
    assert run(chosen) == 0
    assert steps_saved(chosen) == [3, 6, 8]
    assert run(dataclasses.replace(chosen, keep=2)) == 0
    assert steps_saved(chosen) == [6, 8]


def test_copies_of_the_users_stay(tmp_path: Path) -> None:
    """Under names that no run gives: neither pruned, nor counted among those to keep, nor taken for damaged."""
    short = settings(tmp_path, steps=4, save_every=2, keep=2, schedule="constant", warmup=0)
    assert run(short) == 0
    copies = [checkpoint(short, 2).with_name("best"), checkpoint(short, 4).with_name("step-00000004-backup")]
    shutil.copytree(checkpoint(short, 2), copies[0])
    shutil.copytree(checkpoint(short, 4), copies[1])
    assert run(dataclasses.replace(short, steps=8)) == 0
    assert all(complete(path) for path in copies)
    assert not (Path(short.output) / "damaged").exists()
    kept = sorted(path.name for path in checkpoint(short, 2).parent.iterdir() if path not in copies)
    assert kept == ["step-00000006", "step-00000008"]


def test_it_never_begins_anew_over_checkpoints(tmp_path: Path) -> None:
    chosen = settings(tmp_path, steps=2)
    assert run(chosen) == 0
    with pytest.raises(SettingError, match=r"--resume never would mix two runs"):
        run(dataclasses.replace(chosen, resume="never"))
    (checkpoint(chosen, 2) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"None of the 1 checkpoints .* is complete"):
        run(chosen)
    assert losses(chosen).keys() == {1, 2}


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    chosen = settings(tmp_path, steps=2)
    assert run(chosen) == 0
    before = losses(chosen)
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert any("2 of 2 steps are done" in line for line in watcher.said)
    assert any("nothing is left to train" in line for line in watcher.said)
    assert not any(line.startswith("steps 0") for line in watcher.said)
    assert losses(chosen) == before


def test_other_numbers_are_refused_one_line_each(tmp_path: Path) -> None:
    chosen = settings(tmp_path, steps=2)
    assert run(chosen) == 0
    other = write_text(tmp_path / "other.jsonl", documents=30)
    with pytest.raises(SettingError) as caught:
        run(dataclasses.replace(chosen, lr=2e-3, seed=7, data=(str(other),)))
    lines = str(caught.value).splitlines()
    assert "step-00000002 was made with settings that give other numbers" in lines[0]
    assert lines[1:3] == ["  lr: 0.001 then, 0.002 now", "  seed: 0 then, 7 now"]
    assert lines[3].startswith("  data (its tokens): ")
    assert len(lines) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "cosine", "warmup": 0.25},
        {"schedule": "constant", "warmup": 0.25},
        {"optimizer": "sgd", "warmup": 5},
    ],
    ids=["cosine", "constant", "sgd"],
)
@pytest.mark.daily("cosine", "sgd")
def test_a_finished_run_can_be_given_more_steps(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Weights, states and data go on; the learning rate is the schedule's for the new number of steps."""
    short = settings(tmp_path, model=str(write_model(tmp_path / "model", attention_dropout=0.1)), steps=4, **changes)
    assert run(short) == 0
    watcher = Quiet()
    assert run(short, watcher) == 0
    assert any(
        "The run is finished at step 4" in line and "Continue it with --steps 8" in line for line in watcher.said
    )
    whole = dataclasses.replace(short, steps=8, output=str(tmp_path / "whole"))
    assert run(whole) == 0
    longer = dataclasses.replace(short, steps=8)
    watcher = Quiet()
    assert run(longer, watcher) == 0
    assert any("had 4 steps and has 8 now: from step 5 on" in line for line in watcher.said)
    rates = {record["step"]: record["lr"] for record in records(longer)}
    assert list(rates) == list(range(1, 9))
    expected = {record["step"]: record["lr"] for record in records(whole)}
    assert [rates[step] for step in range(5, 9)] == [expected[step] for step in range(5, 9)]
    assert losses(longer) == _by_hand(tmp_path, short, longer)
    with pytest.raises(SettingError, match=r"then, .* now"):
        run(dataclasses.replace(short, lr=2e-3, steps=16))


def _by_hand(tmp_path: Path, short: TrainSettings, longer: TrainSettings) -> dict[int, float]:
    """The losses of a run that was never stopped, whose schedule changes after the short one's steps."""
    chosen = dataclasses.replace(longer, output=str(tmp_path / "by-hand"))
    loop = importlib.import_module("stormtorch.training.run.loop")
    real = loop.learning_rate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "learning_rate", lambda s, step, total: real(s, step, short.steps if step <= 4 else total))
        assert run(chosen) == 0
    return losses(chosen)


def test_fewer_steps_are_another_schedule_unless_it_is_constant(tmp_path: Path) -> None:
    falling = settings(tmp_path, steps=4)
    assert run(falling, stop_after(2)) == 143
    with pytest.raises(SettingError, match="steps in all: 4 then, 3 now"):
        run(dataclasses.replace(falling, steps=3))
    level = elsewhere(falling, "level", schedule="constant", warmup=0)
    assert run(level, stop_after(2)) == 143
    assert run(dataclasses.replace(level, steps=3)) == 0
    assert losses(level).keys() == {1, 2, 3}


def test_a_run_in_epochs_goes_on_too(tmp_path: Path) -> None:
    """Over the end of a pass, where the loader's next batch is the first of the next one."""
    chosen = settings(tmp_path, steps=None, epochs=1.0, batch=8)
    assert run(chosen) == 0
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert any("Continue it with --epochs 2" in line for line in watcher.said)
    assert run(dataclasses.replace(chosen, epochs=2.0)) == 0
    first = len(losses(chosen)) // 2
    assert list(losses(chosen)) == list(range(1, 2 * first + 1))


def test_from_a_named_checkpoint(tmp_path: Path) -> None:
    chosen = settings(tmp_path, save_every=3, keep=3)
    assert run(chosen) == 0
    with pytest.raises(SettingError, match="step-00000008 is of a later step"):
        run(dataclasses.replace(chosen, resume=str(checkpoint(chosen, 3))))
    branch = elsewhere(chosen, "branch", resume=str(checkpoint(chosen, 3)))
    assert run(branch) == 0
    assert losses(branch) == {step: loss for step, loss in losses(chosen).items() if step > 3}
    with pytest.raises(CheckpointError, match="not a checkpoint of STORM"):
        run(elsewhere(chosen, "third", resume=str(tmp_path / "model")))
    for folder in (Path(chosen.output), Path(chosen.output) / "checkpoints"):
        with pytest.raises(SettingError, match=r"is a folder of checkpoints\. Name one of them, such as .*00000008"):
            run(elsewhere(chosen, "third", resume=str(folder)))


def test_how_to_go_on_after_a_branch_was_stopped(tmp_path: Path) -> None:
    """The same command would name the old checkpoint again."""
    chosen = settings(tmp_path, save_every=3, keep=3)
    assert run(chosen) == 0
    branch = elsewhere(chosen, "branch", resume=str(checkpoint(chosen, 3)))
    watcher = Quiet(lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 5 else None)
    assert run(branch, watcher) == 130
    assert "The same command with --resume auto resumes from there." in watcher.said[-1]
    assert run(dataclasses.replace(branch, resume="auto")) == 0
    assert losses(branch) == {step: loss for step, loss in losses(chosen).items() if step > 3}


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    chosen = settings(tmp_path, steps=2)
    second: list[str] = []

    def begin_another(step: int) -> None:
        if step == 1:
            with pytest.raises(SettingError) as caught:
                run(chosen)
            second.append(str(caught.value))

    assert run(chosen, Quiet(begin_another)) == 0
    assert "Another storm train is running" in second[0]


def test_a_second_ctrl_c_ends_at_once_without_a_checkpoint(tmp_path: Path) -> None:
    chosen, before = settings(tmp_path), signal.getsignal(signal.SIGINT)

    def twice(step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(chosen, Quiet(twice))
    assert steps_saved(chosen) == []
    assert signal.getsignal(signal.SIGINT) is before
    assert run(chosen) == 0
    assert losses(chosen).keys() == set(range(1, 9))


def test_a_signal_while_its_step_is_being_saved_saves_once(tmp_path: Path) -> None:
    chosen = settings(tmp_path, save_every=4)
    assert run(chosen, stop_after(4)) == 143
    assert [record["step"] for record in records(chosen, "save")] == [4]
    assert steps_saved(chosen) == [4]
    assert run(chosen) == 0


def test_a_file_about_the_run_that_is_damaged_gives_way_too(tmp_path: Path) -> None:
    chosen = settings(tmp_path, save_every=6)
    assert run(chosen) == 0
    file = checkpoint(chosen, 8) / "storm" / "run.json"
    file.write_text("{" * len(file.read_bytes()))
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert "run.json is damaged" in watcher.warned[0]
    assert [record["step"] for record in records(chosen, "resume")] == [6]


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
def test_a_config_with_other_values_is_another_model(tmp_path: Path, adapters: bool) -> None:
    """The shapes are the same, so nothing else would notice; what does not change a number does not matter."""
    if adapters:
        pytest.importorskip("peft")
    model = with_weights(tmp_path / "model") if adapters else write_model(tmp_path / "model")
    chosen = settings(tmp_path, model=str(model), steps=4, save_every=2, lora_rank=2 if adapters else 0)
    whole = elsewhere(chosen, "whole")
    assert run(whole) == 0
    assert run(chosen, stop_after(2)) == 143
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    with pytest.raises(SettingError, match=r"rms_norm_eps in the model's config: .* then, 0.01 now"):
        run(chosen)
    (model / "config.json").write_text(json.dumps({**config, "transformers_version": "4.0.0", "use_cache": False}))
    assert run(chosen) == 0
    assert losses(chosen) == losses(whole)


def test_a_checkpoint_that_does_not_know_its_config_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those made before it was written down."""
    chosen = settings(tmp_path, steps=4)

    def as_before(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = identity(*args, **kwargs)
        assert found.pop("config of the model")["hidden_size"] == 32
        return found

    with monkeypatch.context() as patch:
        patch.setattr("stormtorch.training.run.train.identity", as_before)
        assert run(chosen, stop_after(2)) == 143
    assert run(chosen) == 0


def test_a_base_that_was_trained_further_is_another_one(tmp_path: Path) -> None:
    """Also where its file is as long as before, and ends as it did."""
    pytest.importorskip("peft")
    model = with_weights(tmp_path / "model", hidden_size=256, vocab_size=2048)
    chosen = settings(tmp_path, model=str(model), steps=4, lora_rank=2)
    assert run(chosen, stop_after(2)) == 143
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 1.5
    changed, before = tmp_path / "changed.safetensors", file.read_bytes()
    save_file(tensors, changed, metadata={"format": "pt"})
    assert len(changed.read_bytes()) == len(before)
    assert changed.read_bytes()[-(1 << 20) :] == before[-(1 << 20) :], "or the test shows nothing"
    changed.replace(file)
    with pytest.raises(SettingError, match="samples of the model's weights: "):
        run(chosen)
    file.write_bytes(before)
    assert run(chosen) == 0


def test_the_file_that_says_which_step_it_was_is_checked(tmp_path: Path) -> None:
    """One bit makes a 4 a 6: then steps are missing, without a sign of it."""
    chosen = settings(tmp_path, steps=8, save_every=2, keep=4)
    assert run(chosen) == 0
    expected = losses(chosen)
    shutil.rmtree(checkpoint(chosen, 8))
    shutil.rmtree(checkpoint(chosen, 6))
    file = checkpoint(chosen, 4) / RUN_FILE
    file.write_text(file.read_text().replace('"step": 4', '"step": 6'))
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert "run.json" in watcher.warned[0]
    assert [record["step"] for record in records(chosen, "resume")] == [2]
    assert losses(chosen) == expected


def test_a_copy_of_another_runs_checkpoint_is_left_alone(tmp_path: Path) -> None:
    other = settings(tmp_path, steps=2, seed=7, output=str(tmp_path / "other"))
    assert run(other) == 0
    chosen = settings(tmp_path, steps=4)
    assert run(chosen, stop_after(2)) == 143
    copy = Path(chosen.output) / "checkpoints" / "other-best"
    shutil.copytree(checkpoint(other, 2), copy)
    watcher = Quiet()
    assert run(chosen, watcher) == 0
    assert any("other-best is ignored" in line for line in watcher.warned)
    assert [record["step"] for record in records(chosen, "resume")] == [2]
    assert copy.is_dir()


def test_tokens_that_were_changed_on_the_disk_are_made_anew(tmp_path: Path) -> None:
    chosen = settings(tmp_path, steps=4)
    whole = elsewhere(chosen, "whole")
    assert run(whole) == 0
    assert run(chosen, stop_after(2)) == 143
    for file in (Path(chosen.output) / "data").glob("*/input_ids.npy"):
        data = bytearray(file.read_bytes())
        data[200::4] = bytes(len(data[200::4]))
        file.write_bytes(data)
    assert run(chosen) == 0
    assert losses(chosen) == losses(whole)


def test_tokens_that_were_copied_are_not_made_anew(tmp_path: Path) -> None:
    """A run that was moved to another disk: they are read once, and found to be the same."""
    chosen = settings(tmp_path, steps=4)
    assert run(chosen, stop_after(2)) == 143
    moved = elsewhere(chosen, "moved")
    shutil.copytree(chosen.output, moved.output, copy_function=shutil.copyfile)
    (file,) = (Path(moved.output) / "data").glob("*/input_ids.npy")
    before = file.stat().st_ino
    assert run(moved) == 0
    assert file.stat().st_ino == before


def test_data_beside_the_run_can_be_read_again(tmp_path: Path) -> None:
    """``--data data --output .``: the prepared rows lie in the very folder with the data."""
    (tmp_path / "run" / "data").mkdir(parents=True)
    data = write_text(tmp_path / "run" / "data" / "text.jsonl").parent
    chosen = settings(tmp_path, data=(str(data),), eval_data=(str(data),), steps=4)
    assert run(chosen, stop_after(2)) == 143
    assert run(chosen) == 0


@pytest.mark.parametrize("when", ["evaluation", "samples"])
def test_a_signal_in_an_evaluation_is_heard_at_once(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is patient with a step may not be with an evaluation, and kills: nothing would be saved."""
    more = {"eval_every": 2, "eval_data": (str(write_text(tmp_path / "other.jsonl")),)}
    if when == "samples":
        more = {"sample_every": 2, "sample_prompts": ("one", "two", "three")}
    chosen = settings(tmp_path, steps=4, **more)
    whole = elsewhere(chosen, "whole")
    assert run(whole) == 0
    calls: list[int] = []
    place = (
        "stormtorch.training.run.losses.trained_tokens"
        if when == "evaluation"
        else "stormtorch.training.run.loop.sample"
    )
    module, _, name = place.rpartition(".")
    plain = getattr(importlib.import_module(module), name)

    def signalling(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(place, signalling)
        watcher = Quiet()
        assert run(chosen, watcher) == 143
    assert len(calls) == 1
    assert any("skipped" in line for line in watcher.warned)
    assert steps_saved(chosen) == [2]
    assert run(chosen) == 0
    assert losses(chosen) == losses(whole)


def test_what_fails_between_two_steps_loses_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(tmp_path, steps=4, save_every=0, sample_every=3, sample_prompts=("one",))

    def failing(*_: Any, **__: Any) -> str:
        raise MemoryError("no room for that")

    with monkeypatch.context() as patch:
        patch.setattr("stormtorch.training.run.loop.sample", failing)
        with pytest.raises(MemoryError, match="no room"):
            run(chosen)
    assert steps_saved(chosen) == [3]
    assert run(chosen) == 0


def test_prompts_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", vocab_size=140, eos_token_id=139, pad_token_id=139)
    rows = [json.dumps({"input_ids": [index % 100 + 1 for index in range(40)]}) for _ in range(20)]
    data = tmp_path / "tokens.jsonl"
    data.write_text("\n".join(rows))
    chosen = settings(tmp_path, model=str(model), data=(str(data),), sample_prompts=("\u00e9",))
    with pytest.raises(SettingError, match=r"--sample-prompts .* is beyond the model's vocabulary of 140"):
        run(chosen)


def test_metrics_of_others_stay(tmp_path: Path) -> None:
    chosen = settings(tmp_path, steps=2)
    file = Path(chosen.output) / "metrics.jsonl"
    file.parent.mkdir()
    theirs = ['{"epoch": 1, "loss": 2.0}', '{"step": 9, "loss": 2.0}']
    file.write_text("\n".join([*theirs, "[" * 100_000, '{"kind": "step", "step": 5}', '{"cut in t']) + "\n")
    assert run(chosen) == 0
    lines = file.read_text().splitlines()
    assert lines[:2] == theirs
    assert [json.loads(line)["step"] for line in lines[2:] if json.loads(line)["kind"] == "step"] == [1, 2]


def test_a_last_line_without_its_end_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    monkeypatch.setattr("stormtorch.training.output.metrics._LONGEST", 64)
    whole = [json.dumps({"kind": "step", "step": step}) for step in (1, 2, 3)]
    file.write_text("\n".join([whole[0], json.dumps({"long": "x" * 200}), whole[2], whole[1]]))
    cut_back(file, 2)
    assert file.read_text().splitlines() == whole[:2]
    assert file.read_text().endswith("\n")
