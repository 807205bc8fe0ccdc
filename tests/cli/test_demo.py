"""``storm demo``: what it shows, that it notices when it is not so, and what it does without transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import stormtorch
from stormtorch.cli.main import main

DATA = Path(stormtorch.__file__).parent / "demo_data"


def test_it_trains_within_its_budget_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["demo", "--device", "cpu", "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert "13.9 MiB of weights, device budget 6.9 MiB, 3 steps" in out
    assert "storm train ... --vram 7111KiB" in out
    assert f"keep it: storm train --model {DATA} --data {DATA / 'corpus.jsonl'} --output my-run --vram 7111KiB" in out
    assert "The trained model is" not in out  # it is gone when the demo ends
    assert "Open it" not in out
    assert "not a comparison of speed" in out
    assert "The loss falls." in out
    assert "The budget held: 6.9 MiB of 6.9 MiB." in out
    assert "equals plain PyTorch's, bit for bit" in out or "Losses differ from plain PyTorch's by at most" in out
    assert "This is a defect" not in out


def test_wrong_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    # A link that moves zeros.
    monkeypatch.setattr("stormtorch.memory.lanes.thread.ThreadLane.copy", lambda _lane, target, *_: target.zero_())
    assert main(["demo", "--device", "cpu", "--steps", "2"]) != 0
    shown = capsys.readouterr()
    assert "This is a defect" in shown.out


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo", "--device", "cpu", "--steps", "3"]) == 1
    shown = capsys.readouterr().err
    assert "storm demo needs the package transformers. Install it: pip install 'stormtorch[hf]'." in shown


def test_the_corpus_and_its_tokenizer() -> None:
    """Every byte of every document comes back."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(DATA))
    texts = [json.loads(line)["text"] for line in (DATA / "corpus.jsonl").read_text().splitlines()]
    assert 40_000 < sum(len(text.encode()) for text in texts) < 80_000
    for text in [*texts, bytes(range(32, 127)).decode(), "ä€🎉\x00\x7f"]:
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 256 == len(tokenizer) - 1
