"""Names of an arena's files, and which files are ours to remove. Touches nothing itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

HEADER = "header"
LOCK = "LOCK"
CLIENTS = "clients"
_OURS = re.compile(r"header(\..+)?|region-\d{4,}")
_CLIENT = re.compile(r"\d{1,10}-[0-9a-f]{16}\.lock")


def region_name(number: int) -> str:
    """File name of region `number`."""
    return f"region-{number:04}"


def memory_files(directory: Path) -> set[Path]:
    """Header and region files, finished or not, of whatever daemon used `directory`."""
    with os.scandir(directory) as entries:
        return {
            directory / entry.name
            for entry in entries
            if _OURS.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
        }


def is_client_name(name: str) -> bool:
    """Whether `name` is that of a client's lock file, and no path to anywhere else."""
    return _CLIENT.fullmatch(name) is not None
