"""Configuration: every source, every refusal, and the page generated from the declarations."""

from __future__ import annotations

import grp
import os
import runpy
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import Config, HostConfig, NvmeConfig, default_socket
from kvstore.config_load import load, load_with_sources, validate
from kvstore.errors import ConfigError
from kvstore.settings import as_toml, section_help, settings
from kvstore.types import HUGE_PAGE_BYTES
from kvstore.units import (
    GIB,
    KIB,
    MIB,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
)

ROOT = Path(__file__).resolve().parents[2]


def refusal(
    path: Path | None = None,
    env: dict[str, str] | None = None,
    overrides: dict[str, str] | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, env or {}, overrides or {})
    return str(caught.value)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    return path


# ---------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("64 MiB", 64 * MIB),
        ("64mib", 64 * MIB),
        ("10GB", 10**10),
        ("2.3 GB", 2_300_000_000),
        ("1.5GiB", 3 * GIB // 2),
        (" 7 kB ", 7000),
        (12, 12),
        ("0", 0),
    ],
)
def test_sizes_as_people_write_them(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "1 G", "1 XB", "-1", "1e9", "0.3 B", True, 1.5, None])
def test_sizes_that_could_mean_anything_are_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10s", 10.0), ("250ms", 0.25), ("2 min", 120.0), ("1.5", 1.5), (3, 3.0), ("1h", 3600.0)],
)
def test_times_as_people_write_them(text: object, expected: float) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize("text", ["", "s", "10 days", "-1s", True, None, float("nan"), "inf"])
def test_times_that_could_mean_anything_are_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_seconds(text)


@given(st.integers(0, 1 << 60))
def test_a_written_size_reads_back(value: int) -> None:
    assert parse_bytes(format_bytes(value)) == value


@given(st.floats(0, 1e6) | st.integers(1, 10**6).map(lambda number: number * 1e-3))
def test_a_written_time_reads_back(value: float) -> None:
    assert parse_seconds(format_seconds(value)) == value


def test_sizes_are_written_in_the_largest_exact_unit() -> None:
    assert format_bytes(3 * GIB // 2) == "1536 MiB"
    assert format_bytes(10**10) == "10 GB"
    assert format_bytes(4097) == "4097 B"


# ---------------------------------------------------------------- sources


def test_no_configuration_at_all_is_fine() -> None:
    config = load(None, {}, {})
    assert config.host.bytes == GIB
    assert config.nvme.bytes_max == 10 * GIB
    assert config.daemon.data_dir == "kvstore-data"


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        '[host]\nbytes = "2 GiB"\n[nvme]\nreaders = 2\nwriters = 3\n[lease]\nblocks_max=5\n',
    )
    env = {"KVSTORE_NVME__READERS": "5", "KVSTORE_NVME__WRITERS": "6"}
    config, sources = load_with_sources(
        path, env, {"nvme.writers": "7", "nvme.enabled": "true"}, {"nvme.enabled": "--nvme"}
    )
    assert config.host.bytes == 2 * GIB
    assert (config.nvme.readers, config.nvme.writers) == (5, 7)
    assert config.nvme.enabled is True
    assert config.lease.blocks_max == 5
    assert sources == {
        "host.bytes": f"file {path}",
        "nvme.readers": "environment variable KVSTORE_NVME__READERS",
        "nvme.writers": "flag --set",
        "lease.blocks_max": f"file {path}",
        "nvme.enabled": "flag --nvme",
    }


def test_the_socket_follows_the_name_and_the_runtime_directory() -> None:
    env = {"XDG_RUNTIME_DIR": "/run/user/7"}
    config = load(None, env, {"daemon.name": "blue"})
    assert config.daemon.socket == "/run/user/7/kvstore/blue.sock"
    assert str(config.daemon.socket_path) == config.daemon.socket
    assert load(None, env, {"daemon.socket": "/x/y"}).daemon.socket == "/x/y"
    assert default_socket("blue", {}).parent.name.startswith("kvstore-")
    assert config.arena_directory.name.endswith("-blue")


def test_other_variables_with_our_prefix_are_left_alone() -> None:
    load(None, {"KVSTORE_PORT": "tcp://10.0.0.1:80", "KVSTORE_SERVICE_HOST": "10.0.0.1"}, {})


# ---------------------------------------------------------------- refusals


def test_an_unknown_setting_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    path = toml(tmp_path, "[host]\nslab_byte = 3\n")
    assert refusal(path) == (
        f"file {path}: host.slab_byte = 3: there is no such setting; did you mean host.slab_bytes?"
    )
    assert "did you mean host.bytes?" in refusal(env={"KVSTORE_HOTS__BYTES": "1GiB"})
    assert "did you mean lease.read_seconds?" in refusal(overrides={"limits.read_seconds": "1"})
    assert "lists all settings" in refusal(overrides={"zzz.qqq": "1"})


def test_an_unknown_section_or_a_stray_key_is_refused(tmp_path: Path) -> None:
    assert "hots" in refusal(toml(tmp_path, "[hots]\n"))
    assert "did you mean host.bytes?" in refusal(toml(tmp_path, "bytes = 3\n"))


def test_one_underscore_in_a_variable_is_refused() -> None:
    message = refusal(env={"KVSTORE_HOST_BYTES": "8GiB"})
    assert "KVSTORE_HOST_BYTES='8GiB'" in message
    assert "KVSTORE_HOST__BYTES" in message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("host.bytes", "2 G", ["'2 G'", '"64 MiB"']),
        ("host.bytes", "1MiB", ["'1MiB'", "from 2 MiB"]),
        ("nvme.enabled", "maybe", ["'maybe'", "true or false"]),
        ("nvme.readers", "900", ["'900'", "up to 64"]),
        ("nvme.readers", "many", ["'many'", "a number"]),
        ("lease.read_seconds", "0s", ["'0s'", "above 0"]),
        ("lease.read_seconds", "fast", ["'fast'", '"10s"']),
        ("policy.name", "mru", ["'mru'", '"lru"']),
        ("daemon.name", "a/b", ["'a/b'", "A-Za-z0-9"]),
    ],
)
def test_a_bad_value_is_refused_by_source_key_value_and_way_out(
    key: str, value: str, words: list[str]
) -> None:
    setting = settings()[key]
    by_flag = refusal(overrides={key: value})
    by_variable = refusal(env={setting.variable: value})
    assert by_flag.startswith(f"flag --set: {key} = ")
    assert by_variable.startswith(f"environment variable {setting.variable}: {key} = ")
    for word in words:
        assert word in by_flag


def test_a_file_has_types_of_its_own(tmp_path: Path) -> None:
    message = refusal(toml(tmp_path, '[nvme]\nenabled = "true"\n'))
    assert "nvme.enabled = 'true': must be true or false" in message
    assert load(toml(tmp_path, "[daemon]\ndrain_seconds = 5\n"), {}, {}).daemon.drain_seconds == 5.0


def test_a_file_that_is_missing_or_malformed_is_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert f"file {missing}: cannot be read" in refusal(missing)
    assert "not valid TOML" in refusal(toml(tmp_path, "[host\n"))


@pytest.mark.parametrize(
    ("overrides", "key", "way_out"),
    [
        ({"host.slab_bytes": "3MiB"}, "host.slab_bytes", "multiple of 2 MiB"),
        ({"host.slab_bytes": "2GiB"}, "host.bytes", "host.slab_bytes"),
        ({"host.region_bytes": "100MiB"}, "host.region_bytes", "multiple of host.slab_bytes"),
        ({"host.region_bytes": "2GiB"}, "host.bytes", "multiple of host.region_bytes"),
        ({"host.bytes": "3GiB", "host.region_bytes": "2GiB"}, "host.bytes", "regions of 2 GiB"),
        ({"host.slot_bytes_min": "5000"}, "host.slot_bytes_min", "16 KiB"),
        ({"host.slot_bytes_min": "128MiB"}, "host.slot_bytes_min", "up to host.slab_bytes"),
        ({"host.bytes": "64TiB", "host.slot_bytes_min": "4KiB"}, "host.slot_bytes_min", "raise it"),
        ({"host.staging_slots_min": "65536"}, "host.staging_slots_min", "lower it"),
        ({"host.group": "no-such-group-here"}, "host.group", "create it"),
        ({"host.directory": "shm"}, "host.directory", "/dev/shm"),
        ({"nvme.segment_bytes": "2097153"}, "nvme.segment_bytes", "multiple of 4 KiB"),
        (
            {"nvme.segment_bytes": "2MiB", "host.slot_bytes_min": "2MiB"},
            "nvme.segment_bytes",
            "raise it",
        ),
        ({"nvme.bytes_max": "100MiB"}, "nvme.bytes_max", "nvme.enabled = false"),
        ({"daemon.data_dir": ""}, "daemon.data_dir", "nvme.enabled = false"),
        ({"daemon.socket": "/" + "s" * 107}, "daemon.socket", "shorter path"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(
    overrides: dict[str, str], key: str, way_out: str
) -> None:
    message = refusal(overrides=overrides)
    source = "flag --set" if key in overrides else "the default"
    assert message.startswith(f"{source}: {key} = ")
    assert way_out in message


@pytest.mark.parametrize("tier", ["host", "host and nvme"])
def test_every_combination_of_tiers_starts(tier: str) -> None:
    nvme = {"nvme.enabled": "false", "nvme.bytes_max": "0", "daemon.data_dir": ""}
    load(None, {}, {"host.bytes": "2MiB"} | (nvme if tier == "host" else {}))


def test_no_tier_at_all_is_refused() -> None:
    assert "host.bytes" in refusal(overrides={"host.bytes": "0", "nvme.enabled": "false"})


def test_a_hand_made_configuration_can_be_validated() -> None:
    validate(Config(host=HostConfig(bytes=64 * MIB)))
    with pytest.raises(ConfigError, match=r"nvme\.bytes_max"):
        validate(Config(nvme=NvmeConfig(bytes_max=1 * MIB)))


# ---------------------------------------------------------------- automatic values


@given(st.integers(HUGE_PAGE_BYTES, 1 << 42))
def test_automatic_geometry_always_works_and_wastes_little(size: int) -> None:
    host = HostConfig(bytes=size, slot_bytes_min=64 * KIB)
    validate(Config(host=host))
    assert host.regions * host.region_bytes == host.bytes <= size
    assert HUGE_PAGE_BYTES <= host.slab_bytes <= 64 * MIB
    assert host.region_bytes <= GIB
    assert size - host.bytes < size // 16 + host.slab_bytes


def test_automatic_geometry_of_the_defaults() -> None:
    host = HostConfig()
    assert (host.region_bytes, host.slab_bytes, host.regions) == (GIB, 64 * MIB, 1)
    assert host.write_pool_bytes_per_client_max == 256 * MIB
    assert HostConfig(bytes=64 * MIB).write_pool_bytes_per_client_max == 16 * MIB


def test_the_group_is_known_by_its_number() -> None:
    own = grp.getgrgid(os.getgid())
    assert HostConfig(group=own.gr_name).gid == own.gr_gid
    assert HostConfig().gid is None


# ---------------------------------------------------------------- declarations


def test_every_setting_and_section_is_described() -> None:
    for setting in settings().values():
        assert len(setting.description) > 10, setting.key
        assert section_help(setting.section), setting.section
        assert setting.allowed, setting.key


def test_every_default_is_a_value_its_setting_takes() -> None:
    for setting in settings().values():
        assert msgspec.convert(setting.default, setting.type) == setting.default, setting.key


def test_printed_configuration_reads_back(tmp_path: Path) -> None:
    config = load(None, {}, {"host.bytes": "300MiB", "lease.read_seconds": "1.5s"})
    printed = as_toml(config, {"host.bytes": "flag --host-bytes"})
    assert load(toml(tmp_path, printed), {}, {}) == config
    assert "# from flag --host-bytes" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_printed_defaults_read_back(tmp_path: Path) -> None:
    assert load(toml(tmp_path, as_toml()), {}, {}) == load(None, {}, {})
    assert tomllib.loads(as_toml())["host"]["slab_bytes"] == 0


@pytest.mark.parametrize(
    ("made_by", "name"), [("page", "configuration.md"), ("metrics_page", "metrics.md")]
)
def test_generated_pages_are_up_to_date(made_by: str, name: str) -> None:
    page = runpy.run_path(str(ROOT / "docs/generate.py"))[made_by]()
    assert (ROOT / "docs" / name).read_text() == page, "run `make docs`"
