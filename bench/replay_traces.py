"""Request traces: which blocks each request of a workload asks for, and when.

Primitives:
  `Trace`        requests as a time and a run of block numbers, in order
  `load(path)`   a trace file: `.jsonl` of one request a line, or an archive of coding sessions;
                 both also compressed with zstd
  `find(name)`   one of the known development traces; raises TracesMissing with the way out
  `folder()`     where traces lie: KVSTORE_TRACES, else `../shared/traces`; docs/policy.md says
                 where they come from

Blocks are 512 tokens. Equal numbers mean equal whole prefixes. Reads files; replays nothing.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.harness import OUT
from kvstore.types import FINGERPRINT_BYTES, ByteArray, FloatArray, IntArray

BLOCK_TOKENS = 512
SESSION_BLOCK_TOKENS = 64
DAY_SECONDS = 86400.0
KNOWN = {
    "conversation": "mooncake_conversation_first8020.jsonl.zst",
    "synthetic": "mooncake_synthetic.jsonl.zst",
    "agents": "claude_code_sessions_dev.tar.zst",
}


class TracesMissing(Exception):
    """A trace is not where it should be; the message says how to name its place."""


@dataclass(frozen=True, eq=False)
class Trace:
    """`times` float64[requests] in seconds, not falling; request r asks for the blocks
    `blocks[starts[r] : starts[r + 1]]` (int32), each after its parent.
    """

    name: str
    times: FloatArray
    starts: IntArray
    blocks: IntArray

    @cached_property
    def unique(self) -> int:
        """How many different blocks there are."""
        return int(self.blocks.max(initial=-1)) + 1

    @property
    def requests(self) -> int:
        return len(self.times)

    @property
    def touches(self) -> int:
        """How many blocks all requests ask for."""
        return len(self.blocks)

    @cached_property
    def depths(self) -> IntArray:
        """Of each touch: blocks before it in its request."""
        lengths = np.diff(self.starts)
        return np.arange(self.touches) - np.repeat(self.starts[:-1], lengths)

    @cached_property
    def names(self) -> ByteArray:
        """A fingerprint for each block, uint8[unique, 32]: spread evenly, and always the same."""
        seed = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little")
        rng = np.random.default_rng(seed)
        return rng.integers(0, 256, (self.unique, FINGERPRINT_BYTES), np.uint8)

    def first(self, touches: int) -> Trace:
        """The requests that lie within the first `touches` block touches."""
        requests = int(self.starts.searchsorted(touches, side="right")) - 1
        starts = self.starts[: requests + 1]
        return Trace(self.name, self.times[:requests], starts, self.blocks[: starts[-1]])


def make(name: str, requests: Iterable[tuple[float, Sequence[int]]]) -> Trace:
    """A trace of (seconds, block numbers), numbered anew in order of appearance."""
    times: list[float] = []
    starts = [0]
    runs: list[IntArray] = []
    for seconds, blocks in requests:
        times.append(seconds)
        runs.append(np.asarray(blocks, np.int64))
        starts.append(starts[-1] + len(blocks))
    joined = np.concatenate(runs) if runs else np.empty(0, np.int64)
    found, at, back = np.unique(joined, return_index=True, return_inverse=True)
    renamed = np.empty(len(found), np.int64)
    renamed[np.argsort(at, kind="stable")] = np.arange(len(found))
    return Trace(name, np.array(times), np.array(starts, np.int64), renamed[back].astype(np.int32))


def folder(given: Path | None = None) -> Path:
    """Where trace files lie."""
    place = given or os.environ.get("KVSTORE_TRACES")
    return Path(place) if place else Path(__file__).resolve().parents[2] / "shared" / "traces"


def find(name: str, place: Path | None = None) -> Trace:
    """The known trace `name`, or the file of that name. Raises TracesMissing."""
    path = folder(place) / KNOWN[name] if name in KNOWN else Path(name)
    if not path.is_file():
        raise TracesMissing(
            f"trace {name!r}: no file {path}; set KVSTORE_TRACES or --traces to the folder of the "
            f"trace files, or name a .jsonl file (known names: {', '.join(KNOWN)}; docs/policy.md "
            "says where they come from)"
        )
    return load(path, name if name in KNOWN else path.name.partition(".")[0])


def load(path: Path, name: str) -> Trace:
    """The trace in `path`. An archive takes a minute; it is kept in bench/out for the next time."""
    if ".tar" not in path.suffixes:
        return make(name, _lines(_unpacked(path)))
    facts = path.stat()
    kept = OUT / "traces" / f"{path.name}-{facts.st_size}-{int(facts.st_mtime)}.npz"
    if not kept.exists():
        trace = make(name, _merged(_sessions(path)))
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(".new.npz")
        np.savez_compressed(draft, times=trace.times, starts=trace.starts, blocks=trace.blocks)
        draft.replace(kept)
    with np.load(kept) as found:
        return Trace(name, found["times"], found["starts"], found["blocks"])


def _unpacked(path: Path) -> Any:
    """The file's bytes as a stream."""
    if path.suffix != ".zst":
        return path.open("rb")
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return unpacker.stream_reader(path.open("rb"), closefd=True)


def _lines(stream: Any) -> Iterator[tuple[float, Sequence[int]]]:
    """Of each line: seconds, and the full blocks of the prompt."""
    with io.BufferedReader(stream) as lines:
        for line in lines:
            if line.strip():
                found = msgspec.json.decode(line)
                full = found["input_length"] // BLOCK_TOKENS
                yield found["timestamp"] / 1000.0, found["hash_ids"][:full]


# ---------------------------------------------------------------------- coding sessions


def _sessions(path: Path) -> Iterator[dict[str, Any]]:
    with tarfile.open(fileobj=_unpacked(path), mode="r|") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".json") else None
            if file is not None:
                yield msgspec.json.decode(file.read())


def _merged(sessions: Iterable[dict[str, Any]]) -> list[tuple[float, list[int]]]:
    """All sessions as one workload: their starts spread over a day by the digest of their id.

    Block ids are a session's own, so a block's number is that of its parent with its 8 ids.
    Blocks that end inside the tool tokens are taken as shared by all sessions with as many of
    them, those inside the system tokens by those with as many of both.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    found: list[tuple[float, list[int]]] = []
    for session in sessions:
        digest = hashlib.sha256(session["id"].encode()).hexdigest()
        start = int(digest[:8], 16) / 2**32 * DAY_SECONDS
        found += _of_session(session, start, numbers)
    return sorted(found, key=lambda request: request[0])


def _of_session(
    session: dict[str, Any], start: float, numbers: dict[tuple[Any, ...], int]
) -> Iterator[tuple[float, list[int]]]:
    each = BLOCK_TOKENS // SESSION_BLOCK_TOKENS
    tools, system = session["tool_tokens"], session["system_tokens"]
    for seconds, request in _flat(session["requests"], start):
        ids = np.array(request["hash_ids"], np.int64)
        count = min(request["in"] // BLOCK_TOKENS, len(ids) // each)
        parts = ids[: count * each].reshape(count, each).view(f"V{8 * each}")[:, 0].tolist()
        blocks: list[int] = []
        parent = -1
        for position, part in enumerate(parts):
            end = BLOCK_TOKENS * (position + 1)
            key: tuple[Any, ...] = (session["id"], parent, part)
            if end <= tools + system:
                key = (tools, 0 if end <= tools else system, position)
            parent = numbers.setdefault(key, len(numbers))
            blocks.append(parent)
        yield seconds, blocks


def _flat(
    requests: Iterable[dict[str, Any]], start: float
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Requests with their time, those of sub-agents too."""
    for request in requests:
        if "requests" in request:
            yield from _flat(request["requests"], start + request["t"])
        else:
            yield start + request["t"], request
