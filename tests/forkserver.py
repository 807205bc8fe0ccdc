"""Python processes that have torch loaded when they start: forks of one process per test worker that imported it once.

``Popen`` and ``run`` take a command as `subprocess` does, if it is ``[sys.executable, ...]`` with ``-c CODE``, ``-m
MODULE`` or a script. What a test may rely on:

- The process is a child of the test's own: signals, wait statuses and resource usage are the kernel's.
- It ends as an interpreter does: threads are joined, ``atexit`` runs, an uncaught exception or Ctrl-C has its status.
- Its ``argv``, working directory, environment, stdin, stdout and stderr are those asked for.

What it may not: modules are imported already (a test of what an import costs or loads needs `subprocess`), variables
that libraries read while they load (``OMP_NUM_THREADS`` is 1) had the server's values, and memory that the
imports took is shared with the server. The server starts no thread and does not touch CUDA."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

ALWAYS = ("torch", "stormtorch", "stormtorch.cli.main")
TRANSFORMERS = ("transformers.models.llama.modeling_llama", "stormtorch.training.run")
_PR_SET_CHILD_SUBREAPER = 36
_LENGTH = struct.Struct("!I")
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # of the server: before any test has changed it for itself


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`, for a command of this interpreter. ``preload``: what the server imports before it forks."""

    def __init__(self, command: list[str], *, preload: tuple[str, ...] = (), **settings: Any) -> None:
        assert command[0] == sys.executable, command
        self._preload = preload
        super().__init__(command, **settings)

    def _execute_child(
        self, command: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, *pipes_and_rights: Any,
    ) -> None:  # fmt: skip
        """What `subprocess` does by fork and exec; it has made the pipes, and keeps its own ends."""
        *pipes, restore_signals, gid, gids, uid, umask, start_new_session, process_group = pipes_and_rights
        assert (executable, preexec_fn, pass_fds, shell, gid, gids, uid, umask, start_new_session, process_group) == (
            None, None, (), False, None, None, None, -1, False, -1,
        ), "a setting that the fork server does not have"  # fmt: skip
        del close_fds, startupinfo, creationflags, restore_signals
        given = [theirs if theirs != -1 else number for number, theirs in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {
            "command": command[1:],
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "preload": self._preload,
            "parent": os.getpid(),
        }
        self.pid = _server().start(request, given)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(command: list[str], *, preload: tuple[str, ...] = (), **settings: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, but for ``input``."""
    timeout, check = settings.pop("timeout", None), settings.pop("check", False)
    if settings.pop("capture_output", False):
        settings.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(command, preload=preload, **settings) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


class _Server:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket, self._lock = ours, threading.Lock()
        os.set_inheritable(theirs.fileno(), True)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), str(theirs.fileno())],
            env=_ENVIRONMENT,
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self._close)

    def start(self, request: dict[str, Any], files: list[int]) -> int:
        """Ask for a process; the answer is its number. It becomes our child when the process between ends, since we
        take in orphans just then."""
        data = json.dumps(request).encode()
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        with self._lock:
            assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
            try:
                socket.send_fds(self._socket, [_LENGTH.pack(len(data))], files)
                self._socket.sendall(data)
                answer = _receive(self._socket, _LENGTH.size)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert answer, "the fork server has ended; what it said last is on stderr"
        return int(_LENGTH.unpack(answer)[0])

    def _close(self) -> None:
        self._socket.close()
        self._process.kill()  # it would wait for ever if a fork of ours still has the socket open
        self._process.wait()


_servers: dict[int, _Server] = {}


def _server() -> _Server:
    """One per process: a fork of the test's own has none."""
    if os.getpid() not in _servers:
        _servers[os.getpid()] = _Server()
    return _servers[os.getpid()]


def _receive(source: socket.socket, size: int) -> bytes:
    """``size`` bytes, or none at the end."""
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data


def _serve(asked: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process for each request. Returns in that process, with the request; and in the server at its end."""
    while True:
        head, files, _, _ = socket.recv_fds(asked, _LENGTH.size, 3)
        data = _receive(asked, _LENGTH.unpack(head)[0]) if head else b""
        if not data:
            return None
        request = json.loads(data)
        for name in (*ALWAYS, *request["preload"]):
            importlib.import_module(name)
        threads = sum(1 for _ in Path("/proc/self/task").iterdir())
        assert threads == 1, f"the fork server has {threads} threads; their locks would stay taken in its children"
        gc.freeze()  # what an interpreter does at its end then leaves alone what the imports made
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            while os.getppid() != request["parent"]:
                time.sleep(0.0005)
            asked.sendall(_LENGTH.pack(os.getpid()))
            return request, files
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Run the command, as the interpreter does after its start."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    through = bool(request["env"].get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # a pipe is not what the server has there
        old = getattr(sys, name)
        new = open(number, old.mode, 1 if name == "stderr" else -1, old.encoding, old.errors, closefd=False)  # noqa: SIM115
        if number:
            new.reconfigure(write_through=through)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    known = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in known if path and path not in sys.path]
    words = request["command"]
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        main.__dict__["__builtins__"] = __builtins__
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, request["cwd"])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup, which children inherit
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal is for pytest, which ends us
    with socket.socket(fileno=int(sys.argv[1])) as _asked:
        _found = _serve(_asked)
    if _found is not None:  # in the process that was asked for
        _become(*_found)
