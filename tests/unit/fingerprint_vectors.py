"""What golden_fingerprints.json pins, computed anew; as a script, prints it.

A change there makes every stored block unreachable.
"""

from __future__ import annotations

import json
from dataclasses import replace

from kvstore.fingerprint import Content, KVIdentity, chain, flat_fingerprint, namespace_of
from kvstore.types import NamespaceKind

PLAIN = KVIdentity("m", "sha256:aa", "bfloat16", "NHD", 4, 2, 8, 64)
EMPTY = replace(PLAIN, model="", weights_digest="", kv_dtype="", layout="", kv_group="")
FULL = replace(
    PLAIN,
    kind=NamespaceKind.FLAT,
    quantization="int8 per head",
    adapter_digest="sha256:bb",
    positions="rope 500000 yarn 4",
    attention="sdpa softcap 50",
    kv_group="sliding:512 layers 0,2,4",
    tp_size=8,
    tp_rank_first=4,
    tp_ranks_local=4,
    pp_size=2,
    pp_stage=1,
    tenant_salt="tenant ü",
    extra=(("rotation", "hadamard"), ("", "")),
)
IMAGE = Content(3, 6, b"\x01" * 32)


def vectors() -> dict[str, str]:
    """Everything the golden file pins, in hex."""
    found: dict[str, str] = {}
    for label, identity in (("plain", PLAIN), ("empty", EMPTY), ("full", FULL)):
        space = namespace_of(identity)
        found[f"{label} encoded"] = identity.encode().hex()
        found[f"{label} namespace"] = space.hex()
        found[f"{label} chain"] = chain(space, range(13), 4).joined.hex()
        found[f"{label} large tokens"] = chain(space, [2**32 - 1, 0, 7, 2**31], 2).joined.hex()
        found[f"{label} with image"] = chain(space, range(12), 4, contents=[IMAGE]).joined.hex()
        found[f"{label} flat"] = flat_fingerprint(space, b"key").hex()
        found[f"{label} flat empty"] = flat_fingerprint(space, b"").hex()
    return found


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=1))
