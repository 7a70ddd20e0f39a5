"""The command line: `kvstore serve | stat | top | verify | clear | resize | config` + `cli_blocks`.

Exit codes: 0 done; 1 `verify` found something, a block is missing or was not stored or pinned, or
the daemon met a fatal error; 2 refused (one line on standard error says what, where and the way
out); 3 the daemon is away; 130 Ctrl-C, but for commands that run until then. Heavy imports (grpc,
rich, the daemon) sit inside the commands that need them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cyclopts import App, CycloptsError

from kvstore import cli_blocks, logs
from kvstore.cli_options import DEFAULT_WHERE, Where, unreachable
from kvstore.config import Config
from kvstore.errors import InvalidRequest, KVStoreError, PeerGone
from kvstore.settings import as_toml
from kvstore.types import FINGERPRINT_BYTES
from kvstore.units import format_bytes, parse_bytes
from kvstore.version import VERSION

if TYPE_CHECKING:
    from kvstore.rpc.control_pb2_grpc import ControlStub

EXIT_FINDINGS, EXIT_REFUSED, EXIT_AWAY = 1, 2, 3
CALL_SECONDS_MAX = 10.0
VERIFY_SECONDS_MAX = 24 * 3600.0

app = App(
    name="kvstore",
    help="Keeps the prefix KV blocks of LLM servers in shared memory and on NVMe.",
    help_epilogue="Start with `kvstore serve`, look with `kvstore stat`. No configuration needed.",
    version=lambda: f"kvstore {VERSION}",
)


@app.command
def serve(
    where: Where = DEFAULT_WHERE,
    *,
    data_dir: str | None = None,
    host_bytes: str | None = None,
    nvme_bytes: str | None = None,
) -> int:
    """Run the daemon until SIGTERM or Ctrl-C.

    Without options: 1 GiB of shared memory, up to 10 GiB below ./kvstore-data.

    Parameters
    ----------
    data_dir
        Directory of the NVMe tier (daemon.data_dir).
    host_bytes
        Shared memory for blocks, for example 8GiB (host.bytes).
    nvme_bytes
        Most bytes below the data directory, for example 500GB (nvme.bytes_max).
    """
    config, sources = where.load(
        {
            "daemon.data_dir": ("--data-dir", data_dir),
            "host.bytes": ("--host-bytes", host_bytes),
            "nvme.bytes_max": ("--nvme-bytes", nvme_bytes),
        }
    )
    logs.configure(config.daemon.log_level, config.daemon.log_format)
    log = logs.get_logger("cli")
    log.info("starting", **_chosen(config, sources))
    from kvstore.daemon import serve as serve_daemon

    code = serve_daemon(config, lambda daemon: log.info("serving", socket=config.daemon.socket))
    logs.tell_held_back(everything=True)
    return code


def _chosen(config: Config, sources: Mapping[str, str]) -> dict[str, object]:
    """What a person wants to see of the configuration when the daemon starts."""
    host, nvme = config.host, config.nvme
    data_dir = Path(config.daemon.data_dir).absolute()
    return {
        "version": VERSION,
        "socket": config.daemon.socket,
        "host": f"{format_bytes(host.bytes)} in {config.arena_directory}",
        "nvme": f"up to {format_bytes(nvme.bytes_max)} in {data_dir}" if nvme.enabled else "off",
        "settings": ", ".join(f"{key} from {source}" for key, source in sources.items())
        or "defaults (`kvstore config` lists them)",
    }


@app.command
def stat(where: Where = DEFAULT_WHERE, *, json: bool = False) -> int:
    """Show what the daemon holds and how it is used.

    Parameters
    ----------
    json
        Print the whole statistics tree as JSON.
    """
    from kvstore.rpc.control_pb2 import StatRequest

    config, _ = where.load({})
    with _control(config) as control:
        tree = control.Stat(StatRequest(), timeout=CALL_SECONDS_MAX).json
    if json:
        print(tree)
    else:
        import json as codec

        from kvstore.stat_lines import as_lines

        print("\n".join(as_lines(codec.loads(tree))))
    return 0


@app.command
def top(where: Where = DEFAULT_WHERE, *, once: bool = False) -> int:
    """Watch the daemon live: tiers, hits, flows, leases, latencies, health; Ctrl-C ends it.

    Parameters
    ----------
    once
        Print one picture and end; without rates, which need two.
    """
    import json as codec

    from rich.console import Console

    from kvstore.rpc.control_pb2 import StatRequest
    from kvstore.top import show

    config, _ = where.load({})
    with _control(config) as control:
        show(
            lambda: codec.loads(control.Stat(StatRequest(), timeout=CALL_SECONDS_MAX).json),
            Console(),
            once=once,
        )
    return 0


class VerifyProgress(Protocol):
    """A step of a verification, live (`VerifyReply`) or offline."""

    @property
    def checked_blocks(self) -> int: ...
    @property
    def total_blocks(self) -> int: ...
    @property
    def findings(self) -> Sequence[str]: ...


@app.command
def verify(
    where: Where = DEFAULT_WHERE,
    *,
    data_dir: str | None = None,
    payloads: bool = False,
    fix: bool = False,
) -> int:
    """Compare index and stored blocks both ways; a line a finding, exit code 1 with any.

    Asks the running daemon; with --data-dir, checks the directory of a stopped one.

    Parameters
    ----------
    data_dir
        Directory of a daemon that does not run (daemon.data_dir).
    payloads
        Read every block and compare its checksums too.
    fix
        Drop what is damaged; the blocks become misses. Without it nothing is dropped.
    """
    config, _ = where.load({"daemon.data_dir": ("--data-dir", data_dir)})
    if data_dir is not None:
        from kvstore.offline import verify_offline

        return _show_findings(verify_offline(config, payloads=payloads, fix=fix))
    from kvstore.rpc.control_pb2 import VerifyRequest

    request = VerifyRequest(payloads=payloads, fix=fix)
    with _control(config) as control:
        return _show_findings(control.Verify(request, timeout=VERIFY_SECONDS_MAX))


def _show_findings(steps: Iterable[VerifyProgress]) -> int:
    """Print findings as they come, a progress bar beside them on a terminal; the exit code."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    errors = Console(stderr=True)
    checked = found = 0
    columns = (BarColumn(), MofNCompleteColumn(), "blocks", TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("verify", total=None)
        for step in steps:
            checked = max(checked, step.checked_blocks)
            bar.update(task, completed=checked, total=step.total_blocks or None)
            for finding in step.findings:
                found += 1
                print(finding, flush=True)
    print(f"{checked} blocks checked, {found or 'no'} finding{'' if found == 1 else 's'}")
    return EXIT_FINDINGS if found else 0


@app.command
def clear(
    namespace: str | None = None, /, where: Where = DEFAULT_WHERE, *, all: bool = False
) -> int:
    """Forget every block of one namespace, or of all.

    Parameters
    ----------
    namespace
        Its 64 hex digits or its label, as `kvstore stat` shows them.
    all
        Clear every namespace.
    """
    from kvstore.rpc.control_pb2 import ClearRequest

    if bool(namespace) == all:
        raise InvalidRequest("clear: name one namespace (64 hex digits or a label) or give --all")
    config, _ = where.load({})
    with _control(config) as control:
        name = _namespace_named(control, namespace) if namespace else b""
        request = ClearRequest(namespace=name, all=all)
        cleared = control.Clear(request, timeout=CALL_SECONDS_MAX).namespaces
    print(f"cleared {cleared} namespace{'' if cleared == 1 else 's'}")
    return 0


@app.command
def resize(
    host_bytes: str | None = None,
    /,
    *,
    gpu: str | None = None,
    where: Where = DEFAULT_WHERE,
) -> int:
    """Say how much memory the host tier, or the GPU tier, may fill, while it serves.

    Parameters
    ----------
    host_bytes
        A size such as "4 GiB", at most host.bytes; "all" for that.
    gpu
        Device memory for the GPU tier: a size, at most gpu.bytes_max; 0 for none.
    """
    from kvstore.rpc.control_pb2 import ResizeRequest

    if host_bytes is None and gpu is None:
        raise InvalidRequest("resize: give a size of host memory, --gpu SIZE, or both")
    host = _size(host_bytes) if host_bytes not in (None, "all") else 0
    request = ResizeRequest(
        host_bytes=None if host_bytes is None else max(host, int(host_bytes != "all")),
        gpu_bytes=None if gpu is None else _size(gpu),
    )
    config, _ = where.load({})
    with _control(config) as control:
        reply = control.Resize(request, timeout=CALL_SECONDS_MAX)
    for tier, given, most in (
        ("host", host_bytes, reply.host_bytes),
        ("GPU", gpu, reply.gpu_bytes),
    ):
        if given is not None:
            print(f"the {tier} tier fills at most {format_bytes(most)} from now on")
    return 0


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InvalidRequest(f"resize: {text!r} {error}") from error


def _namespace_named(control: Any, text: str) -> bytes:
    """By its 64 hex digits, or by its label where only one has it. Raises InvalidRequest."""
    import json as codec

    from kvstore.rpc.control_pb2 import StatRequest

    if len(text) == 2 * FINGERPRINT_BYTES:
        with suppress(ValueError):
            return bytes.fromhex(text)
    tree = codec.loads(control.Stat(StatRequest(), timeout=CALL_SECONDS_MAX).json)
    found = [space["id"] for space in tree["namespaces"] if space["label"] == text]
    if len(found) != 1:
        raise InvalidRequest(
            f"clear: {len(found) or 'no'} namespaces are labelled {text!r}; "
            "give the 64 hex digits of one, as `kvstore stat` shows them"
        )
    return bytes.fromhex(found[0])


@app.command(name="config")
def show_config(where: Where = DEFAULT_WHERE, *, show: bool = False, defaults: bool = False) -> int:
    """Print the effective configuration as a commented TOML file, and where values came from.

    Parameters
    ----------
    show
        The effective configuration; what happens without any option too.
    defaults
        The built-in defaults instead, as a file to start from.
    """
    if show and defaults:
        raise InvalidRequest("config: --show and --defaults exclude each other; give one")
    print(as_toml() if defaults else as_toml(*where.load({})), end="")
    return 0


cli_blocks.register(app)


@contextmanager
def _control(config: Config) -> Iterator[ControlStub]:
    """Blocking calls to the daemon; a failed one leaves as the typed error it stands for."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    from kvstore.rpc.control_pb2_grpc import ControlStub
    from kvstore.rpc.status import from_rpc_error

    with grpc.insecure_channel(f"unix:{config.daemon.socket}") as channel:
        try:
            yield ControlStub(channel)  # type: ignore[no-untyped-call]
        except grpc.RpcError as error:
            typed = from_rpc_error(error)
            is_away = isinstance(typed, PeerGone)
            raise (unreachable(config.daemon.socket) if is_away else None) or typed from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `kvstore` command; ends the process with one of the exit codes above."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit code. Ctrl-C leaves as SystemExit(130)."""
    try:
        code = app(
            list(arguments), exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:  # `kvstore stat | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PeerGone as error:
        message, code = str(error), EXIT_AWAY
    except KVStoreError as error:
        message, code = str(error), EXIT_REFUSED
    except CycloptsError as error:
        message, code = f"{error} See `kvstore --help`.", EXIT_REFUSED
    except OSError as error:  # a file that a flag names
        where = f"{error.filename}: " if error.filename else ""
        message, code = f"{where}{error.strerror or error}", EXIT_REFUSED
    print(f"kvstore: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
