"""What users may rely on is frozen here: a new public name or flag changes this file, with a reason in CHANGELOG.md."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import subprocess
import sys

import stormtorch
from stormtorch.cli.main import parser
from stormtorch.streams.settings import Settings

PUBLIC_NAMES = [
    "DataLoader",
    "InsideStep",
    "LaneError",
    "OffloadedActivations",
    "OutOfBudget",
    "Session",
    "SettingError",
    "StorageError",
    "StormError",
    "__version__",
    "linear_cross_entropy",
    "offload_activations",
    "stream",
]
FLAGS = {
    "data": ["--help"],  # those of its own commands: tests/cli/test_data.py
    "demo": ["--device", "--help", "--steps", "--vram"],
    "doctor": ["--disk", "--help", "--parameters"],
    "train": [
        "--accumulate",
        "--activations",
        "--batch",
        "--betas",
        "--chunked-loss",
        "--clip",
        "--completions-only",
        "--config",
        "--data",
        "--device",
        "--disk",
        "--disk-limit",
        "--dtype",
        "--epochs",
        "--eps",
        "--eval-batches",
        "--eval-data",
        "--eval-every",
        "--format",
        "--help",
        "--keep",
        "--log-every",
        "--lora-alpha",
        "--lora-dropout",
        "--lora-rank",
        "--lora-targets",
        "--loss",
        "--lr",
        "--model",
        "--no-chunked-loss",
        "--no-completions-only",
        "--no-packing",
        "--no-save-optimizer",
        "--no-tensorboard",
        "--on-nan",
        "--optimizer",
        "--output",
        "--packing",
        "--print-config",
        "--ram",
        "--resume",
        "--sample-every",
        "--sample-prompts",
        "--sample-tokens",
        "--save-every",
        "--save-optimizer",
        "--schedule",
        "--seed",
        "--sequence",
        "--step",
        "--steps",
        "--tensorboard",
        "--text-field",
        "--tokenizer",
        "--vram",
        "--warmup",
        "--weight-decay",
    ],
}


def test_public_names() -> None:
    assert sorted(stormtorch.__all__) == PUBLIC_NAMES
    assert all(hasattr(stormtorch, name) for name in PUBLIC_NAMES)


def test_names_that_are_imported_late_are_listed() -> None:
    assert {*PUBLIC_NAMES, "data"} <= set(dir(stormtorch))
    code = "import sys, stormtorch; assert 'stream' in dir(stormtorch); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


def test_no_setting_is_listed_that_is_refused() -> None:
    """Every keyword of `stream` can be given something else than its default."""
    settings = {item.name for item in dataclasses.fields(Settings)}
    keywords = set(inspect.signature(stormtorch.stream).parameters) - {"model", "optimizer"}
    assert keywords == settings
    budgets = {"vram", "ram", "disk", "disk_limit"}
    assert settings == budgets | {"device", "activations", "step", "master_dtype", "only", "leave"}


def test_sources_are_found_without_an_import_of_their_own() -> None:
    code = "import stormtorch as storm; storm.data.tokens, storm.data.raw, storm.data.Cast"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


def test_every_error_is_a_storm_error() -> None:
    for name in PUBLIC_NAMES:
        if name.endswith("Error") or name == "OutOfBudget":
            assert issubclass(getattr(stormtorch, name), stormtorch.StormError)


def test_commands_and_flags() -> None:
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    found = {
        name: sorted(flag for action in command._actions for flag in action.option_strings if flag.startswith("--"))
        for name, command in commands.items()
    }
    assert found == FLAGS


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from stormtorch.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=500)
