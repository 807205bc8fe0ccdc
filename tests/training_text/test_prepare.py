"""Files to rows: what is packed, cut, filled up, left out, kept for the next time."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from stormtorch import DataLoader, SettingError, StormError
from stormtorch.training.text import data_files, prepare, rows

from ..forkserver import Popen
from .made import END, byte_tokenizer, json_lines, rows_of

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def test_packed_documents_follow_each_other(tmp_path: Path, tokenizer: Any) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"text": "abc"}, {"text": "defgh"}, {"text": "i"})
    made = prepare([path], tokenizer, sequence=5, cache=tmp_path / "cache")
    ids, labels = rows_of(made)
    assert ids == [[*b"abc", END, *b"d"], [*b"efgh", END], [*b"i", END, END, END, END]]
    assert labels == [ids[0], ids[1], [*b"i", END, -100, -100, -100]]
    assert (made.rows, made.tokens, made.documents, made.trained_tokens) == (3, 12, 3, 4 + 4 + 1)


def test_a_document_a_row(tmp_path: Path, tokenizer: Any) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"text": "abcdefgh"}, {"text": "ij"})
    made = prepare([path], tokenizer, sequence=5, cache=tmp_path / "cache", packing=False)
    ids, labels = rows_of(made)
    assert ids == [[*b"abcde"], [*b"ij", END, END, END]]
    assert labels == [[*b"abcde"], [*b"ij", END, -100, -100]]
    assert made.cut_documents == 1
    assert "1 of them cut" in str(made)


def test_more_than_a_buffer(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormtorch.training.text.rows._BUFFER_TOKENS", 21)
    texts = [f"{number:03d}" * (number % 7 + 1) for number in range(51)]
    path = json_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    ids, labels = rows_of(prepare([path], tokenizer, sequence=10, cache=tmp_path / "cache"))
    flat = [token for row in ids for token in row]
    whole = [token for text in texts for token in [*text.encode(), END]]
    assert flat[: len(whole)] == whole
    assert [label for row in labels for label in row][: len(whole)] == whole


def test_a_text_file_is_one_document(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormtorch.training.text.documents._PIECE_CHARACTERS", 8)
    text = "one\ntwo\n\nthree and more\nfour"
    (tmp_path / "book.txt").write_text(text)
    made = prepare([tmp_path / "book.txt"], tokenizer, sequence=len(text) + 1, cache=tmp_path / "cache")
    assert rows_of(made)[0] == [[*text.encode(), END]]
    assert made.documents == 1
    with pytest.raises(SettingError, match="one document"):
        prepare([tmp_path / "book.txt"], tokenizer, sequence=8, packing=False, cache=tmp_path / "cache")


@pytest.mark.parametrize("form", ["<|im|> $A", "<|im|> $A <|end|>"])
def test_what_the_tokenizer_puts_around_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """A model that was made with a first token gets it in training too; only once in a text that came in pieces."""
    specials = [("<|im|>", 257), ("<|end|>", END)]
    monkeypatch.setattr("stormtorch.training.text.documents._PIECE_CHARACTERS", 3)
    from tokenizers.processors import TemplateProcessing

    first = byte_tokenizer("{{ messages }}")  # a tokenizer of its own, with <|im|>
    first.backend_tokenizer.post_processor = TemplateProcessing(single=form, special_tokens=specials)
    path = tmp_path / "a.txt"
    path.write_text("ab\ncd\nef")
    ids, _ = rows_of(prepare([path], first, sequence=10, cache=tmp_path / "cache"))
    assert ids == [[257, *b"ab\ncd\nef", END]]


def test_tokens_of_the_users_own(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"text": [1, 2, 3]}, {"text": [4, 5]})
    ids, _ = rows_of(prepare([path], None, sequence=5, cache=tmp_path / "cache"))
    assert ids == [[1, 2, 3, 4, 5]]  # nothing is put between: who made them has done so
    path = json_lines(tmp_path / "b.jsonl", {"prompt": [1, 2], "completion": [3, 4]})
    _, labels = rows_of(prepare([path], None, sequence=4, cache=tmp_path / "cache"))
    assert labels == [[-100, -100, 3, 4]]


def test_the_loader_reads_it(tmp_path: Path, tokenizer: Any) -> None:
    path = json_lines(tmp_path / "a.jsonl", *({"text": f"document {number}"} for number in range(20)))
    made = prepare([path], tokenizer, sequence=16, cache=tmp_path / "cache")
    with DataLoader(made.arrays, 2, shuffle=True) as loader:
        batches = list(loader)
    assert set(batches[0]) == {"input_ids", "labels"}
    assert sum(len(batch["input_ids"]) for batch in batches) == made.rows


def test_the_second_time_nothing_is_written(tmp_path: Path, tokenizer: Any) -> None:
    path, cache = json_lines(tmp_path / "a.jsonl", {"text": "abcdef"}), tmp_path / "cache"
    first = prepare([path], tokenizer, sequence=4, cache=cache)
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("*")}
    os.utime(path)  # touched, not changed
    again = prepare([path], byte_tokenizer(), sequence=4, cache=cache)
    assert (first.reused, again.reused) == (False, True)
    assert again.fingerprint == first.fingerprint
    assert {file: file.stat().st_mtime_ns for file in again.arrays.values()} == {
        file: before[file] for file in again.arrays.values()
    }


@pytest.mark.parametrize("change", ["content", "sequence", "packing", "field", "tokenizer"])
def test_what_changes_the_rows_makes_them_anew(tmp_path: Path, tokenizer: Any, change: str) -> None:
    path, cache = json_lines(tmp_path / "a.jsonl", {"text": "abcdef", "other": "ghi"}), tmp_path / "cache"
    first = prepare([path], tokenizer, sequence=4, cache=cache)
    if change == "content":
        json_lines(path, {"text": "abcdeX", "other": "ghi"})
    other = byte_tokenizer()
    if change == "tokenizer":
        other.eos_token = "a"
    made = prepare(
        [path],
        other,
        sequence=5 if change == "sequence" else 4,
        packing=change != "packing",
        text_field="other" if change == "field" else None,
        cache=cache,
    )
    assert not made.reused
    assert made.fingerprint != first.fingerprint


def test_a_damaged_cache_is_made_anew(tmp_path: Path, tokenizer: Any) -> None:
    path, cache = json_lines(tmp_path / "a.jsonl", {"text": "abcdef"}), tmp_path / "cache"
    first = prepare([path], tokenizer, sequence=4, cache=cache)
    os.truncate(first.arrays["labels"], 100)
    again = prepare([path], tokenizer, sequence=4, cache=cache)
    assert not again.reused
    assert again.fingerprint == first.fingerprint
    rows_of(again)


def test_rows_with_nothing_to_learn_are_left_out(tmp_path: Path, tokenizer: Any) -> None:
    """Their loss would be the mean of nothing. The first token of a row is predicted by none, so it does not count."""
    records = [{"prompt": "p" * 20, "completion": "c"}, {"prompt": "pp", "completion": "yes"}]
    path = json_lines(tmp_path / "a.jsonl", *records)
    for packing in (True, False):
        made = prepare([path], tokenizer, sequence=6, packing=packing, cache=tmp_path / "cache")
        _, labels = rows_of(made)
        assert all(any(label != -100 for label in row[1:]) for row in labels)
        assert made.empty_rows == (3 if packing else 1)
        assert made.trained_tokens == sum(label != -100 for row in labels for label in row[1:])


def test_nothing_to_learn_at_all(tmp_path: Path, tokenizer: Any) -> None:
    path = json_lines(tmp_path / "a.jsonl", {"prompt": "p" * 20, "completion": "c"})
    with pytest.raises(SettingError, match=r"a\.jsonl: none of 1 documents with 6 tokens .* --sequence 6"):
        prepare([path], tokenizer, sequence=6, packing=False, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob(".*writing*"))


def test_memory_does_not_grow_with_the_data(tmp_path: Path, tokenizer: Any) -> None:
    peaks = []
    for lines in (1000, 4000):
        path = tmp_path / f"{lines}.jsonl"
        path.write_text('{"text": "%s"}\n' % ("many words " * 30) * lines)
        tracemalloc.start()
        prepare([path], tokenizer, sequence=256, cache=tmp_path / f"cache{lines}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0], peaks


def test_what_a_killed_process_leaves_is_removed(tmp_path: Path, tokenizer: Any) -> None:
    cache, path = tmp_path / "cache", json_lines(tmp_path / "a.jsonl", {"text": "abcdef"})
    script = (
        "import sys, time; from pathlib import Path; from stormtorch.training.text.rows import being_written\n"
        "with being_written(Path(sys.argv[1]), 'x') as d:\n"
        "    (d / 'input_ids.npy').write_bytes(bytes(1000)); print('there', flush=True); time.sleep(60)\n"
    )
    cache.mkdir()
    child = Popen([sys.executable, "-c", script, str(cache)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"there\n"
        prepare([path], tokenizer, sequence=4, cache=cache)
        assert len(list(cache.glob(".x.writing-*"))) == 1  # it lives, and is left alone
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    prepare([path], tokenizer, sequence=4, cache=cache)
    assert not list(cache.glob(".*writing*"))


def test_an_interrupt_leaves_nothing(tmp_path: Path, tokenizer: Any) -> None:
    cache, path = tmp_path / "cache", json_lines(tmp_path / "a.jsonl", {"text": "abcdef"}, {"text": "g"})

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([path], tokenizer, sequence=4, cache=cache, progress=stop)
    assert {file.name for file in cache.iterdir()} <= {"digests.cache"}


def test_a_full_disk_is_said(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    path = json_lines(tmp_path / "a.jsonl", {"text": "abcdef"})
    with pytest.raises(StormError, match="no space is left") as caught:
        prepare([path], tokenizer, sequence=4, cache=tmp_path / "cache")
    assert str(tmp_path / "cache") in str(caught.value)
    assert not list((tmp_path / "cache").glob(".*writing*"))


def test_several_files_and_directories(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "d").mkdir()
    for number in (2, 10, 1):
        json_lines(tmp_path / "d" / f"part-{number}.jsonl", {"text": f"{number};"})
    (tmp_path / "d" / "README.md").write_text("no data")
    assert [file.name for file in data_files([tmp_path / "d"])] == ["part-1.jsonl", "part-2.jsonl", "part-10.jsonl"]
    seen: list[int] = []
    made = prepare([tmp_path / "d"], tokenizer, sequence=10, cache=tmp_path / "cache", progress=seen.append)
    assert rows_of(made)[0] == [[*b"1;", END, *b"2;", END, *b"10;", END]]
    assert sum(seen) == sum(file.stat().st_size for file in data_files([tmp_path / "d"]))


def test_two_at_once_agree(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes the same rows while ours are written: one of the two stays, and is complete."""
    path, cache = json_lines(tmp_path / "a.jsonl", {"text": "abcdef"}), tmp_path / "cache"
    closing = rows.RowWriter.close
    state = {"nested": False}

    def other_first(self: rows.RowWriter) -> str:
        if not state["nested"]:
            state["nested"] = True
            prepare([path], tokenizer, sequence=4, cache=cache)
        return closing(self)

    monkeypatch.setattr(rows.RowWriter, "close", other_first)
    made = prepare([path], tokenizer, sequence=4, cache=cache)
    rows_of(made)
    assert not list(cache.glob(".*writing*"))
