"""Suite `dataplane`: what the store costs beside the plain operations it stands on.

Run it with `make bench SUITE=dataplane`, or `python -m bench.dataplane [--only NAME...] [--quick]`.
"""

from __future__ import annotations

import sys

from bench import (
    dataplane_clients,
    dataplane_host,
    dataplane_match,
    dataplane_nvme,
    dataplane_start,
    dataplane_torn,
)
from bench.harness import Suite

SUITE = Suite(
    "dataplane",
    [
        dataplane_match.PART,
        dataplane_host.PART,
        dataplane_nvme.PART,
        *dataplane_clients.PARTS,
        *dataplane_start.PARTS,
        dataplane_torn.PART,
    ],
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
