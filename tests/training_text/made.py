"""A tokenizer of bytes with chat templates, and files of documents, small enough to check by eye."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import stormtorch
from stormtorch.training.text import Prepared

DEMO_DATA = Path(stormtorch.__file__).parent / "demo_data"
END = 256
CHAT = (
    "{% for message in messages %}<|im|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = None) -> Any:
    """Each byte is its own token; ``<|end|>`` is 256, and ``<|im|>`` 257 where there is a template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(DEMO_DATA))
    if template is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im|>"]})
        tokenizer.chat_template = template
    return tokenizer


def json_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rows_of(prepared: Prepared) -> tuple[list[list[int]], list[list[int]]]:
    ids, labels = (np.load(prepared.arrays[name]) for name in ("input_ids", "labels"))
    assert ids.dtype == labels.dtype == np.int32
    assert ids.shape == labels.shape == (prepared.rows, prepared.sequence)
    return ids.tolist(), labels.tolist()


def learnt(tokenizer: Any, labels: list[int]) -> list[str]:
    """The texts that the labels spell, one for each run of them."""
    runs: list[list[int]] = [[]]
    for label in labels:
        if label == -100:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tokenizer.decode(run) for run in runs if run]
