from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from stormtorch.cli.data import add_arguments
from stormtorch.cli.live import Progress
from stormtorch.cli.main import main
from stormtorch.data import open_source, tokens
from stormtorch.data.source import FileSource

from ..forkserver import Popen


def tokenizer(path: Path, *words: str) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=words[0]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return path


def test_flags_are_frozen() -> None:
    root = argparse.ArgumentParser()
    add_arguments(root)
    actions = next(a for a in root._actions if isinstance(a, argparse._SubParsersAction)).choices
    found = {
        name: sorted(flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))
        for name, parser in actions.items()
    }
    assert found == {
        "pack": [
            "--columns",
            "--document-numbers",
            "--dtype",
            "--eos-id",
            "--help",
            "--out",
            "--prompt-field",
            "--shard-size",
            "--skip-bad-lines",
            "--text-field",
            "--tokenizer",
        ],
        "verify": ["--help"],
    }


def test_text_becomes_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = tokenizer(tmp_path / "t.json", "[UNK]", "the", "cat", "sat", "</s>")
    data = tmp_path / "data"
    data.mkdir()
    (data / "10.txt").write_text("the cat\n\nsat dog\n")
    (data / "9.jsonl").write_text(json.dumps({"body": "sat"}) + "\n{bad\n")
    (data / "9.jsonl").rename(tmp_path / "9.jsonl")
    out = tmp_path / "out"
    assert main(["data", "pack", str(data), "--out", str(out), "--tokenizer", str(name)]) == 0
    said = capsys.readouterr().out
    assert "2 documents, 6 tokens." in said
    assert f"Read it with storm.DataLoader(storm.data.tokens({str(out)!r}, sequence=2048), ...)." in said
    assert np.fromfile(out / "00000-0.bin", np.uint16).tolist() == [1, 2, 4, 3, 0, 4]
    assert tokens(out, sequence=2).rows == 2

    arguments = ["data", "pack", str(tmp_path / "9.jsonl"), "--out", str(tmp_path / "o2"), "--tokenizer", str(name)]
    arguments += ["--text-field", "body", "--eos-id", "none", "--dtype", "int64"]
    assert main(arguments) == 1
    assert "9.jsonl, line 2: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "o2").exists()
    assert main([*arguments, "--skip-bad-lines"]) == 0
    assert "1 documents, 1 tokens, 1 bad lines skipped." in capsys.readouterr().out
    assert np.fromfile(tmp_path / "o2" / "00000-0.bin", np.int64).tolist() == [3]


def test_arrays_become_rows_and_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.ones((100, 8), np.float32))
    out = tmp_path / "out"
    command = ["data", "pack", str(tmp_path / "x.npy"), "--out", str(out), "--shard-size", "1KiB", "--dtype", "float16"]
    assert main(command) == 0
    source = open_source(out)
    assert isinstance(source, FileSource)
    assert [shard.rows for shard in source.shards] == [64, 36]
    assert main(["data", "verify", str(out)]) == 0
    said = capsys.readouterr()
    assert "2 shards, 1.6 KiB, every checksum is right" in said.out
    assert said.err.count("\n") == 2
    assert "100%" in said.err
    (out / "00001-0.bin").write_bytes(bytes(576))
    assert main(["data", "verify", str(out)]) == 1
    assert "00001-0.bin is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x.npy"], ["exists already"]),
        (["x.npy", "--shard-size", "8G"], ["--shard-size='8G'", "GiB"]),
        (["x.npy", "--shard-size", "0"], ["--shard-size 0"]),
        (["x.npy", "--dtype", "float31"], ["--dtype='float31'", "Accepted"]),
        (["x.npy", "--dtype", "int8"], ["floats only"]),
        (["x.npy", "--eos-id", "3"], ["--eos-id has no effect for arrays"]),
        (["x.npy", "--columns", "y"], ["has fields data; asked for y"]),
        (["a.txt"], ["a.txt is text", "--tokenizer"]),
        (["a.txt", "--tokenizer", "no.json"], ["no.json does not exist"]),
        (["a.txt", "--text-field", "text", "--dtype", "int32"], ["text, not tokens"]),
        (["a.jsonl", "--text-field", "text", "--columns", "x"], ["--columns has no effect for documents"]),
        (["a.jsonl", "--text-field", "text"], ["Give --dtype"]),
        (["a.jsonl", "--text-field", "text", "--eos-id", "-1"], ["--eos-id -1"]),
        (["no.npy"], ["no.npy", "does not exist"]),
    ],
)
def test_bad_input_gets_one_clear_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((3, 2), np.float32))
    Path("a.txt").write_text("text\n")
    Path("a.jsonl").write_text('{"text": [1]}\n')
    out = "x.npy" if words == ["exists already"] else "out"
    assert main(["data", "pack", *arguments, "--out", out]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("storm data: ")
    assert all(word in lines[0] for word in words), lines[0]
    assert sorted(os.listdir()) == ["a.jsonl", "a.txt", "x.npy"]  # noqa: PTH208


def test_a_tokenizer_without_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = tokenizer(tmp_path / "t.json", "[UNK]", "the")
    (tmp_path / "a.txt").write_text("the\n")
    command = ["data", "pack", str(tmp_path / "a.txt"), "--out", str(tmp_path / "o"), "--tokenizer", str(name)]
    assert main(command) == 1
    assert "which token ends a document. Give it: --eos-id N, or none." in capsys.readouterr().err
    assert main([*command, "--eos-id", "9"]) == 0
    assert np.fromfile(tmp_path / "o" / "00000-0.bin", np.uint16).tolist() == [1, 9]


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines('{"text": [1, 2, 3]}\n' for _ in range(3_000_000))
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from stormtorch.cli.main import main; sys.exit(main())"
    command = ["data", "pack", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "o"), "--text-field", "text"]
    command += ["--dtype", "int32", "--shard-size", "64KiB"]
    child = Popen([sys.executable, "-c", code, *command], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not (tmp_path / ".o.partial" / "00001-0.bin").exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=500)
    assert child.returncode == 130
    assert said.endswith("storm data: interrupted\n")
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_and_elsewhere() -> None:
    for stream in (Terminal(), io.StringIO()):
        now = [0.0]
        progress = Progress(1000 << 20, stream=stream, clock=lambda now=now: now[0])  # type: ignore[misc]
        for _ in range(250):
            now[0] += 0.05
            progress(1 << 20)
        progress.close()
        said = stream.getvalue()
        assert "25%  250.0 MiB of 1000.0 MiB  20.0 MiB/s  ETA 0:38" in said
        if stream.isatty():
            assert said.count("\r") > 50
            assert said.count("\n") == 1
            assert "[######..................]" in said
        else:
            assert "\r" not in said
            assert said.count("\n") == 2
