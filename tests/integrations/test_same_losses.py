"""A streamed trainer gives the plain one's numbers, bit for bit: losses, norms of gradients, weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback

from stormtorch.integrations.huggingface import StormTrainer, storm_trainer
from stormtorch.session.api import Session
from stormtorch.streams.home.parameter import HomeParameter
from stormtorch.streams.optimizer.adam.stream import AdamStream

from ..laws.models import roots_are_exact
from .small import BOTH, VRAM, Rows, StopAt, arguments, assert_same, common, llama, logged, qwen, weights


def both(
    folder: Path, make: Callable[[], Any], *, storm: dict[str, Any] | None = None, **changed: Any
) -> tuple[Trainer, StormTrainer]:
    """A plain and a streamed trainer after training, on models of their own; the same numbers are asserted."""
    plain = Trainer(model=make(), args=arguments(folder / "a", **changed), train_dataset=Rows(), eval_dataset=Rows(8))
    plain.train()
    streamed = StormTrainer(
        model=make(),
        args=arguments(folder / "b", **changed),
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        storm={"vram": VRAM, **(storm or {})},
    )
    streamed.train()
    assert len(logged(plain)) >= 3
    if changed.get("optim") == "adamw_torch" and not roots_are_exact():  # the unfused one; see there
        for one, other in zip(logged(streamed), logged(plain), strict=True):
            assert one == pytest.approx(other, rel=1e-4)
        return plain, streamed
    assert logged(streamed) == logged(plain)
    assert_same(weights(streamed), weights(plain))
    return plain, streamed


@pytest.mark.parametrize("make", [llama, pytest.param(qwen, marks=pytest.mark.wide)])
def test_accumulation_clipping_and_evaluation(make: Callable[[], Any], tmp_path: Path) -> None:
    _, streamed = both(tmp_path, make, eval_strategy="steps", eval_steps=3, weight_decay=0.1)
    assert any(entry["grad_norm"] > 1.0 for entry in logged(streamed) if "grad_norm" in entry), "nothing was clipped"
    report = streamed.storm_report
    assert report is not None
    assert report.steps == 5
    assert report.device_peak_bytes <= VRAM


@pytest.mark.parametrize(
    "changed",
    [
        {"gradient_checkpointing": True, "label_smoothing_factor": 0.1},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "optim": "adamw_torch", "max_grad_norm": 0.0},
        {"bf16": True, "per_device_train_batch_size": 3},
        {"optim": "adafactor", "neftune_noise_alpha": 5.0},
    ],
    ids="-".join,
)
def test_settings_of_the_trainer(changed: dict[str, Any], tmp_path: Path) -> None:
    _, streamed = both(tmp_path, llama, max_steps=3, **changed)
    assert all("grad_norm" in entry for entry in logged(streamed))


@pytest.mark.parametrize("storm", [{"step": "serial", "activations": "offload"}], ids=str)
def test_settings_of_streaming(storm: dict[str, Any], tmp_path: Path) -> None:
    both(tmp_path, llama, storm=storm, max_steps=3)


@pytest.mark.parametrize(
    ("dtype", "storm"), [(torch.float32, {"step": "backward"}), (torch.bfloat16, {"master_dtype": None})]
)
def test_without_accumulation_and_clipping(dtype: torch.dtype, storm: dict[str, Any], tmp_path: Path) -> None:
    """What updates inside of backward need; and what makes bf16 without masters the plain trainer's bf16.

    STORM adds up bf16 micro-batches, and takes their norm, in fp32.
    """
    runs = []
    both_kinds: list[tuple[Any, dict[str, Any]]] = [(Trainer, {}), (StormTrainer, {"storm": storm})]
    for kind, more in both_kinds:
        args = arguments(tmp_path, gradient_accumulation_steps=1, max_grad_norm=0.0, max_steps=6)
        trainer = kind(model=llama(dtype), args=args, train_dataset=Rows(), **more)
        trainer.train()
        runs.append(([entry["loss"] for entry in logged(trainer)], weights(trainer)))
        assert all("grad_norm" in entry for entry in logged(trainer)) is ("step" not in more.get("storm", {}))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def make() -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))

    both(tmp_path, make, gradient_checkpointing=True, max_steps=3)


def test_an_optimizer_and_a_schedule_of_the_users_own(tmp_path: Path) -> None:
    runs = []
    for kind, more in BOTH:
        model = llama()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        trainer = kind(
            model=model, args=arguments(tmp_path), train_dataset=Rows(), optimizers=(optimizer, schedule), **more
        )
        trainer.train()
        runs.append(logged(trainer))
    assert runs[0] == runs[1]


def test_other_trainers_and_classes_of_the_users_own(tmp_path: Path) -> None:
    class Halved(Seq2SeqTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return (loss[0] / 2, *loss[1:]) if isinstance(loss, tuple) else loss / 2

    runs = []
    for kind in (Halved, storm_trainer(Halved)):
        trainer = kind(model=llama(), args=Seq2SeqTrainingArguments(**common(tmp_path)), train_dataset=Rows())
        trainer.train()
        runs.append(logged(trainer))
    assert runs[0] == runs[1]
    assert storm_trainer(Halved) is storm_trainer(Halved)
    assert issubclass(storm_trainer(Halved), Halved)
    assert storm_trainer(Trainer) is StormTrainer
    assert storm_trainer(StormTrainer) is StormTrainer


def test_train_twice_and_evaluate_in_between(tmp_path: Path) -> None:
    runs = []
    for kind, more in BOTH:
        trainer = kind(model=llama(), args=arguments(tmp_path), train_dataset=Rows(), eval_dataset=Rows(8), **more)
        losses = [trainer.evaluate()["eval_loss"]]
        trainer.train()
        first = logged(trainer)
        losses.append(trainer.evaluate()["eval_loss"])
        predictions = trainer.predict(Rows(4)).predictions
        trainer.train()
        runs.append((first, losses, predictions.tolist(), logged(trainer)))
    assert runs[0] == runs[1]


def test_the_model_is_streamed_during_train_and_ordinary_afterwards(tmp_path: Path) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
            seen.append({type(parameter) for parameter in model.parameters()})

    model = llama()
    trainer = StormTrainer(
        model=model, args=arguments(tmp_path), train_dataset=Rows(), callbacks=[Look()], storm={"vram": VRAM}
    )
    trainer.train()
    assert seen == [{HomeParameter}] * 5
    assert trainer.session is None
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert "_call_impl" not in vars(model)


def test_callbacks_see_gradients_before_they_are_dropped(tmp_path: Path) -> None:
    norms = []

    class Look(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
            norms.append(float(model.lm_head.weight.grad.norm()))

    for kind, more in BOTH:
        kind(model=llama(), args=arguments(tmp_path), train_dataset=Rows(), callbacks=[Look()], **more).train()
    assert len(norms) == 10
    assert norms[5:] == norms[:5]


def test_nobody_waits_for_clipped_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm comes from the session, and gradients are dropped without being looked at, so they are not scaled."""
    clipped, scaled = [], []
    clip, apply = Session._clip, AdamStream.apply_factor

    def counted(self: Session, *args: Any, **kwargs: Any) -> torch.Tensor:
        clipped.append(args[1])
        return clip(self, *args, **kwargs)

    def noted(self: AdamStream) -> None:
        scaled.append(self._factor)
        apply(self)

    monkeypatch.setattr(Session, "_clip", counted)
    monkeypatch.setattr(AdamStream, "apply_factor", noted)
    trainer = StormTrainer(model=llama(), args=arguments(tmp_path), train_dataset=Rows(), storm={"vram": VRAM})
    trainer.train()
    assert clipped == [1.0] * 5
    assert [factor for factor in scaled if factor is not None] == []


def test_an_exception_closes_the_session(tmp_path: Path) -> None:
    model = llama()
    trainer = StormTrainer(
        model=model, args=arguments(tmp_path), train_dataset=Rows(), callbacks=[StopAt(3)], storm={"vram": VRAM}
    )
    with pytest.raises(RuntimeError, match="stopped on purpose"):
        trainer.train()
    assert trainer.session is None
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    trainer.remove_callback(StopAt)
    assert trainer.train().global_step == 5


def test_a_smaller_batch_is_tried_when_memory_runs_out(tmp_path: Path) -> None:
    """``auto_find_batch_size`` runs the loop again, in the same session."""
    sizes = []

    class Full(StormTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            sizes.append(len(inputs["input_ids"]))
            if sizes[-1] > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    args = arguments(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=4)
    trainer = Full(model=llama(), args=args, train_dataset=Rows(), storm={"vram": VRAM})
    assert trainer.train().global_step == len(trainer.state.log_history) - 1
    assert set(sizes[1:]) <= {1, 2, 3}
    assert trainer.session is None
