"""Where the peers' packages lie: unpacked wheels in one git-ignored folder, on the path of the peer's process alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NEEDED_BY = ("ds3", "ramtorch", "ramtorch-bf16")


def folder() -> Path:
    return Path(os.environ.get("STORM_PEERS") or Path(__file__).parents[2] / ".peers")


def put_on_path() -> None:
    """Must come before torch is imported, which brings its own choice of packages that the peers want newer."""
    if not folder().is_dir():
        raise FileNotFoundError(f"no peers' packages in {folder()}; STORM_PEERS names the folder")
    sys.path.insert(0, str(folder()))
