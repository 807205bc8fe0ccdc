from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from stormtorch.core.errors import SettingError
from stormtorch.training.run.text_data import total_steps
from stormtorch.training.settings import suggestions
from stormtorch.training.settings.train_settings import (
    TrainSettings,
    check_required,
    is_callable_name,
    learning_rate,
    warmup_steps,
)
from stormtorch.training.settings.yaml_file import read_yaml, to_yaml

MANY: dict[str, Any] = {
    "model": "somewhere",
    "data": ("a.jsonl", "b.txt"),
    "vram": "8GiB",
    "lr": 3e-5,
    "betas": (0.9, 0.95),
    "eps": 1e-7,
    "steps": 12,
    "packing": False,
    "completions_only": True,
    "sample_every": 3,
    "sample_prompts": ("Once upon a time,", "yes", "#1: ü"),
    "lora_rank": 8,
    "lora_targets": ("q_proj", "v_proj"),
}


def test_yaml_gives_the_same_settings_again(tmp_path: Path) -> None:
    for chosen in (TrainSettings(), TrainSettings(**MANY)):
        path = tmp_path / "run.yaml"
        path.write_text(to_yaml(chosen), encoding="utf-8")
        assert TrainSettings(**read_yaml(path)) == chosen
        assert TrainSettings(**chosen.as_mapping()) == chosen


def test_yaml_as_people_write_it(tmp_path: Path) -> None:
    """YAML calls 1e-5 a word; dashes stand in flags; one path is a list of one; an empty line is the default."""
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-5\nsave-every: 100\ndata: one.jsonl\nvram: 8GiB\nclip:\nram: 1000000000\n")
    found = TrainSettings(**read_yaml(path))
    assert (found.lr, found.save_every, found.data, found.clip) == (1e-5, 100, ("one.jsonl",), 1.0)
    assert (found.vram, found.ram) == ("8GiB", "1000000000")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate: 1\nlr: 1\n", ["no setting 'learning_rate'"]),
        ("sav_every: 1\n", ["no setting 'sav_every'", "Did you mean save_every"]),
        ("lr: [1\n", ["run.yaml line 2 is not YAML"]),
        ("- lr\n", ["holds a list", "name: value"]),
        ("lr: 1\nbatch: 2\nlr: 2\n", ["run.yaml line 3 gives lr a second time"]),
        ("save_every: 1\nsave-every: 2\n", ["line 2 gives save_every a second time"]),
        ("seed: 2026-99-99\n", ["is not YAML: month must be in 1..12"]),
    ],
)
def test_files_that_cannot_be_meant(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(SettingError) as caught:
        read_yaml(path)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="No such file"):
        read_yaml(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0}, "lr=0 is not accepted. Accepted: a number above 0"),
        ({"lr": "fast"}, "lr='fast' is not accepted"),
        ({"lr": float("nan")}, "lr=nan is not accepted"),
        ({"batch": 0}, "batch=0 is not accepted. Accepted: a whole number of at least 1"),
        ({"batch": 1.5}, "batch=1.5 is not accepted"),
        ({"batch": True}, "batch=True is not accepted"),
        ({"seed": 1 << 63}, "seed=9223372036854775808 is not accepted"),
        ({"sequence": "1e30"}, "at most 16777216"),
        ({"epochs": 1e300}, "above 0 and at most 1e+06"),
        ({"schedule": "exponential"}, "Accepted: cosine, linear, constant"),
        ({"vram": "8G"}, "vram='8G' is not a byte size"),
        ({"betas": [0.9]}, "Accepted: two numbers from 0 to below 1"),
        ({"packing": "no"}, "packing='no' is not accepted. Accepted: true or false"),
        ({"step": "backward"}, "step=backward updates while gradients arrive, which clip=1.0 forbids"),
        ({"step": "backward", "clip": 0, "accumulate": 2}, "which accumulate=2 forbids"),
        ({"step": "backward", "clip": 0, "on_nan": "skip"}, "before a step can be skipped"),
        ({"sample_every": 5}, "sample_every needs prompts"),
        ({"model": "here", "loss": "a:b"}, "loss is for module:callable models"),
        ({"model": "a.b:c", "lora_rank": 2}, "lora_rank is for transformers models"),
        ({"output": "run\udcff"}, "holds bytes that are not UTF-8, or a NUL, and cannot be written to files"),
        ({"output": "run\0"}, "holds bytes that are not UTF-8, or a NUL"),
        ({"model": "a\0b"}, "holds bytes that are not UTF-8, or a NUL"),
        ({"sample_prompts": ["good", "bad \ud800"]}, "Accepted: a text, or several, as UTF-8"),
        ({"accumulate": 1 << 40}, "at most 65536"),
        ({"lora_targets": ["q_proj"]}, "lora_targets is for adapters, and lora_rank=0 trains all weights"),
        ({"lora_dropout": 0.1}, "lora_dropout is for adapters"),
        ({"data": {"a": "b"}}, "is not accepted. Accepted: a path, or several"),
        ({"data": ["texts"], "output": "./texts"}, "--data texts: the run writes"),
        (
            {"data": ["a"], "eval_data": ["run/metrics.jsonl"], "output": "run"},
            "--eval-data run/metrics.jsonl: the run",
        ),
    ],
)
def test_values_that_cannot_be_meant(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError) as caught:
        TrainSettings(**changes)
    assert words in str(caught.value)


def test_numbers_are_read_exactly() -> None:
    flags: dict[str, Any] = {"seed": str((1 << 63) - 1), "steps": "1e3"}
    found = TrainSettings(**flags)
    assert (found.seed, found.steps) == ((1 << 63) - 1, 1000)  # no float is the first


def test_a_tilde_is_the_home_in_a_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anne")
    found = TrainSettings(model="~/models/small", data=("~/a.jsonl", "./b.jsonl"), output="~/run")
    assert (found.model, found.data, found.output) == (
        "/home/anne/models/small",
        ("/home/anne/a.jsonl", "./b.jsonl"),
        "/home/anne/run",
    )


def test_model_and_data_are_required() -> None:
    with pytest.raises(SettingError, match=r"No model is given\. Give --model"):
        check_required(TrainSettings())
    with pytest.raises(SettingError, match="No data is given"):
        check_required(TrainSettings(model="a"))


def test_names_of_callables() -> None:
    assert is_callable_name("package.module:make")
    assert not any(map(is_callable_name, [None, "folder", "a/b:c", "C:/models", "module:", ":make"]))


def test_the_learning_rate_rises_and_falls() -> None:
    base = TrainSettings(lr=1.0, warmup=4, schedule="linear")
    rates = [learning_rate(base, step, 12) for step in range(1, 13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == pytest.approx([1 - k / 8 for k in range(8)])
    cosine = [learning_rate(dataclasses.replace(base, schedule="cosine"), step, 12) for step in range(1, 13)]
    assert cosine[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert cosine[8] == pytest.approx(0.5)
    assert 0 < cosine[-1] < 0.05
    constant = dataclasses.replace(base, schedule="constant")
    assert {learning_rate(constant, step, 12) for step in range(4, 13)} == {1.0}


def test_warm_up_in_steps_or_as_a_share() -> None:
    assert warmup_steps(TrainSettings(warmup=0), 1000) == 0
    assert warmup_steps(TrainSettings(warmup=0.03), 1000) == 30
    assert warmup_steps(TrainSettings(warmup=0.03), 10) == 1
    assert warmup_steps(TrainSettings(warmup=25), 1000) == 25
    assert learning_rate(TrainSettings(lr=1.0, warmup=0), 1, 10) == 1.0


def test_steps_of_a_run() -> None:
    assert total_steps(TrainSettings(batch=2, accumulate=3, epochs=2.0), 31) == 10
    assert total_steps(TrainSettings(steps=7), 31) == 7
    with pytest.raises(SettingError, match="3 rows of 1024 tokens, fewer than batch=4"):
        total_steps(TrainSettings(batch=4, steps=7), 3)
    with pytest.raises(SettingError, match=r"epochs=0\.1 of 5 batches are fewer than one step"):
        total_steps(TrainSettings(epochs=0.1), 5)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("learning_rate", "Did you mean lr?"),
        ("max_steps", "Did you mean steps?"),
        ("per_device_train_batch_size", "Did you mean batch?"),
        ("gradient_accumulation_steps", "Did you mean accumulate?"),
        ("output_dir", "Did you mean output?"),
        ("per_device_train_batchsize", "Did you mean batch?"),
        ("wandb_project", "All numbers are in metrics.jsonl"),
        ("xyzzy", "storm train --help has all of them."),
    ],
)
def test_keys_of_other_programs_get_a_suggestion(tmp_path: Path, key: str, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{key}: 1\n")
    with pytest.raises(SettingError) as caught:
        read_yaml(file)
    assert str(caught.value) == f"{file}: there is no setting {key!r}. " + str(caught.value).partition("'. ")[2]
    assert words in str(caught.value)
    assert len(str(caught.value)) < 250 + len(str(file))


def test_every_synonym_leads_to_a_setting() -> None:
    names = {item.name for item in dataclasses.fields(TrainSettings)}
    assert set(suggestions._SETTINGS.values()) <= names
    assert not names & (set(suggestions._SETTINGS) | set(suggestions._INSTEAD))
