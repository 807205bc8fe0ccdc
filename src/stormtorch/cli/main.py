"""``storm``: runs a sub-command.

Imports torch only once a command needs it, so that --help is immediate.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..core.errors import StormError
from ..training.settings.suggestions import suggestion

COMMANDS = {
    "data": "pack text or arrays into shards that load fast, and verify such shards",
    "demo": "train a model larger than its device budget, and compare it with plain PyTorch",
    "doctor": "report what this machine offers STORM and what is missing",
    "train": "fine-tune a language model that does not fit in VRAM; after a stop or crash the same command resumes",
}


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="storm", description="Train neural networks that do not fit in VRAM.")
    root.add_argument("--version", action="version", version=f"storm {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        command.set_defaults(parser=command)
        importlib.import_module(f".{name}", __package__).add_arguments(command)
    return root


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse; unknown flags are refused by their own command, with a suggestion."""
    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        command: argparse.ArgumentParser = options.parser
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag is None:
            command.error(f"unrecognized arguments: {' '.join(unknown)}")
        flag = flag.partition("=")[0]
        names = [action.dest for action in command._actions if action.option_strings]
        command.error(f"there is no {flag}. {suggestion(flag, names, flags=True) or 'See --help.'}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors meant for users become one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes instead of an error
    name = "storm"
    try:
        options = _parsed(sys.argv[1:] if arguments is None else arguments)
        name = f"storm {options.command}"
        status = int(importlib.import_module(f".{options.command}", __package__).run(options))
        if sys.stdout is not None:
            sys.stdout.flush()  # at exit it would be too late to notice that the reader has closed the pipe
        return status
    except StormError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains again when it flushes at exit
        return 141
