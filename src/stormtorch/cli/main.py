"""``storm``: finds the sub-command and runs it.

Imports torch only once a command needs it, so that --help is immediate.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .. import __version__
from ..core.errors import StormError

COMMANDS = {
    "demo": "stream data larger than its device budget through all memory tiers, and check every byte",
    "doctor": "say what this machine offers STORM and what is missing",
}


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="storm", description="Train neural networks that do not fit in VRAM.")
    root.add_argument("--version", action="version", version=f"storm {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        importlib.import_module(f".{name}", __package__).add_arguments(command)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors meant for users become one line on stderr."""
    options = parser().parse_args(arguments)
    command = importlib.import_module(f".{options.command}", __package__)
    try:
        return int(command.run(options))
    except StormError as error:
        print(f"storm {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"storm {options.command}: interrupted", file=sys.stderr)
        return 130
