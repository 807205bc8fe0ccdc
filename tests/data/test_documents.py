from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stormtorch import SettingError, StorageError
from stormtorch.data.packing.documents import Document, DocumentReader, document_files


def contents(path: Path, **options: Any) -> list[Any]:
    return [document.content for document in DocumentReader(**options).read(path)]


def test_text_is_a_document_in_each_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\r\n\n  \ntwo ü\nthree".encode())
    seen: list[int] = []
    assert contents(tmp_path / "a.txt", progress=seen.append) == ["one", "two ü", "three"]
    assert sum(seen) == (tmp_path / "a.txt").stat().st_size


def test_json_lines(tmp_path: Path) -> None:
    lines = [{"text": "one", "p": "ask"}, {"text": "", "p": ""}, {"text": "a\nb", "p": ""}, {"text": [1, 2], "p": [3]}]
    data = "\n".join(map(json.dumps, lines)).encode()
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert contents(tmp_path / name) == ["one", "a\nb", [1, 2]]
        seen: list[int] = []
        reader = DocumentReader(prompt_field="p", progress=seen.append)
        assert list(reader.read(tmp_path / name)) == [
            Document(content="one", prompt="ask"),
            Document(content="a\nb", prompt=""),
            Document(content=[1, 2], prompt=[3]),
        ]
        assert sum(seen) == (tmp_path / name).stat().st_size


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}', encoding="utf-8-sig")
    for name in ("a.txt", "a.jsonl"):
        seen: list[int] = []
        assert contents(tmp_path / name, progress=seen.append) == ["one", "two"]
        assert sum(seen) == (tmp_path / name).stat().st_size


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{broken", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        (b'{"text": "a', "not JSON (Unterminated string starting at column 10)"),
        (b'"text"', "a JSON string, not an object"),
        (b'{"other": 1, "more": 2}', "no field 'text' among 'other', 'more'"),
        (b'{"text": 7}', "of type int, neither text nor a list of whole numbers"),
        (b'{"text": [1.5]}', "neither text"),
        (b'{"text": null}', "of type NoneType"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_bad_lines_are_named_or_counted(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(StorageError) as caught:
        contents(path)
    assert f"{path}, line 3: " in str(caught.value)
    assert words in str(caught.value)
    assert "--skip-bad-lines" in str(caught.value)
    reader = DocumentReader(skip_bad_lines=True)
    assert [document.content for document in reader.read(path)] == ["good", "last"]
    assert reader.bad_lines == 1


def test_which_files_of_a_directory_are_documents(tmp_path: Path) -> None:
    def found() -> list[str]:
        return [path.name for path in document_files(tmp_path)]

    (tmp_path / "README.md").write_text("a note")
    with pytest.raises(SettingError, match=r"holds no documents \(1 other files, such as README\.md\)"):
        found()
    for name in ("10.jsonl", "9.jsonl.gz", "a.txt"):
        (tmp_path / name).write_text("")
    assert found() == ["9.jsonl.gz", "10.jsonl", "a.txt"]
    (tmp_path / "b.parquet").write_text("")
    assert found() == ["b.parquet"]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    assert found() == ["data.arrow"]
    assert document_files(tmp_path / "README.md") == [tmp_path / "README.md"]


def test_lines_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormtorch.data.formats.text_lines.LINE_LIMIT", 100)
    (tmp_path / "a.txt").write_bytes(b"x" * 100 + b"\n" + b"y" * 200)
    with pytest.raises(StorageError, match=r"a\.txt, line 1: longer than 100 B"):
        contents(tmp_path / "a.txt")


def test_truncated_and_foreign_archives(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-12])
    with pytest.raises(StorageError, match=r"a\.jsonl\.gz, after line \d+: "):
        contents(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd....")
    with pytest.raises(SettingError, match="compressed with zstd"):
        contents(tmp_path / "a.jsonl.zst")
    with pytest.raises(StorageError, match="does not exist"):
        contents(tmp_path / "no.txt")


def test_plain_text_has_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(SettingError, match="plain text and has no field 'p'"):
        contents(tmp_path / "a.txt", prompt_field="p")


@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_columns_of_tables(tmp_path: Path, form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    texts, ids = [f"t{i}" for i in range(3000)], [[i] * (i % 3) for i in range(3000)]
    table = pa.table({"id": range(3000), "text": texts, "ids": ids})
    path = tmp_path / "a"
    if form == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        with (pa.ipc.new_file if form == "file" else pa.ipc.new_stream)(path, table.schema) as writer:
            writer.write_table(table)
    assert contents(path) == texts
    assert contents(path, text_field="ids") == [some for some in ids if some]
    with pytest.raises(SettingError, match=r"has columns id, text, ids and no 'body'"):
        contents(path, text_field="body")
    with pytest.raises(StorageError, match=r"row 0: field 'id' is of type int, neither text"):
        contents(path, text_field="id")
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(StorageError, match="truncated or damaged"):
        contents(path)
