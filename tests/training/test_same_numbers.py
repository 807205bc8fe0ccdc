"""Law: `storm train` gives the losses and weights of a plain loop, bit for bit.

A session adds up the norm of all gradients in an order of its own, so its last bit may differ from torch's. The plain
loop compares the two norms and clips with the session's, to compare everything else exactly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stormtorch as storm
from stormtorch.training.settings.train_settings import TrainSettings

from .tiny import Quiet, checkpoint, losses, one_thread, records, run, settings, write_model  # noqa: F401

transformers = pytest.importorskip("transformers")


def plain(chosen: TrainSettings, *, decay: float = 0.0) -> tuple[list[float], Any]:
    """The same training as anybody would write it: transformers, torch, and a loop."""
    torch.manual_seed(chosen.seed)
    config = transformers.AutoConfig.for_model(**json.loads((Path(str(chosen.model)) / "config.json").read_text()))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=chosen.lr, weight_decay=decay)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 2))
    arrays = next((Path(chosen.output) / "data").glob("*/input_ids.npy"))
    source = {name: str(arrays.with_name(f"{name}.npy")) for name in ("input_ids", "labels")}
    loader = storm.DataLoader(source, chosen.batch, shuffle=True, seed=chosen.seed, drop_last=True, epochs=50)
    batches = iter(loader)
    found = []
    norms = [record["grad_norm"] for record in records(chosen)]
    for norm in norms:
        given = [{name: part.long() for name, part in next(batches).items()} for _ in range(chosen.accumulate)]
        counts = [(batch["labels"][:, 1:] != -100).sum() for batch in given]
        total = torch.zeros(())
        for batch, count in zip(given, counts, strict=True):
            loss = model(**batch).loss
            if len(given) > 1:
                loss = loss * (count / sum(counts))
            loss.backward()
            total = total + loss.detach()
        assert norm > chosen.clip, "nothing is clipped"
        assert float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(
            norm, rel=1e-6
        )
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), chosen.clip, torch.tensor(norm))
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        found.append(float(total))
    loader.close()
    return found, model


def roots_are_exact() -> bool:
    """With Intel's MKL ``torch.sqrt`` is off by one bit now and then, and so is torch's Adam, which we then only equal
    within rounding."""
    numbers = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    return torch.equal(numbers.sqrt(), numbers.double().sqrt().float())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("budget", ["auto", "200KiB"])
@pytest.mark.daily("auto-1", "200KiB-3")
def test_losses_and_weights_equal_a_plain_loop(tmp_path: Path, accumulate: int, budget: str) -> None:
    chosen = settings(tmp_path, schedule="constant", warmup=2, accumulate=accumulate, weight_decay=0.1, vram=budget)
    assert run(chosen) == 0
    expected, model = plain(chosen, decay=0.1)
    if not roots_are_exact():
        assert list(losses(chosen).values()) == pytest.approx(expected, rel=1e-6)
        return
    assert losses(chosen) == dict(enumerate(expected, start=1))
    trained = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(chosen, 8), dtype=torch.float32)
    for (name, ours), theirs in zip(trained.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_evaluation_and_samples_leave_no_trace(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", attention_dropout=0.1))
    alone = settings(tmp_path, model=model)
    assert run(alone) == 0
    watched = settings(
        tmp_path,
        model=model,
        output=str(tmp_path / "watched"),
        eval_data=alone.data,
        eval_every=2,
        sample_every=3,
        sample_prompts=("The storm",),
        sample_tokens=4,
    )
    watcher = Quiet()
    assert run(watched, watcher) == 0
    assert losses(watched) == losses(alone)
    assert [record["step"] for record in records(watched, "evaluation")] == [2, 4, 6, 8]
    assert [record["step"] for record in records(watched, "sample")] == [3, 6, 8]
    assert any("on the evaluation data" in line for line in watcher.said)


def test_the_evaluation_is_the_mean_over_tokens(tmp_path: Path) -> None:
    """Rows that are learnt from to different extents: the mean of the batches' means would be another number."""
    data = tmp_path / "completions.jsonl"
    lines = [{"prompt": "p" * (3 * index + 1), "completion": "c" * (20 - 3 * index)} for index in range(6)]
    data.write_text("\n".join(map(json.dumps, lines)))
    chosen = settings(tmp_path, eval_data=(str(data),), packing=False, steps=1, batch=2)
    assert run(chosen) == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(chosen, 1), dtype=torch.float32)
    found = {path.parent: path for path in (Path(chosen.output) / "data").glob("*/input_ids.npy")}
    [rows] = [
        parent for parent in found if json.loads((parent / "prepared.json").read_text())["format"] == "completion"
    ]
    source = {name: str(rows / f"{name}.npy") for name in ("input_ids", "labels")}
    total, count = 0.0, 0
    with storm.DataLoader(source, 1) as loader, torch.no_grad():
        for batch in loader:
            tokens = int((batch["labels"][:, 1:] != -100).sum())
            total += float(trained(input_ids=batch["input_ids"].long(), labels=batch["labels"].long()).loss) * tokens
            count += tokens
    assert count != 6 * 31
    [record] = records(chosen, "evaluation")
    assert record["loss"] == pytest.approx(total / count, rel=1e-5)
