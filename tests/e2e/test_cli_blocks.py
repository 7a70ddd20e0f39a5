"""`kvstore put | get | exists | ls | pin`, against the daemon and through a gateway."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore import cli
from kvstore.cli_blocks import EXIT_MISSING
from kvstore.remote_client import RemoteClient
from tests.conftest import DaemonProcess
from tests.e2e.gateway_kit import Blocks, address, each, serving
from tests.e2e.kit import running

SIZE = 70_000
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def target(daemon: DaemonProcess) -> Iterator[str]:
    with serving(daemon) as gateway:
        yield address(gateway)


@pytest.fixture(params=["daemon", "gateway"])
def kvstore(request, daemon, target, capsys) -> Run:
    """Runs a command; its exit code and what it printed."""
    here = ["--socket", str(daemon.socket)]
    options = [*here, "--gateway", target] if request.param == "gateway" else here

    def run(command: str, *arguments: str) -> tuple[int, str]:
        code = cli.run([command, *arguments, *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{name}.bin" for name in ("a", "b", "c")]
    for path in made:
        path.write_bytes(secrets.token_bytes(SIZE))
    return made


def test_files_go_in_and_come_out(kvstore, files, tmp_path):
    name = f"demo-{secrets.token_hex(4)}"
    code, said = kvstore("put", name, f"one={files[0]}", f"two={files[1]}", str(files[2]))
    assert code == 0, said
    assert said.count("stored") == 3
    code, said = kvstore("exists", name, "one", "two", "nowhere")
    assert code == EXIT_MISSING
    assert "one  host" in said
    assert "nowhere  absent" in said
    out = tmp_path / "out"
    code, said = kvstore("get", name, "one", "nowhere", "c.bin", "--out", str(out))
    assert code == EXIT_MISSING
    assert "nowhere  missing" in said
    assert (out / "one").read_bytes() == files[0].read_bytes()
    assert (out / "c.bin").read_bytes() == files[2].read_bytes()
    assert not (out / "nowhere").exists()
    code, said = kvstore("get", name, "one", "--out", str(files[0]))
    assert (code, said) == (cli.EXIT_REFUSED, f"kvstore: {files[0]}: File exists\n")
    code, said = kvstore("ls", name)
    assert code == 0
    assert "3 blocks" in said
    code, said = kvstore("ls")
    assert f"flat  {SIZE} B  {name}" in said
    code, said = kvstore("pin", name, "one", "two", "--seconds", "60", "--hard")
    assert (code, said.strip()) == (0, "pinned 2 of 2")
    code, said = kvstore("pin", name, "one", "--remove")
    assert said.strip() == "unpinned 1 of 1"
    code, said = kvstore("pin", name, "nowhere")
    assert (code, said.strip()) == (EXIT_MISSING, "pinned 0 of 1: absent")
    assert kvstore("put", name, f"one={files[0]}")[1].startswith("one  present")


def test_chains_are_named_by_their_fingerprints(kvstore, target, tmp_path):
    with RemoteClient(target) as client:
        blocks = Blocks(client)
        names = blocks.put(1, 3)
    space, keys = blocks.space.hex(), [name.hex() for name in each(blocks.names(1, 5))]
    code, said = kvstore("get", space, *keys[:4], "--out", str(tmp_path))
    assert code == EXIT_MISSING
    assert (tmp_path / keys[2]).read_bytes() == blocks.rows(names)[2].tobytes()
    row = tmp_path / "new"
    row.write_bytes(blocks.rows(blocks.names(1, 5))[3].tobytes())
    assert kvstore("put", space, f"{keys[4]}={row}", "--parent", keys[3])[0] == EXIT_MISSING
    code, said = kvstore("put", space, f"{keys[3]}={row}", "--parent", keys[2])
    assert code == 0, said
    assert "4 of 4" in kvstore("exists", space, *keys[:4])[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["put", "x"], "name files"),
        (["put", "x", "k=/nowhere/f"], "no file"),
        (["get", "nothing-of-that-name", "k"], "never declared"),
        (["ls", "0" * 64], "never declared"),
    ],
)
def test_mistakes_are_told_in_a_line(kvstore, arguments, says):
    code, said = kvstore(*arguments)
    assert code == cli.EXIT_REFUSED
    assert says in said
    assert said.count("\n") == 1


def test_another_size_is_refused(kvstore, files, tmp_path):
    name = f"sizes-{secrets.token_hex(4)}"
    assert kvstore("put", name, str(files[0]))[0] == 0
    small = tmp_path / "small"
    small.write_bytes(b"x")
    code, said = kvstore("put", name, str(small))
    assert (code, f"have {SIZE} bytes" in said) == (cli.EXIT_REFUSED, True)


def test_nobody_there_is_said(tmp_path, capsys):
    for options in (["--gateway", "127.0.0.1:1"], ["--gateway", f"unix:{tmp_path}/none"]):
        assert cli.run(["ls", *options]) == cli.EXIT_AWAY
        assert capsys.readouterr().err.startswith("kvstore: ")
