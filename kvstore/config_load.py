"""Where configuration comes from: defaults, a TOML file, the environment, flags.

Primitives: `load`, `load_with_sources`, `validate`; `socket_of`, where an engine looks. What exists
and what is allowed is declared in `config`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import msgspec

from kvstore.config import Config, conflicts, default_socket
from kvstore.errors import ConfigError
from kvstore.settings import ENVIRONMENT_PREFIX, Setting, settings, shown
from kvstore.units import parse_bytes, parse_seconds


def load(path: Path | None, env: Mapping[str, str], overrides: Mapping[str, str]) -> Config:
    """The effective configuration: defaults < TOML file < KVSTORE_SECTION__KEY < overrides.

    `overrides` maps "section.key" to text, as flags bring it. Raises ConfigError naming source,
    key, value and the way out.
    """
    return load_with_sources(path, env, overrides)[0]


def load_with_sources(
    path: Path | None,
    env: Mapping[str, str],
    overrides: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
) -> tuple[Config, dict[str, str]]:
    """Like `load`; tells also where each key that is not a default came from.

    `flags` names the flag that brought an override, where it was not "--set".
    """
    values: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for key, value, source in _given(path, env, overrides, flags or {}):
        setting = settings()[key]
        # Text from outside a file has no type of its own: "4" is a number where one is declared.
        values.setdefault(setting.section, {})[setting.name] = _typed(
            setting, value, source, strict=source.startswith("file ")
        )
        sources[key] = source
    config = msgspec.convert(values, Config)
    if not config.daemon.socket:
        socket = str(default_socket(config.daemon.name, env))
        config = msgspec.structs.replace(
            config, daemon=msgspec.structs.replace(config.daemon, socket=socket)
        )
    validate(config, sources)
    return config, sources


def socket_of(env: Mapping[str, str]) -> str:
    """The daemon's socket as far as `env` says; other settings there may be wrong.

    Raises ConfigError.
    """
    about = {settings()[key].variable for key in ("daemon.socket", "daemon.name")}
    about.add("XDG_RUNTIME_DIR")
    known = {name: text for name, text in env.items() if name in about}
    return load(None, known, {}).daemon.socket


def validate(config: Config, sources: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for the first setting that cannot work together with another one."""
    for key, problem, way_out in conflicts(config):
        section, _, name = key.partition(".")
        _refuse(
            (sources or {}).get(key, "the default"),
            key,
            shown(settings()[key], getattr(getattr(config, section), name)),
            problem,
            way_out,
        )


def _given(
    path: Path | None,
    env: Mapping[str, str],
    overrides: Mapping[str, str],
    flags: Mapping[str, str],
) -> Iterator[tuple[str, object, str]]:
    """(known key, raw value, source) in rising precedence."""
    if path is not None:
        source = f"file {path}"
        for section, table in _read_toml(path).items():
            if not isinstance(table, dict):
                _unknown(source, section, table)
            for name, value in table.items():
                yield _known(f"{section}.{name}", value, source)
            if not table and section not in get_type_hints(Config):
                _unknown(source, section, "(an empty table)")
    keys = {setting.variable: key for key, setting in settings().items()}
    nearly = {variable.replace("__", "_"): variable for variable in keys}
    for variable, text in sorted(env.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        source = f"environment variable {variable}"
        if variable in nearly:
            raise ConfigError(f"{source}={text!r}: write two underscores, {nearly[variable]}")
        # Names without "__" are not ours: Kubernetes sets KVSTORE_PORT for a service so named.
        if "__" in variable:
            guess = variable.removeprefix(ENVIRONMENT_PREFIX).replace("__", ".", 1).lower()
            yield _known(keys.get(variable, guess), text, source)
    for key, text in overrides.items():
        yield _known(key, text, f"flag {flags.get(key, '--set')}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"file {path}: cannot be read ({error.strerror}); "
            "name an existing file or leave --config out"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"file {path}: not valid TOML ({error}); "
            "`kvstore config --defaults` prints a valid file"
        ) from error


def _known(key: str, value: object, source: str) -> tuple[str, object, str]:
    if key not in settings():
        _unknown(source, key, value)
    return key, value, source


def _unknown(source: str, key: str, value: object) -> NoReturn:
    by_name: dict[str, str] = {}
    for known, setting in settings().items():
        by_name.setdefault(setting.name, known)
    close = difflib.get_close_matches(key, settings(), 1, 0.75)
    close = close or [
        by_name[name] for name in difflib.get_close_matches(key.split(".")[-1], by_name, 1)
    ]
    hint = (
        f"did you mean {close[0]}?" if close else "`kvstore config --defaults` lists all settings"
    )
    _refuse(source, key, repr(value), "there is no such setting", hint)


def _typed(setting: Setting, raw: object, source: str, *, strict: bool) -> object:
    value = raw
    problem = f"must be {setting.allowed}"
    try:
        if setting.unit:
            value = (parse_bytes if setting.unit == "bytes" else parse_seconds)(raw)
        return msgspec.convert(value, setting.type, strict=strict)
    except msgspec.ValidationError:
        pass
    except ValueError as error:
        problem = str(error)
    _refuse(source, setting.key, repr(raw), problem, f"it means: {setting.description}")


def _refuse(source: str, key: str, value: str, problem: str, way_out: str) -> NoReturn:
    """Raise the one shape that every complaint about a setting has."""
    raise ConfigError(f"{source}: {key} = {value}: {problem}; {way_out}")
