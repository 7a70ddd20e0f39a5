"""The committed gRPC modules are what the compiler makes of proto/ today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    # A process of its own: the compiler imports protobuf's compiler plugins into whoever calls it.
    command = [sys.executable, str(ROOT / "proto/generate.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    kept = {
        path.relative_to(ROOT): path.read_text()
        for path in (ROOT / "kvstore/rpc").glob("*_pb2*")
        if path.suffix in (".py", ".pyi")
    }
    assert fresh == kept, "run `make proto`"
