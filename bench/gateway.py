"""Suite `gateway`: what the block API costs beside the bare gRPC stream it is made of.

Run it with `make bench SUITE=gateway`, or `python -m bench.gateway [--only NAME...] [--quick]`.
"""

from __future__ import annotations

import sys

from bench import gateway_bulk, gateway_keys, gateway_runs, gateway_shared
from bench.harness import Suite

SUITE = Suite(
    "gateway",
    [gateway_bulk.PART, *gateway_shared.PARTS, gateway_keys.PART, gateway_runs.PART],
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
