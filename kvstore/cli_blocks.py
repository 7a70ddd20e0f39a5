"""Commands of the block API: `kvstore gateway | put | get | exists | ls | pin`.

Registered on the command line's app by `register`. Heavy imports sit inside the commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from kvstore import logs
from kvstore.cli_options import DEFAULT_WHERE, Where
from kvstore.cli_through import DEFAULT_THROUGH, Through, all_namespaces, blocks_of
from kvstore.errors import InvalidRequest
from kvstore.fingerprint import flat_fingerprint
from kvstore.types import FINGERPRINT_BYTES, NamespaceKind, Tier
from kvstore.version import VERSION

if TYPE_CHECKING:
    from kvstore.block_access import Access
    from kvstore.client import RawNames

EXIT_MISSING = 1
"""Some block is not there, or was not stored."""
BATCH_BYTES = 32 << 20


def register(app: App) -> None:
    """Add the commands of this module."""
    for command in (gateway, put, get, exists, ls, pin):
        app.command(command)


def gateway(
    where: Where = DEFAULT_WHERE,
    *,
    address: str | None = None,
    tokens: str | None = None,
) -> int:
    """Serve the block API to other containers, machines and languages, until SIGTERM or Ctrl-C.

    Runs beside a daemon on this machine, which may come and go. Without options: a Unix socket
    beside the daemon's, and port 7420 on loopback.

    Parameters
    ----------
    address
        TCP address as host:port, or off (gateway.address).
    tokens
        File of bearer tokens and their tenants (gateway.tokens).
    """
    config, _ = where.load(
        {
            "gateway.address": ("--address", address),
            "gateway.tokens": ("--tokens", tokens),
        }
    )
    logs.configure(config.daemon.log_level, config.daemon.log_format)
    log = logs.get_logger("cli")
    from kvstore.gateway.process import serve

    code = serve(
        config,
        lambda running: log.info(
            "gateway serving",
            version=VERSION,
            daemon=config.daemon.socket,
            socket=str(running.socket or "off"),
            address=config.gateway.address,
            port=running.port,
        ),
    )
    logs.tell_held_back(everything=True)
    return code


def put(
    namespace: str,
    /,
    *blocks: str,
    parent: str = "",
    where: Where = DEFAULT_WHERE,
    through: Through = DEFAULT_THROUGH,
) -> int:
    """Store files as blocks; exit code 1 when one was not stored.

    A flat namespace that does not exist yet is made, for blocks of the first file's size.

    Parameters
    ----------
    namespace
        64 hex digits, or any other word: the flat namespace of that name.
    blocks
        KEY=FILE, or FILE, whose name is then the key. In a chained namespace keys are fingerprints
        (64 hex digits) of consecutive blocks.
    parent
        Chained: fingerprint of the block before the first; without it they begin at the root.
    """
    pairs = [_key_and_file(text) for text in blocks]
    if not pairs:
        raise InvalidRequest("put: name files to store, as KEY=FILE")
    sizes = {path.stat().st_size for _, path in pairs}
    first_bytes = pairs[0][1].stat().st_size
    with blocks_of(where, through, namespace, new_block_bytes=first_bytes) as access:
        size = access.declared.layout.block_bytes
        if sizes != {size}:
            raise InvalidRequest(f"put: blocks here have {size} bytes, the files {sorted(sizes)}")
        names = _names(access, [key for key, _ in pairs], parent)
        failed: list[str] = []
        for start, keys in _batches([key for key, _ in pairs], size, "put"):
            files = [path for _, path in pairs[start : start + len(keys)]]
            statuses, reason = access.put(names, [_read(path) for path in files], start)
            for key, status in zip(keys, statuses, strict=True):
                print(f"{key}  {status.name.lower()}")
                if status.name not in ("STORED", "PRESENT", "WAITING"):
                    failed.append(reason or status.name.lower())
    if failed:
        print(f"{len(failed)} of {len(pairs)} not stored: {failed[0]}")
    return EXIT_MISSING if failed else 0


def get(
    namespace: str,
    /,
    *keys: str,
    out: Path = Path(),
    where: Where = DEFAULT_WHERE,
    through: Through = DEFAULT_THROUGH,
) -> int:
    """Write blocks to files named by their keys; exit code 1 when one is missing.

    Parameters
    ----------
    namespace
        64 hex digits, or the name of a flat namespace.
    keys
        Keys; in a chained namespace fingerprints from the root on.
    out
        Directory to write to.
    """
    missing = 0
    with blocks_of(where, through, namespace) as access:
        import numpy as np

        names = _names(access, keys)
        size = access.declared.layout.block_bytes
        out.mkdir(parents=True, exist_ok=True)
        for start, batch in _batches(keys, size, "get"):
            rows = np.empty((len(batch), size), np.uint8)
            for key, row, found in zip(
                batch, rows, access.get(names, list(rows), start), strict=True
            ):
                missing += not found
                if found:
                    row.tofile(out / _file_name(key))
                print(f"{key}  {'stored' if found else 'missing'}")
    return EXIT_MISSING if missing else 0


def exists(
    namespace: str,
    /,
    *keys: str,
    where: Where = DEFAULT_WHERE,
    through: Through = DEFAULT_THROUGH,
) -> int:
    """Say in which tiers blocks are; exit code 1 when one is in none.

    Parameters
    ----------
    namespace
        64 hex digits, or the name of a flat namespace.
    keys
        Keys; in a chained namespace fingerprints.
    """
    with blocks_of(where, through, namespace) as access:
        found = access.exists(_names(access, keys))
    for key, mask in zip(keys, found.tiers.tolist(), strict=True):
        print(f"{key}  {_tiers(mask)}")
    print(f"{found.prefix_blocks} of {len(keys)} from the first on")
    return 0 if found.tiers.all() else EXIT_MISSING


def ls(
    namespace: str | None = None,
    /,
    *,
    where: Where = DEFAULT_WHERE,
    through: Through = DEFAULT_THROUGH,
) -> int:
    """List namespaces, or the fingerprints of one and their tiers.

    Parameters
    ----------
    namespace
        64 hex digits, or the name of a flat namespace. Without it: all namespaces.
    """
    if namespace is None:
        for declared in all_namespaces(where, through):
            layout = declared.layout
            print(f"{declared.id.hex()}  {declared.kind}  {layout.block_bytes} B  {declared.label}")
        return 0
    count = 0
    with blocks_of(where, through, namespace) as access:
        for page in access.pages():
            count += len(page.tiers)
            for at, mask in enumerate(page.tiers.tolist()):
                name = page.names[at * FINGERPRINT_BYTES : (at + 1) * FINGERPRINT_BYTES]
                print(f"{name.hex()}  {_tiers(mask)}")
    print(f"{count} block{'' if count == 1 else 's'}")
    return 0


def pin(
    namespace: str,
    /,
    *keys: str,
    seconds: float = 3600.0,
    hard: bool = False,
    remove: bool = False,
    where: Where = DEFAULT_WHERE,
    through: Through = DEFAULT_THROUGH,
) -> int:
    """Keep blocks for a while; exit code 1 when not all of them could be pinned.

    Parameters
    ----------
    namespace
        64 hex digits, or the name of a flat namespace.
    keys
        Keys; in a chained namespace fingerprints.
    seconds
        For how long, from now.
    hard
        They stay whatever happens; else they only leave last.
    remove
        End the pins instead.
    """
    with blocks_of(where, through, namespace) as access:
        names = _names(access, keys)
        if remove:
            print(f"unpinned {access.unpin(names)} of {len(keys)}")
            return 0
        pinned, reason = access.pin(names, seconds, hard)
    print(f"pinned {pinned} of {len(keys)}" + (f": {reason}" if reason else ""))
    return 0 if pinned == len(keys) else EXIT_MISSING


# ---------------------------------------------------------------------- namespaces and keys


def _names(access: Access, keys: Sequence[str], parent: str = "") -> RawNames:
    from kvstore.client import RawNames

    space = access.declared.id
    if access.declared.kind is NamespaceKind.FLAT:
        joined = b"".join(flat_fingerprint(space, key.encode()) for key in keys)
        return RawNames(space, joined)
    joined = b"".join(map(_fingerprint, keys))
    return RawNames(space, joined, _fingerprint(parent) if parent else b"")


def _fingerprint(text: str) -> bytes:
    try:
        name = bytes.fromhex(text)
    except ValueError:
        name = b""
    if len(name) != FINGERPRINT_BYTES:
        raise InvalidRequest(
            f"{text!r} is no fingerprint of 64 hex digits; only flat namespaces have other keys"
        )
    return name


def _key_and_file(text: str) -> tuple[str, Path]:
    key, equals, file = text.rpartition("=")
    path = Path(file)
    if not path.is_file():
        raise InvalidRequest(f"put: {file!r} is no file; write KEY=FILE, or FILE")
    return (key if equals else path.name), path


def _file_name(key: str) -> str:
    return key.replace("/", "_").lstrip(".") or "_"


def _read(path: Path) -> Any:
    import numpy as np

    return np.fromfile(path, np.uint8)


def _tiers(mask: int) -> str:
    return ", ".join(tier.name.lower() for tier in Tier if mask >> tier & 1) or "absent"


def _batches(
    keys: Sequence[str], block_bytes: int, verb: str
) -> Iterator[tuple[int, Sequence[str]]]:
    """(first, keys) of at most BATCH_BYTES each, a progress bar beside them on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    errors = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    step = max(1, BATCH_BYTES // block_bytes)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(verb, total=len(keys) * block_bytes)
        for start in range(0, len(keys), step):
            batch = keys[start : start + step]
            yield start, batch
            bar.advance(task, len(batch) * block_bytes)
