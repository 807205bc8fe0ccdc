"""Law: a model's folder and a file of settings from a stranger run no code, ask no one, and name nothing outside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stormtorch.cli.main import main
from stormtorch.core.errors import StormError
from stormtorch.data.packing.text_tokenizer import TextTokenizer
from stormtorch.training.model import hf_model
from stormtorch.training.model.build import build
from stormtorch.training.model.model_folder import without_code
from stormtorch.training.run.text_data import load_tokenizer
from stormtorch.training.settings.train_settings import TrainSettings

from ..training.tiny import (
    one_thread,  # noqa: F401
    with_weights,
    write_model,
)
from .strangers import DEEP, Outside, flip, make_pipe, pickled, refused, sign, sparse, untouched, zipped

pytest.importorskip("transformers")

Spoil = Callable[[Path, Outside], object]
CODE = "import os\nos.mkdir({canary!r})\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"


def chosen(folder: Path) -> TrainSettings:
    return TrainSettings(model=str(folder), data=("none",), device="cpu", dtype="fp32")


def opened(folder: Path) -> torch.nn.Module:
    """All that is read of a model before it trains."""
    given = chosen(folder)
    hf_model.read_config(folder)
    load_tokenizer(given)
    built = build(given, values=True)
    if built.weights is not None:
        built.model.to_empty(device="cpu")
        hf_model.weight_files(folder)
        from stormtorch.checkpoint import load_weights

        load_weights(built.model, folder)
    return built.model


def config(**changes: Any) -> Spoil:
    def spoil(folder: Path, outside: Outside) -> None:
        path = folder / "config.json"
        text = json.dumps({**json.loads(path.read_text()), **changes}).replace("OUTSIDE", str(outside.folder))
        path.write_text(text)
        (folder / "own.py").write_text(CODE.format(canary=str(outside.ran)))

    return spoil


def tokenizer(**changes: Any) -> Spoil:
    def spoil(folder: Path, outside: Outside) -> None:
        path = folder / "tokenizer_config.json"
        text = json.dumps({**json.loads(path.read_text()), **changes}).replace("OUTSIDE", str(outside.folder))
        path.write_text(text)
        (folder / "own.py").write_text(CODE.format(canary=str(outside.ran)))

    return spoil


def text(name: str, content: str) -> Spoil:
    return lambda folder, _: (folder / name).write_text(content)


def elsewhere(name: str) -> Spoil:
    def spoil(folder: Path, outside: Outside) -> None:
        if (folder / name).exists():
            shutil.move(folder / name, outside.folder / "theirs.json")
        else:
            (outside.folder / "theirs.json").write_text("{}")
        (folder / name).symlink_to(outside.folder / "theirs.json")

    return spoil


def pipe(name: str) -> Spoil:
    return lambda folder, _: make_pipe(folder / name)


def _pickle(name: str, content: Callable[[Outside], bytes]) -> Spoil:
    def spoil(folder: Path, outside: Outside) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(content(outside))

    return spoil


def _index(name: str, target: str) -> Spoil:
    def spoil(folder: Path, outside: Outside) -> None:
        named = target.replace("OUTSIDE", str(outside.folder))
        (outside.folder / "pytorch_model.bin").write_bytes(zipped(pickled(outside)))
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": named}}))

    return spoil


def _adapter(folder: Path, outside: Outside) -> None:
    shutil.copytree(folder, outside.folder / "base")
    weights = (folder / "model.safetensors").read_bytes().replace(b'"model.norm.weight"', b'"model.morn.weight"')
    (folder / "model.safetensors").write_bytes(weights)  # so that transformers is to load it
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(outside.folder / "base")})
    )


def _templates(folder: Path, outside: Outside) -> None:
    (outside.folder / "theirs.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").symlink_to(outside.folder / "theirs.jinja")


def _checkpoint(name: str) -> Spoil:
    """A folder with sums, of which one is not right."""

    def spoil(folder: Path, _: Outside) -> None:
        (folder / "storm").mkdir()
        (folder / "storm" / "manifest.json").write_text(
            json.dumps({"format": 1, "step": 1, "created": "", "versions": {}, "files": {}})
        )
        sign(folder)
        flip(folder / name)

    return spoil


REFUSED: dict[str, Spoil] = {
    "config: a class of its own": config(model_type="own", auto_map={"AutoConfig": "own.Config"}),
    "config: a class on the Hub": config(model_type="own", auto_map={"AutoConfig": "a/b--own.Config"}),
    "config: quantised": config(quantization_config={"quant_method": "awq"}),
    "config: quantised within": config(text_config={"quantization_config": {"quant_method": "hqq"}}),
    "config: too many layers": config(num_hidden_layers=1 << 40),
    "config: too wide": config(hidden_size=1 << 60, num_attention_heads=1),
    "config: a type that is a list": config(model_type=["llama"]),
    "config: a type that is a number": config(model_type=5),
    "config: a dtype that is none": config(dtype="no_such_thing", hidden_size="wide"),
    "config: no JSON": text("config.json", "{"),
    "config: deep": text("config.json", DEEP),
    "config: deep within": text("config.json", '{"model_type": "llama", "a": ' + DEEP),
    "config: a list": text("config.json", "[]"),
    "config: null": text("config.json", "null"),
    "config: a number of 5000 digits": text(
        "config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}"
    ),
    "config: sparse": lambda folder, _: sparse(folder / "config.json"),
    "config: elsewhere": elsewhere("config.json"),
    "config: a pipe": pipe("config.json"),
    "tokenizer: elsewhere": elsewhere("tokenizer.json"),
    "tokenizer: its config elsewhere": elsewhere("tokenizer_config.json"),
    "tokenizer: no JSON": text("tokenizer.json", "{"),
    "tokenizer: deep": text("tokenizer.json", DEEP),
    "tokenizer: its config deep": text("tokenizer_config.json", DEEP),
    "tokenizer: its config a list": text("tokenizer_config.json", "[1]"),
    "tokenizer: a file outside": tokenizer(vocab_file="OUTSIDE/thesis.txt"),
    "tokenizer: a file above": tokenizer(tokenizer_file="../outside/thesis.txt"),
    "tokenizer: templates elsewhere": _templates,
    "generation: elsewhere": elsewhere("generation_config.json"),
    "generation: no JSON": text("generation_config.json", "{"),
    "generation: deep": text("generation_config.json", DEEP),
    "generation: a list": text("generation_config.json", "[]"),
    "weights: a pickle": _pickle("pytorch_model.bin", lambda outside: zipped(pickled(outside))),
    "weights: an old pickle": _pickle("pytorch_model.bin", pickled),
    "weights: an index upwards": _index("pytorch_model.bin.index.json", "../outside/pytorch_model.bin"),
    "weights: an index from the root": _index("pytorch_model.bin.index.json", "OUTSIDE/pytorch_model.bin"),
    "weights: an index beside the file": _index("model.safetensors.index.json", "../outside/thesis.txt"),
    "weights: elsewhere": elsewhere("model.safetensors"),
    "weights: an adapter with a base elsewhere": _adapter,
    "checkpoint: a bit of the config": _checkpoint("config.json"),
    "checkpoint: a bit of the tokenizer": _checkpoint("tokenizer.json"),
    "checkpoint: a bit of the weights": _checkpoint("model.safetensors"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_weights(tmp_path_factory.mktemp("model") / "model", num_hidden_layers=1)


@pytest.mark.parametrize("name", REFUSED)
def test_model_folders(tmp_path: Path, model: Path, name: str) -> None:
    outside = Outside(tmp_path / "outside")
    folder = tmp_path / "stranger"
    shutil.copytree(model, folder)
    REFUSED[name](folder, outside)
    with untouched(outside):
        refused(lambda: opened(folder))


TAKEN: dict[str, Spoil] = {
    "attention from the Hub": config(attn_implementation="a-stranger/attention"),
    "attention from the Hub, as saved": config(_attn_implementation="kernels-community/flash-attn3"),
    "attention for each part": config(attn_implementation={"": "a-stranger/attention"}),
    "attention that is not installed": config(attn_implementation="flash_attention_2"),
    "internal names": config(_attn_implementation_internal="a-stranger/attention"),
    "experts from the Hub": config(experts_implementation="a-stranger/experts"),
    "kernels": config(use_kernels=True, kernel_config={"kernel_mapping": {"RMSNorm": "a-stranger/norm"}}),
    "code that is not needed": config(auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}),
    "trust": config(trust_remote_code=True, auto_map={"AutoModelForCausalLM": "a/b--own.Model"}),
    "weights elsewhere": config(transformers_weights="../outside/thesis.txt"),
    "another config": config(configuration_files=["../outside/config.4.0.0.json"]),
    "a tokenizer's code that is not needed": tokenizer(auto_map={"AutoTokenizer": ["own.Tokenizer", None]}),
    "a tokenizer's name": tokenizer(name_or_path="a-stranger/tokenizer", _commit_hash="0" * 40),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_would_be_fetched_or_run_is_left_out(tmp_path: Path, model: Path, name: str) -> None:
    outside = Outside(tmp_path / "outside")
    folder = tmp_path / "stranger"
    shutil.copytree(model, folder)
    TAKEN[name](folder, outside)
    with untouched(outside):
        try:
            made: Any = opened(folder)
        except StormError:
            assert "tokenizer's code" in name  # transformers has no class for it without its code
            return
    assert made.config._attn_implementation == "sdpa"
    assert type(made).__name__ == "LlamaForCausalLM"


def test_attention_of_torch_may_be_chosen(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", attn_implementation="eager")
    found = hf_model.build_empty(hf_model.read_config(folder), torch.float32)
    assert found.config._attn_implementation == "eager"  # type: ignore[union-attr]


def test_a_config_is_otherwise_as_transformers_reads_it(tmp_path: Path) -> None:
    plain = hf_model.read_config(write_model(tmp_path / "plain"))
    asking = hf_model.read_config(write_model(tmp_path / "asking", attn_implementation="a-stranger/attention"))
    named = {"_name_or_path"}
    assert {**asking.to_dict(), **dict.fromkeys(named)} == {**plain.to_dict(), **dict.fromkeys(named)}
    kept, left_out = without_code({"text_config": {"attn_implementation": "a/b", "auto_map": {}}, "a": 1})
    assert kept == {"text_config": {}, "a": 1}
    assert left_out == {"attn_implementation", "auto_map"}


def test_packing_asks_for_no_code(tmp_path: Path, model: Path) -> None:
    """`storm data pack --tokenizer` of a folder without a tokenizer.json."""
    outside = Outside(tmp_path / "outside")
    folder = tmp_path / "stranger"
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").unlink()
    tokenizer(auto_map={"AutoTokenizer": ["own.Tokenizer", None]}, tokenizer_class="Tokenizer")(folder, outside)
    with untouched(outside):
        refused(lambda: TextTokenizer(folder))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
SETTINGS: dict[str, bytes] = {
    "a Python object": b"model: !!python/object/apply:os.mkdir [OUTSIDE/ran]\n",
    "a Python name": b"model: !!python/name:os.system\n",
    "a new object": b"model: !!python/object/new:os.mkdir [OUTSIDE/ran]\n",
    "a tag of its own": b"model: !include OUTSIDE/thesis.txt\n",
    "a bomb of aliases": BOMB.encode() + b"model: *i\n",
    "an alias": b"model: &a x\ndata: *a\n",
    "an alias of itself": b"model: &a [*a]\n",
    "a merge": b"a: &a {model: x}\n<<: *a\n",
    "nested deeply": b"model: " + b"[" * 20_000,
    "maps nested deeply": b"model: " + b"{a: " * 20_000,
    "indented deeply": b"".join(b" " * depth + b"a:\n" for depth in range(2000)),
    "a list": b"- model\n",
    "a word": b"model",
    "a name twice": b"model: a\nmodel: b\n",
    "no UTF-8": b"model: \xff\xfe\n",
    "a NUL": b"model: a\0b\n",
    "a date that is none": b"lr: 2024-99-99\n",
    "a date": b"lr: 2024-01-01\n",
    "bytes": b"model: !!binary aGVsbG8=\n",
    "bytes that are none": b"model: !!binary ====a\n",
    "a set": b"data: !!set {a, b}\n",
    "a list as a name": b"? [a, b]\n: c\n",
    "a map as a name": b"? {a: b}\n: c\n",
    "a number of 5000 digits": b"steps: " + b"9" * 5000 + b"\n",
    "a number too large": b"steps: 1" + b"0" * 400 + b"\n",
    "infinity": b"lr: .inf\n",
    "no number": b"lr: .nan\n",
    "an unknown name": b"shell: ls\n",
    "too long": b"#" * (2 << 20),
    "an unknown escape": b'model: "\\q"\n',
    "an anchor of nothing": b"model: *nothing\n",
    "two documents": b"model: a\n---\nmodel: b\n",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    outside = Outside(tmp_path / "outside")
    file = tmp_path / "run.yaml"
    file.write_bytes(SETTINGS[name].replace(b"OUTSIDE", str(outside.folder).encode()))
    with untouched(outside):
        assert main(["train", "--config", str(file), "--output", str(tmp_path / "run")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("storm train: ")
    assert "error.txt" not in line
    assert len(line) < 1500
