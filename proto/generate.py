"""Generate kvstore/rpc/*_pb2*.py from proto/kvstore/v1/*.proto (run by `make proto`).

The generated files are kept in the tree, so that an install needs no compiler; a test compares
them with a
fresh run. The compiler version is pinned to the oldest one whose output the supported protobuf
runtimes take.
"""

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Write the generated modules below `out` (as kvstore/rpc/NAME_pb2.py and its companions)."""
    sources = sorted((ROOT / "proto/kvstore/v1").glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    code = protoc.main(
        [
            "protoc",
            f"-Ikvstore/rpc={ROOT / 'proto/kvstore/v1'}",
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *(f"kvstore/rpc/{source.name}" for source in sources),
        ]
    )
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
