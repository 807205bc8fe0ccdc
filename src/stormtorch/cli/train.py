"""``storm train``: fine-tunes a model that does not fit in VRAM. Its flags are the fields of `TrainSettings`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import StormError
from ..training.run.stopping import Stopped, Stopping
from ..training.settings.train_settings import TrainSettings, check_required
from ..training.settings.values import SWITCH, Kind
from .live import Live

_EPILOG = """\
exit status: 0 trained; 1 an error, in one line; 2 a flag that does not exist or lacks its value; 3 a loss, a gradient
or a weight is not finite; 129, 130, 143 stopped by a closed terminal, Ctrl-C or SIGTERM, with a checkpoint. The same
command resumes from the last checkpoint. SIGUSR1 saves a checkpoint, and training goes on.
"""
_ERROR_FILE = "error.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "storm train --model MODEL --data PATH [PATH ...] [flags]\n       storm train --config FILE [flags]"
    parser.allow_abbrev = False  # --step is not --steps
    parser.formatter_class = functools.partial(argparse.HelpFormatter, max_help_position=30)  # most flags fit in 30
    parser.epilog = _EPILOG
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings; flags override it")
    parser.add_argument("--print-config", action="store_true", help="print the settings as YAML, and exit")
    for title, items in itertools.groupby(dataclasses.fields(TrainSettings), lambda item: item.metadata["group"]):
        group = parser.add_argument_group(title)
        for item in items:
            kind: Kind = item.metadata["kind"]
            more: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            if kind is not SWITCH:
                more = {"nargs": "+" if kind.many else None, "metavar": kind.metavar}
            # Without a default, only flags that were given override a file.
            flag = f"--{item.name.replace('_', '-')}"
            group.add_argument(flag, default=argparse.SUPPRESS, help=_meaning(item), **more)


def run(options: argparse.Namespace) -> int:
    from ..training.settings.yaml_file import read_yaml, to_yaml

    names = {item.name for item in dataclasses.fields(TrainSettings)}
    given = read_yaml(options.config) if options.config is not None else {}
    given.update({name: value for name, value in vars(options).items() if name in names})
    settings = TrainSettings(**given)
    check_required(settings)
    if options.print_config:
        print(to_yaml(settings), end="")
        return 0
    return _train(settings)


def _train(settings: TrainSettings) -> int:
    # transformers prints messages that are not for our users, and bars into log files. It reads these at import.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    live = Live()
    try:
        with Stopping(live.warn) as stopping:  # before torch is imported, which takes seconds
            return _run(settings, live, stopping)
    except Stopped as stopped:
        live.warn(str(stopped))
        return stopped.status
    finally:
        live.close()


def _run(settings: TrainSettings, live: Live, stopping: Stopping) -> int:
    import torch

    from ..training.run.loop import NotFinite
    from ..training.run.train import train

    notices = _Notices(live.warn)
    logging.getLogger("stormtorch").addHandler(notices)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _in_one_line(live.warn)
            return train(settings, live, stopping)
    except NotFinite as error:
        live.warn(str(error))
        return 3
    except StormError:
        raise
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        live.warn(
            f"the device is out of memory: {reason} Lower --batch or --sequence, or use --chunked-loss or "
            "--activations recompute."
        )
        return 1
    except Exception as error:  # from user code, a library, or a bug in STORM
        live.warn(_unexpected(error, Path(settings.output)))
        return 1
    finally:
        logging.getLogger("stormtorch").removeHandler(notices)


class _Notices(logging.Handler):
    """STORM's own notices, above the line that is redrawn."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        self._warn(record.getMessage())


def _in_one_line(warn: Callable[[str], None]) -> Callable[..., None]:
    """Warnings of libraries: their first line, above the line that is redrawn."""

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        warn(f"{category.__name__}: {(str(message).splitlines() or [''])[0][:300]}")

    return show


def _unexpected(error: Exception, output: Path) -> str:
    """One line for the user; the traceback goes to a file, for a bug report."""
    from ..memory.disk.contained import replace_file
    from ..training.errors import reason_and_place

    file = output / _ERROR_FILE
    try:
        replace_file(file, "".join(traceback.format_exception(error)))
        rest = f"The traceback is in {file}."
    except (OSError, ValueError):  # ValueError: a message that cannot be written as UTF-8
        rest = f"({file} could not be written.)"
    return f"{reason_and_place(error)}. {rest}"


def _meaning(item: dataclasses.Field[Any]) -> str:
    text = str(item.metadata["help"]).replace("%", "%%")
    if item.default is None or item.default == () or "default" in text:
        return text
    default = ("no", "yes")[item.default] if isinstance(item.default, bool) else item.default
    return f"{text} (default: {default})"
