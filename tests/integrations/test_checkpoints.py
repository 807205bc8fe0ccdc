"""What a streamed trainer writes: opened by plain ``transformers``, gone on from bit for bit, and never half of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, Trainer

from stormtorch.integrations.huggingface import StormTrainer
from stormtorch.integrations.huggingface.resume import newest_complete

from .small import BOTH, VRAM, Rows, StopAt, arguments, assert_same, llama, logged, qwen, weights

SAVING: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 5,
}


def trainer_of(
    kind: Any, folder: Path, *, make: Any = llama, callbacks: Any = None, storm: Any = None, **changed: Any
) -> Any:
    more = {"storm": storm or {"vram": "200KiB"}} if issubclass(kind, StormTrainer) else {}
    args = arguments(folder, **{**SAVING, **changed})
    return kind(model=make(), args=args, train_dataset=Rows(), callbacks=callbacks, **more)


def interrupted(kind: Any, folder: Path, **more: Any) -> None:
    """A run that stopped after its third step, with a checkpoint of its second."""
    trainer = trainer_of(kind, folder, callbacks=[StopAt(3)], **more)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.train()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2"]


def adapted() -> Any:
    """A bf16 model with fp32 adapters and dropout, as TRL and PEFT make it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear")
    return peft.get_peft_model(llama(torch.bfloat16), config)


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (llama, {}),
        pytest.param(
            lambda: qwen(torch.bfloat16),
            {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 1e-3},
            marks=pytest.mark.wide,
        ),
        (lambda: llama(torch.bfloat16), {"learning_rate": 1e-5}),
        pytest.param(lambda: llama(torch.bfloat16), {"optim": "adafactor"}, marks=pytest.mark.wide),
        (adapted, {"bf16": True}),
    ],
    ids=["fp32", "masters-of-sgd", "masters", "unknown-optimizer", "adapters"],
)
def test_resume_is_bit_for_bit(make: Any, changed: dict[str, Any], tmp_path: Path) -> None:
    whole = trainer_of(StormTrainer, tmp_path / "whole", make=make, **changed)
    whole.train()
    interrupted(StormTrainer, tmp_path / "cut", make=make, **changed)
    resumed = trainer_of(StormTrainer, tmp_path / "cut", make=make, **changed)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(whole)
    assert_same(weights(resumed), weights(whole))


def test_masters_are_part_of_the_checkpoint(tmp_path: Path) -> None:
    """The file holds what bf16 weights cannot: 16 bits more of each, and moments in fp32; and not a byte of others."""
    trainer = trainer_of(StormTrainer, tmp_path, make=lambda: llama(torch.bfloat16), max_steps=2)
    trainer.train()
    file = tmp_path / "checkpoint-2" / "optimizer.pt"
    states = torch.load(file, weights_only=True)["state"]
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    for name, dtype in (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32), ("master", torch.int16)):
        assert {state[name].dtype for state in states.values()} == {dtype}
        assert sum(state[name].numel() for state in states.values()) == count
    assert any(bool(state["master"].any()) for state in states.values())
    assert file.stat().st_size < count * 10 * 1.25


@pytest.mark.parametrize(
    "kinds", [(Trainer, StormTrainer), (StormTrainer, Trainer)], ids=["plain-first", "storm-first"]
)
def test_plain_and_streamed_runs_go_on_from_each_other(kinds: tuple[Any, Any], tmp_path: Path) -> None:
    whole = trainer_of(Trainer, tmp_path / "whole")
    whole.train()
    interrupted(kinds[0], tmp_path / "cut")
    resumed = trainer_of(kinds[1], tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(whole)
    assert_same(weights(resumed), weights(whole))


def test_other_settings_of_streaming_go_on_from_it(tmp_path: Path) -> None:
    whole = trainer_of(StormTrainer, tmp_path / "whole")
    whole.train()
    interrupted(StormTrainer, tmp_path / "cut", storm={"vram": VRAM, "step": "serial"})
    resumed = trainer_of(StormTrainer, tmp_path / "cut", storm={"activations": "recompute"})
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(whole)


def test_the_folder_opens_with_from_pretrained(tmp_path: Path) -> None:
    trainer = trainer_of(StormTrainer, tmp_path, make=qwen, save_total_limit=2)
    trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-5"]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-5")
    rows = torch.stack([Rows()[index]["input_ids"] for index in range(4)])
    with torch.no_grad():
        assert torch.equal(opened(rows).logits, trainer.model.eval()(rows).logits)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    changed = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "learning_rate": 0.3,
    }
    runs = []
    for kind, more in BOTH:
        args = arguments(tmp_path / kind.__name__, **{**SAVING, **changed})
        trainer = kind(model=llama(), args=args, train_dataset=Rows(), eval_dataset=Rows(8), **more)
        trainer.train()
        runs.append((logged(trainer), trainer.evaluate()["eval_loss"], weights(trainer)))
    assert runs[0][:2] == runs[1][:2]
    assert_same(runs[0][2], runs[1][2])
    assert runs[1][1] == min(entry["eval_loss"] for entry in runs[1][0] if "eval_loss" in entry)


def test_half_a_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_complete(tmp_path) is None
    for step in (2, 4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"global_st')
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-2"
    assert [record.getMessage().split(" is ")[0] for record in caplog.records] == [
        str(tmp_path / "checkpoint-10"),
        str(tmp_path / "checkpoint-4"),
    ]


def test_a_run_that_ended_while_it_saved_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of the second checkpoint's optimizer state on the disk, as a kill leaves it."""
    whole = trainer_of(StormTrainer, tmp_path / "whole")
    whole.train()
    save = torch.save

    def dying(content: Any, file: Path | str) -> None:
        if Path(file).parts[-2:] == ("checkpoint-4", "optimizer.pt"):
            Path(file).write_bytes(b"half")
            raise KeyboardInterrupt
        save(content, file)

    monkeypatch.setattr(torch, "save", dying)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(StormTrainer, tmp_path / "cut").train()
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    resumed = trainer_of(StormTrainer, tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(whole)
    assert_same(weights(resumed), weights(whole))


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer_of(StormTrainer, tmp_path).train(resume_from_checkpoint=True)
