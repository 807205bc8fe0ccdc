"""The probe of GPUDirect Storage answers in time, whatever its child process does, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stormtorch.planner.measure.gds import _CHILD, GdsFinding, probe_gds

_PRINTS = "import sys; sys.stdout.write({!r}); sys.stdout.flush(); "


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = {child.pid for child in psutil.Process().children()}  # of other tests
    yield
    assert not list(folder.iterdir())
    assert {child.pid for child in psutil.Process().children()} <= before


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """What the kernel shows while nvidia-fs is loaded."""
    path = tmp_path / "nvidia-fs"
    path.mkdir()
    return path


def asked(module: Path, code: str, *, limit_s: float = 10.0) -> GdsFinding:
    """The finding if the child runs ``code``."""
    child = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    return probe_gds(module.parent, has_gpu=True, nvidia_fs=module, limit_s=limit_s, child=child)


def test_without_a_gpu_or_the_module_nothing_is_tried(tmp_path: Path) -> None:
    child = ["/no/such/program"]
    assert probe_gds(tmp_path, has_gpu=False, nvidia_fs=tmp_path, child=child).reason == "torch sees no CUDA device"
    found = probe_gds(tmp_path, has_gpu=True, nvidia_fs=tmp_path / "nvidia-fs", child=child)
    assert (found.works, "nvidia-fs is not loaded" in found.reason) == (False, True)


@pytest.mark.parametrize("works", [True, False])
def test_the_answer_of_the_child_counts(module: Path, works: bool) -> None:
    answer = json.dumps({"works": works, "reason": "of\nsome kind"})
    found = asked(module, _PRINTS.format(f"cuFile prints this\n{answer}\n"))
    assert found == GdsFinding(works, "of some kind")


def test_a_child_that_hangs_is_stopped(module: Path) -> None:
    start_s = time.perf_counter()
    found = asked(module, "while True: pass", limit_s=0.5)
    assert time.perf_counter() - start_s < 5.0
    assert found == GdsFinding(False, "the probe gave no answer in 0.5 s, and was stopped")


def test_an_answer_before_a_hang_counts_for_nothing(module: Path) -> None:
    answer = json.dumps({"works": True, "reason": ""})
    assert not asked(module, _PRINTS.format(answer) + "\nwhile True: pass", limit_s=0.5).works


def test_what_the_child_has_started_ends_with_it(module: Path) -> None:
    """A process that keeps the pipe open, and would run on."""
    code = f"""
        import subprocess, sys
        other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        open({str(module / "pid")!r}, "w").write(str(other.pid))
    """
    start_s = time.perf_counter()
    found = asked(module, code, limit_s=1.0)
    assert time.perf_counter() - start_s < 5.0
    assert not found.works
    pid = int((module / "pid").read_text())
    for _ in range(500):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.01)
    else:
        pytest.fail("it still runs")


def test_a_child_that_crashes(module: Path) -> None:
    found = asked(module, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert found == GdsFinding(False, "the probe was ended by signal 11 (SIGSEGV)")


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "no JSON", "[1, 2]", "7", "{}", '{"works": 1, "reason": ""}', '{"works": true}', "[" * 50_000, "\xff"],
    ids=["nothing", "blank", "text", "list", "number", "empty", "no bool", "no reason", "deep", "not ASCII"],
)
def test_garbage(module: Path, text: str) -> None:
    found = asked(module, _PRINTS.format(text) + "sys.exit(3)")
    assert found == GdsFinding(False, "the probe ended with status 3 and no answer that can be read")


def test_garbage_without_end(module: Path) -> None:
    start_s = time.perf_counter()
    assert not asked(module, "while True: print('x' * 1000)", limit_s=0.5).works
    assert time.perf_counter() - start_s < 5.0


def test_a_child_that_cannot_be_started(module: Path) -> None:
    found = probe_gds(module, has_gpu=True, nvidia_fs=module, child=["/no/such/program"])
    assert not found.works


def test_files_of_the_child_go_with_its_folder(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuFile writes cufile.log where it runs."""
    monkeypatch.chdir(module)
    answer = json.dumps({"works": True, "reason": ""})
    assert asked(module, "open('cufile.log', 'w').write('x')\n" + _PRINTS.format(answer)).works
    assert not Path("cufile.log").exists()


# --- the child --------------------------------------------------------------------------------------------------------

_DRIVER = """
    def cuInit(flags): return (STATUS,)
    def cuDevicePrimaryCtxRetain(device): return 0, "context"
    def cuCtxSetCurrent(context):
        assert context == "context"
        return (0,)
"""
_CUFILE = """
    import ctypes, fcntl, json, os
    def driver_open():
        assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "false"
    def handle_register(address):
        kind, number = ctypes.c_int.from_address(address).value, ctypes.c_int.from_address(address + 8).value
        direct = bool(fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT)
        status, path = os.fstat(number), os.readlink(f"/proc/self/fd/{number}")
        open(os.environ["SEEN"], "w").write(json.dumps([kind, status.st_size, status.st_nlink, direct, path]))
        return 77
    def handle_deregister(handle):
        assert handle == 77
"""


@pytest.fixture
def bindings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package cuda.bindings with the interface that the child uses, on the path."""
    package = tmp_path / "site" / "cuda" / "bindings"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "driver.py").write_text(textwrap.dedent(_DRIVER).replace("STATUS", "0"))
    (package / "cufile.py").write_text(textwrap.dedent(_CUFILE))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return package


def probed(module: Path, *, limit_s: float = 10.0) -> GdsFinding:
    directory = module.parent / "disk"
    directory.mkdir()
    found = probe_gds(directory, has_gpu=True, nvidia_fs=module, limit_s=limit_s)
    assert not list(directory.iterdir())
    return found


@pytest.mark.usefixtures("bindings")
def test_the_child_registers_a_file_of_the_directory(module: Path) -> None:
    found = probed(module)
    assert found == GdsFinding(True, "cuFile registered a file there")
    kind, size, links, direct, path = json.loads((module.parent / "seen").read_text())
    assert (kind, size, links, direct) == (1, 4096, 0, True)
    assert path.startswith(str(module.parent / "disk"))


def test_a_refusal_of_cufile_is_the_reason(module: Path, bindings: Path) -> None:
    (bindings / "cufile.py").write_text("def driver_open(): raise RuntimeError('NVFS_DRIVER_ERROR (5002)')")
    assert probed(module) == GdsFinding(False, "cuFile refused it (RuntimeError: NVFS_DRIVER_ERROR (5002))")


def test_without_the_bindings(module: Path, bindings: Path) -> None:
    (bindings / "cufile.py").unlink()
    found = probed(module)
    assert not found.works
    assert "cuda-bindings with cuFile cannot be imported" in found.reason


def test_without_a_driver_cufile_is_not_opened(module: Path, bindings: Path) -> None:
    """It would spin."""
    (bindings / "driver.py").write_text(textwrap.dedent(_DRIVER).replace("STATUS", "100"))
    (bindings / "cufile.py").write_text("def driver_open():\n    while True: pass")
    assert probed(module) == GdsFinding(False, "cuFile refused it (RuntimeError: CUDA driver error 100)")


def test_a_driver_that_spins(module: Path, bindings: Path) -> None:
    (bindings / "cufile.py").write_text("def driver_open():\n    while True: pass")
    start_s = time.perf_counter()
    assert probed(module, limit_s=1.0).reason == "the probe gave no answer in 1 s, and was stopped"
    assert time.perf_counter() - start_s < 5.0


def test_a_child_whose_parent_is_gone_ends_by_itself(bindings: Path, tmp_path: Path) -> None:
    (bindings / "cufile.py").write_text("def driver_open():\n    while True: pass")
    command = [sys.executable, "-P", str(_CHILD), str(tmp_path), "1"]
    done = subprocess.run(command, env={**os.environ}, timeout=60, check=False)
    assert done.returncode == -14
