"""``storm train``: fine-tunes a model that does not fit, with checkpoints that survive anything.

Its flags are the fields of `TrainSettings`. Exit status: 0 trained, 1 an error, 2 flags that argparse refuses, 3 a loss
that is not finite, 130 and 143 stopped by Ctrl-C and SIGTERM, with a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from ..training.settings import TrainSettings, check_required
from ..training.values import Kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings; flags override it")
    parser.add_argument("--print-config", action="store_true", help="print the settings as YAML, and do nothing")
    groups: dict[str, Any] = {}
    for item in dataclasses.fields(TrainSettings):
        title = item.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_flag(groups[title], item.name, item.metadata["kind"], _meaning(item))


def run(options: argparse.Namespace) -> int:
    from ..training.settings_file import read_yaml, to_yaml

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
    import torch

    from ..training.finite import NotFinite
    from ..training.run import train
    from .live import Live

    live = Live()
    try:
        return train(settings, live)
    except NotFinite as error:
        live.close()
        print(f"storm train: {error}", file=sys.stderr)
        return 3
    except torch.OutOfMemoryError as error:
        live.close()
        reason = str(error).splitlines()[0]
        print(
            f"storm train: the device is out of memory: {reason} Lower --batch or --sequence, or use --chunked-loss or "
            "--activations recompute.",
            file=sys.stderr,
        )
        return 1
    finally:
        live.close()


def _add_flag(group: Any, name: str, kind: Kind, meaning: str) -> None:
    """Absent flags leave no trace, so that those given override a file."""
    flag = f"--{name.replace('_', '-')}"
    if kind.switch:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=meaning)
        return
    group.add_argument(
        flag,
        default=argparse.SUPPRESS,
        nargs="+" if kind.many else None,
        metavar="{" + ",".join(kind.choices) + "}" if kind.choices else kind.metavar,
        help=meaning,
    )


def _meaning(item: dataclasses.Field[Any]) -> str:
    text = str(item.metadata["help"]).replace("%", "%%")
    shown = item.default is not None and item.default != () and "default" not in text
    return f"{text} (default: {item.default})" if shown else text
