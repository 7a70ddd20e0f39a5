"""Commands of the block API: `kvstore gateway | put | get | exists | ls | pin`.

Registered on the command line's app by `register`. Heavy imports sit inside the commands.
"""

from __future__ import annotations

from cyclopts import App

from kvstore import logs
from kvstore.cli_options import DEFAULT_WHERE, Where
from kvstore.version import VERSION


def register(app: App) -> None:
    """Add the commands of this module."""
    for command in (gateway,):
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
