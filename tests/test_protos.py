"""The committed gRPC modules are what the compiler makes of proto/ today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.gateway.servicer import BlocksServicer
from kvstore.rpc import blocks_pb2, blocks_pb2_grpc, control_pb2, control_pb2_grpc
from kvstore.rpc.server import ControlServicer

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


@pytest.mark.parametrize(
    ("service", "servicer", "generated"),
    [
        (
            control_pb2.DESCRIPTOR.services_by_name["Control"],
            ControlServicer,
            control_pb2_grpc.ControlServicer,
        ),
        (
            blocks_pb2.DESCRIPTOR.services_by_name["Blocks"],
            BlocksServicer,
            blocks_pb2_grpc.BlocksServicer,
        ),
    ],
)
def test_every_verb_is_implemented(service: object, servicer: type, generated: type) -> None:
    """The generated base answers "not implemented"; no verb of ours is left to it."""
    for method in service.methods:
        ours = getattr(servicer, method.name)
        assert ours is not getattr(generated, method.name), method.name
