"""The loss without all logits: the numbers of the plain one, and a refusal where it would not be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch.core.errors import SettingError

from .tiny import checkpoint, losses, one_thread, records, run, settings, with_weights, write_model  # noqa: F401

transformers = pytest.importorskip("transformers")


CAPPED = {"model_type": "gemma2", "final_logit_softcapping": 0.5, "head_dim": 8}


@pytest.mark.parametrize(
    ("form", "changes"),
    [({}, {}), ({}, {"activations": "recompute"}), ({}, {"lora_rank": 2}), (CAPPED, {"activations": "recompute"})],
    ids=["", "recompute", "lora", "capped"],
)
@pytest.mark.daily("lora", "capped")
def test_the_numbers_are_those_of_the_plain_loss(
    tmp_path: Path, form: dict[str, Any], changes: dict[str, object]
) -> None:
    if "lora_rank" in changes:
        pytest.importorskip("peft")
    data = tmp_path / "completions.jsonl"
    lines = [{"prompt": "p" * (3 * index % 17 + 1), "completion": "some answer"} for index in range(40)]
    data.write_text("\n".join(map(json.dumps, lines)))
    model = with_weights(tmp_path / "model", **form)
    found = {}
    for chunked in (False, True):
        chosen = settings(
            tmp_path,
            model=str(model),
            data=(str(data),),
            eval_data=(str(data),),
            packing=False,
            accumulate=2,
            output=str(tmp_path / f"run-{chunked}"),
            chunked_loss=chunked,
            sample_every=4,
            sample_prompts=("pp",),
            sample_tokens=3,
            **changes,
        )
        assert run(chosen) == 0
        found[chunked] = chosen
    plain, ours = found[False], found[True]
    assert list(losses(ours).values()) == pytest.approx(list(losses(plain).values()), rel=1e-5)
    assert [r["loss"] for r in records(ours, "evaluation")] == pytest.approx(
        [r["loss"] for r in records(plain, "evaluation")], rel=1e-5
    )
    assert [r["text"] for r in records(ours, "sample")] == [r["text"] for r in records(plain, "sample")]
    if not changes.get("lora_rank"):
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(ours, 8))
        assert model(torch.zeros((1, 4), dtype=torch.int64)).logits.shape == (1, 4, 257)


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", model_type="granite", logits_scaling=8.0, initializer_range=1.0)
    with pytest.raises(SettingError, match=r"chunked_loss gives .* and GraniteForCausalLM gives"):
        run(settings(tmp_path, model=str(model), chunked_loss=True, steps=1))
