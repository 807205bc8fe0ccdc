from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stormtorch import SettingError, StorageError
from stormtorch.data import open_source, raw, tokens
from stormtorch.data.packing.pack_rows import chunks_of, pack_rows, rows_to_pack
from stormtorch.data.source import FileSource

from .reading import read_all, the_field


def test_rows_of_every_stride(tmp_path: Path) -> None:
    records = np.zeros(100, dtype=[("a", "<f4", (3,)), ("b", "<i8")])
    records["a"] = np.random.default_rng(0).random((100, 3))
    records["b"] = range(100)
    records.tofile(tmp_path / "r.bin")
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "t.bin")
    gaps = raw(tmp_path / "r.bin", dtype=records.dtype)
    overlaps = tokens(tmp_path / "t.bin", sequence=20, stride=3)
    for number, source in enumerate((gaps, overlaps)):
        rows = pack_rows(source.fields, chunks_of(source), tmp_path / f"o{number}", shard_bytes=600)
        assert rows == source.rows
        packed, plain = read_all(open_source(tmp_path / f"o{number}")), read_all(source)
        assert packed.keys() == plain.keys()
        assert all(torch.equal(packed[name], plain[name]) for name in plain)


def test_floats_become_smaller_and_integers_stay(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.linspace(0, 1, 30, dtype=np.float32).reshape(10, 3))
    np.save(tmp_path / "y.npy", np.arange(10))
    source = open_source({"x": tmp_path / "x.npy", "y": tmp_path / "y.npy"})
    assert isinstance(source, FileSource)
    pack_rows(source.fields, chunks_of(source), tmp_path / "o", shard_bytes=1000, dtype=torch.bfloat16)
    found = read_all(open_source(tmp_path / "o"))
    assert torch.equal(found["x"], read_all(source)["x"].to(torch.bfloat16))
    assert found["y"].dtype == torch.int64
    with pytest.raises(SettingError, match="floats only"):
        pack_rows(source.fields, chunks_of(source), tmp_path / "p", shard_bytes=1000, dtype=torch.int32)


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10, 3)))
    fields, chunks, _ = rows_to_pack([tmp_path / "x.npy"], None)
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"x\.npy ends at byte 367"):
        pack_rows(fields, chunks, tmp_path / "o", shard_bytes=1000)


@pytest.mark.parametrize("form", ["lz4 file", "zstd stream", "parquet"])
def test_what_must_be_decoded(tmp_path: Path, form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    x = np.arange(9000, dtype=np.float32).reshape(3000, 3)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3), "text": ["t"] * 3000})
    if form == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a", row_group_size=1000)
    else:
        codec, kind = form.split()
        make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with make(tmp_path / "a", table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_table(table, max_chunksize=1000)
    fields, chunks, total = rows_to_pack([tmp_path / "a"], ["x"])
    assert total > 0
    assert pack_rows(fields, chunks, tmp_path / "o", shard_bytes=10000) == 3000
    assert torch.equal(the_field(open_source(tmp_path / "o")), torch.from_numpy(x))


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from stormtorch.data.packing.pack_rows import pack_rows, rows_to_pack\n"
        "peaks = []\n"
        "for rows in (1000, 16000):\n"
        "    path = Path(sys.argv[1]) / f'{rows}.npy'\n"
        "    np.lib.format.open_memmap(path, mode='w+', dtype=np.float32, shape=(rows, 1024))\n"
        "    fields, chunks, _ = rows_to_pack([path], None)\n"
        "    pack_rows(fields, chunks, path.with_suffix('.packed'), shard_bytes=1 << 26)\n"
        "    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        "print(peaks[1] - peaks[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20 * 1024, f"{done.stdout} KiB more for 58 MiB more of input"
