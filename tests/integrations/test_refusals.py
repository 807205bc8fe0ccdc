"""What cannot go together with streaming is refused when the trainer is built, in one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from stormtorch.core.errors import OutOfBudget, SettingError, StormError
from stormtorch.integrations.huggingface import StormTrainer
from stormtorch.integrations.huggingface.settings import keep_in_ram, refuse_arguments, refuse_model

from .small import Rows, arguments, llama


@pytest.mark.parametrize(
    ("storm", "message"),
    [
        ({"vrm": "8GiB"}, r"'vrm'.*not valid. Accepted: vram, ram, "),
        ("8GiB", r"storm='8GiB' is not valid. Accepted: a dict"),
        ({"step": "later"}, r"step='later' is not valid"),
        ({"device": "cuda"}, r"the trainer's device is cpu"),
        ({"step": "backward"}, r"max_grad_norm is 1.0 and gradient_accumulation_steps is 4"),
    ],
)
def test_settings_of_streaming(storm: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        StormTrainer(model=llama(), args=arguments(tmp_path), train_dataset=Rows(), storm=storm)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"torch_compile": True}, "compiles the whole model"),
        ({"bf16_full_eval": True}, "cast the model"),
        ({"optim": "galore_adamw_layerwise"}, "updates inside backward"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}, "both move activations"),
    ],
    ids=["compile", "full-eval", "layerwise", "offload"],
)
def test_settings_of_the_trainer(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=message):
        StormTrainer(model=llama(), args=arguments(tmp_path, **changed), train_dataset=Rows())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_gpu": 4}, r"torch sees 4, .*CUDA_VISIBLE_DEVICES=0"),
        ({"world_size": 2}, "this run has 2 processes"),
        ({"deepspeed": "zero3.json"}, "DeepSpeed"),
        ({"fsdp": "full_shard"}, "FSDP"),
        ({"device": torch.device("mps")}, "not to 'mps'"),
        ({"activation_offloading": True}, "activation_offloading=True and STORM both move"),
    ],
    ids=str,
)
def test_several_devices_and_other_placements(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    """As the trainer's arguments say it, which cannot be had for real on a machine without GPUs."""
    real = arguments(tmp_path)
    names = [name for name in dir(real) if not name.startswith("_") and name in REFUSED]
    given = SimpleNamespace(**{name: getattr(real, name) for name in names})
    refuse_arguments(given, {})
    vars(given).update(changed)
    with pytest.raises(SettingError, match=message) as caught:
        refuse_arguments(given, {})
    assert "\n" not in str(caught.value)


REFUSED = [
    *("deepspeed", "fsdp", "world_size", "n_gpu", "device", "torch_compile", "fp16_full_eval", "bf16_full_eval"),
    *("gradient_checkpointing_kwargs", "optim", "max_grad_norm", "gradient_accumulation_steps"),
]


def test_models_that_are_not_in_one_place() -> None:
    model: Any = llama()
    refuse_model(model)
    model.hf_device_map = {"": "cuda:0"}
    refuse_model(model)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    with pytest.raises(SettingError, match="device_map spread the model over 0, cpu"):
        refuse_model(model)
    model.hf_device_map, model.is_quantized = None, True
    with pytest.raises(SettingError, match="quantized"):
        refuse_model(model)


def test_a_model_that_is_named_is_loaded_into_ram() -> None:
    def init(model: Any, rewards: Any = None, args: Any = None, **kwargs: Any) -> None:
        del model, rewards, args, kwargs

    for asked, given in ((None, {"device_map": None}), ({"device_map": "cuda"}, {"device_map": "cuda"})):
        args = SimpleNamespace(model_init_kwargs=asked)
        keep_in_ram(init, ("some/model", None, args), {})
        assert args.model_init_kwargs == given
    args = SimpleNamespace(model_init_kwargs=None)
    keep_in_ram(init, (), {"model": nn.Linear(1, 1), "args": args})
    assert args.model_init_kwargs is None


def test_a_budget_that_is_too_small_leaves_the_model_alone(tmp_path: Path) -> None:
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = StormTrainer(model=model, args=arguments(tmp_path), train_dataset=Rows(), storm={"vram": "32KiB"})
    with pytest.raises(OutOfBudget, match=r"vram='32KiB'"):
        trainer.train()
    assert trainer.session is None
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_optimizer_that_would_not_be_streamed_is_noticed(tmp_path: Path) -> None:
    class Own(StormTrainer):
        def create_optimizer(self, *_: Any, **__: Any) -> Any:
            model: Any = self.model
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return self.optimizer

    with pytest.raises(StormError, match="must call super"):
        Own(model=llama(), args=arguments(tmp_path), train_dataset=Rows()).train()


def test_the_core_needs_no_transformers_and_one_line_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['transformers'] = sys.modules['accelerate'] = None\n"
        "import stormtorch.session.api; print('ok'); import stormtorch.integrations.huggingface"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert ended.stdout == "ok\n"
    assert ended.stderr.strip().splitlines()[-1] == (
        "ImportError: stormtorch.integrations.huggingface needs accelerate. Install it: pip install 'stormtorch[hf]'"
    )
