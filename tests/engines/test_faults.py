"""What goes wrong around a load costs time, never the output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import DaemonProcess
from tests.e2e.kit import eventually
from tests.engines.kit import (
    BLOCK,
    NEW_TOKENS,
    gemma,
    llama,
    plain,
    prompt,
    put_instead,
    run,
    settled,
    torch,
)

Attach = Callable[..., Any]
MakeDaemon = Callable[..., DaemonProcess]
LAST = -1
"""Layer: all others of the prefix were loaded."""
SLOW_DISK = 20_000
"""Bytes a second: five seconds for the blocks of a prompt here, less for the first layer."""


@contextmanager
def during_forward(
    model: Any, happens: Callable[[], object], layer: int = 1
) -> Iterator[list[int]]:
    """`happens` once, when the first forward pass reaches `layer`; the list counts its passes."""
    passes: list[int] = []

    def hook(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 1:
            happens()

    handle = model.model.layers[layer].register_forward_pre_hook(hook)
    try:
        yield passes
    finally:
        handle.remove()


@contextmanager
def before_load(attached: Any, happens: Callable[[], object]) -> Iterator[None]:
    """`happens` after the match and before the first load of the request runs."""
    threads, start = attached._threads, attached._threads.start
    done: list[int] = []

    def started(load: Any) -> None:
        if not done:
            done.append(1)
            happens()
        start(load)

    threads.start = started
    try:
        yield
    finally:
        del threads.start


def stored_on_nvme(attached: Any, daemon: DaemonProcess, tokens: int) -> tuple[Any, Any]:
    """A prompt and its uncached run; its blocks are on NVMe only, the daemon was restarted."""
    ids = prompt(tokens)
    expected = plain(attached, ids)
    run(attached.model, ids)
    settled(attached)
    only_on_nvme(attached, daemon, ids)
    return ids, expected


def only_on_nvme(attached: Any, daemon: DaemonProcess, ids: Any) -> None:
    handle = attached.namespace()
    assert handle.flush(handle.chain(ids[0].numpy()), deadline_seconds=30).all()
    boot = attached.client.boot_id
    daemon.stop()
    daemon.start()
    eventually(lambda: attached.client.boot_id not in (0, boot), "attached again")


def on_slow_disk(daemon: DaemonProcess, bytes_per_second: int) -> None:
    """From its next start on, the daemon's disk reads so slowly."""
    _, _, module, *rest = daemon.command()
    assert module == "kvstore.cli"
    command = [sys.executable, "-m", "bench.slow_disk", str(bytes_per_second), *rest]
    daemon.command = lambda: command  # type: ignore[method-assign]


@pytest.mark.parametrize("model", [llama, gemma])
def test_blocks_come_back_from_nvme(
    attach: Attach, make_daemon: MakeDaemon, model: Callable[..., Any]
) -> None:
    daemon = make_daemon().start()
    attached = attach(model(torch.bfloat16), daemon.socket)
    ids, expected = stored_on_nvme(attached, daemon, 5 * BLOCK + 3)
    for tier in ("nvme_tokens", "host_tokens"):
        assert run(attached.model, ids).differs(expected) == 0
        assert getattr(attached.last, tier) == attached.last.hit_tokens == 5 * BLOCK
        assert attached.last.reruns == 0


def test_host_and_nvme_blocks_in_one_prefix(attach: Attach, make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    attached = attach(gemma(), daemon.socket)
    ids, expected = stored_on_nvme(attached, daemon, 5 * BLOCK + 3)
    run(attached.model, ids[:, : 2 * BLOCK + 1])
    assert run(attached.model, ids).differs(expected) == 0
    assert (attached.last.host_tokens, attached.last.nvme_tokens) == (2 * BLOCK, 3 * BLOCK)


# ---------------------------------------------------------------------- the daemon dies


def test_no_daemon_is_a_plain_miss_until_there_is_one(
    attach: Attach, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon()
    attached = attach(llama(), daemon.socket, wait=False)
    ids = prompt(3 * BLOCK + 1)
    expected = plain(attached, ids)
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.miss_reason == "away"
    settled(attached)
    assert attached.statistics().save_reasons == {"away": 3}
    daemon.start()
    assert attached.client.wait_connected(20)
    for tokens in (0, 3 * BLOCK):
        assert run(attached.model, ids).differs(expected) == 0
        assert attached.last.hit_tokens == tokens
        settled(attached)


def test_killed_before_a_load_from_nvme(attach: Attach, make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    attached = attach(gemma(), daemon.socket)
    ids, expected = stored_on_nvme(attached, daemon, 4 * BLOCK + 1)
    with before_load(attached, daemon.kill):
        assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.reruns == 1
    assert attached.last.hit_tokens == 0


def test_killed_in_a_load_from_nvme(attach: Attach, make_daemon: MakeDaemon) -> None:
    """The first layers have come and were used, the others never will."""
    daemon = make_daemon().start()
    attached = attach(gemma(), daemon.socket)
    on_slow_disk(daemon, SLOW_DISK)
    ids, expected = stored_on_nvme(attached, daemon, 4 * BLOCK + 1)
    with during_forward(attached.model, daemon.kill) as passes:
        assert run(attached.model, ids).differs(expected) == 0
    assert (attached.last.reruns, attached.last.hit_tokens) == (1, 0)
    assert len(passes) == 1 + 5 + NEW_TOKENS - 1  # one thrown away, five chunks, the decode


def test_killed_while_the_suffix_is_computed(attach: Attach, make_daemon: MakeDaemon) -> None:
    """Bytes that were mapped stay what they were: either outcome is right, the output is one."""
    daemon = make_daemon().start()
    attached = attach(gemma(), daemon.socket)
    ids = prompt(4 * BLOCK + 1)
    expected = plain(attached, ids)
    run(attached.model, ids)
    settled(attached)
    with during_forward(attached.model, daemon.kill):
        assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.host_tokens in (0, 4 * BLOCK)


def test_killed_after_a_load_and_started_again(attach: Attach, make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    attached = attach(llama(), daemon.socket)
    ids, expected = stored_on_nvme(attached, daemon, 3 * BLOCK + 1)
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.nvme_tokens == 3 * BLOCK
    daemon.kill()
    eventually(lambda: not attached.client.connected, "the client saw it")
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.hit_tokens == 0
    daemon.start()
    assert attached.client.wait_connected(20)
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.nvme_tokens == 3 * BLOCK


# ---------------------------------------------------------------------- the disk


def damage(daemon: DaemonProcess, content: bytes) -> None:
    """Flip one bit where `content` lies on disk; the daemon must be down."""
    for path in (daemon.data_dir / "segments").iterdir():
        data = path.read_bytes()
        at = data.find(content)
        if at >= 0:
            with path.open("r+b") as segment:
                segment.seek(at + len(content) // 2)
                segment.write(bytes([data[at + len(content) // 2] ^ 1]))
            return
    raise AssertionError("not found on disk")


@pytest.mark.parametrize("block", [0, 2, 4])
def test_a_damaged_block_ends_the_prefix(
    attach: Attach, make_daemon: MakeDaemon, block: int
) -> None:
    daemon = make_daemon().start()
    attached = attach(gemma(torch.bfloat16), daemon.socket)
    ids = prompt(5 * BLOCK + 3)
    expected = plain(attached, ids)
    run(attached.model, ids)
    settled(attached)
    handle = attached.namespace()
    chain = handle.chain(ids[0].numpy())
    blocks = np.empty((5, handle.layout.block_bytes), np.uint8)
    assert handle.load(chain, blocks).blocks == 5
    assert handle.flush(chain, deadline_seconds=30).all()
    daemon.stop()
    damage(daemon, blocks[block, -4096:].tobytes())
    boot = attached.client.boot_id
    daemon.start()
    eventually(lambda: attached.client.boot_id not in (0, boot), "attached again")
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.reruns >= 1
    assert attached.last.hit_tokens == block * BLOCK

    def is_whole_again() -> bool:
        settled(attached)
        assert run(attached.model, ids).differs(expected) == 0
        return attached.last.hit_tokens == 5 * BLOCK

    # A block is refused while whoever found the damage still holds the old one.
    eventually(is_whole_again, "the damaged block was stored anew")


@pytest.mark.parametrize("stage", ["match", "load"])
def test_a_store_that_freezes_costs_its_deadline(
    attach: Attach, make_daemon: MakeDaemon, stage: str
) -> None:
    daemon = make_daemon().start()
    attached = attach(gemma(), daemon.socket, deadline_seconds=0.3)
    ids, expected = stored_on_nvme(attached, daemon, 4 * BLOCK + 1)
    assert daemon.process is not None
    pid = daemon.process.pid

    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)

    try:
        if stage == "match":
            freeze()
            found = run(attached.model, ids)
        else:
            with before_load(attached, freeze):
                found = run(attached.model, ids)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert found.differs(expected) == 0
    assert attached.last.hit_tokens == 0
    assert attached.last.reruns == (stage == "load")
    assert attached.last.miss_reason
    eventually(lambda: attached.client.connected, "attached again")
    eventually(lambda: _hits(attached, ids), "hits once it moves again")


def test_a_slow_disk_costs_its_deadline(attach: Attach, make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    attached = attach(gemma(), daemon.socket, deadline_seconds=0.3)
    on_slow_disk(daemon, SLOW_DISK)
    ids, expected = stored_on_nvme(attached, daemon, 4 * BLOCK + 1)
    assert run(attached.model, ids).differs(expected) == 0
    assert (attached.last.reruns, attached.last.hit_tokens) == (1, 0)
    assert attached.last.miss_reason == "deadline"
    eventually(lambda: _hits(attached, ids), "hits once the blocks are up")


def _hits(attached: Any, ids: Any) -> int:
    run(attached.model, ids)
    return int(attached.last.hit_tokens)


# ---------------------------------------------------------------------- bytes that change


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_blocks_that_go_away_during_the_forward_pass(
    attach: Attach, make_daemon: MakeDaemon, tier: str
) -> None:
    """Read without a lease, or under one that runs out: the pass is thrown away and done again,
    the output is the same."""
    settings = {"host.bytes": "4MiB", "host.region_bytes": "4MiB", "lease.read_seconds": "300ms"}
    daemon = make_daemon(settings).start()
    attached = attach(gemma(torch.bfloat16), daemon.socket)
    ids = prompt(4 * BLOCK + 5)
    expected = plain(attached, ids)
    run(attached.model, ids)
    settled(attached)
    handle = attached.namespace()
    chain = handle.chain(ids[0].numpy())
    stored = np.empty((4, handle.layout.block_bytes), np.uint8)
    assert handle.load(chain, stored).blocks == 4
    if tier == "nvme":
        only_on_nvme(attached, daemon, ids)

    def crowd_out() -> None:
        """And then the same blocks again: the pass that is done again shall not trust them."""
        source = attached.model_session_source()
        handle.delete(chain, 0)
        blocks = np.zeros((8, handle.layout.block_bytes), np.uint8)

        def is_gone() -> bool:
            other = handle.chain(prompt(8 * BLOCK)[0].numpy())
            handle.store(other, blocks).result(20)
            return not source.valid()

        eventually(is_gone, "the slots hold something else")
        put_instead(handle, chain, stored)

    with watched_sources(attached), during_forward(attached.model, crowd_out, LAST) as passes:
        found = run(attached.model, ids, max_new_tokens=1)
    assert found.tokens[0, -1] == expected.tokens[0, ids.shape[1]]
    assert found.logits[0].equal(expected.logits[0])
    assert (attached.last.reruns, attached.last.hit_tokens) == (1, 0)
    assert attached.last.miss_reason == "changed"
    assert len(passes) == 1 + 5  # one thrown away, five chunks computed


@contextmanager
def watched_sources(attached: Any) -> Iterator[None]:
    """`attached.model_session_source()` is what the request under way reads from."""
    threads, start = attached._threads, attached._threads.start
    loads: list[Any] = []

    def started(load: Any) -> None:
        loads.append(load)
        start(load)

    threads.start = started
    attached.model_session_source = lambda: loads[-1]._rows[0].prefix.source
    try:
        yield
    finally:
        del threads.start, attached.model_session_source


def test_a_store_without_room_changes_nothing(attach: Attach, make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(
        {"host.bytes": "2MiB", "host.region_bytes": "2MiB", "nvme.enabled": "false"}
    ).start()
    attached = attach(llama(num_hidden_layers=8), daemon.socket)
    for _ in range(4):
        ids = prompt(20 * BLOCK + 1)
        expected = plain(attached, ids)
        assert run(attached.model, ids).differs(expected) == 0
        settled(attached)
    statistics = attached.statistics()
    assert statistics.saved_blocks + statistics.refused_blocks == 80


# ---------------------------------------------------------------------- several of them


def test_two_models_in_one_store(attach: Attach) -> None:
    one, two = attach(llama()), attach(llama(seed=9))
    ids = prompt(3 * BLOCK + 1)
    expected = [plain(attached, ids) for attached in (one, two)]
    assert expected[0].differs(expected[1])
    for tokens in (0, 3 * BLOCK, 3 * BLOCK):
        for attached, wanted in zip((one, two), expected, strict=True):
            assert run(attached.model, ids).differs(wanted) == 0
            assert attached.last.hit_tokens == tokens
            settled(attached)


PROCESS = """
    import sys
    import torch
    torch.set_num_threads(1)
    import engine_adapter.transformers as kv
    from tests.engines.kit import gemma, run
    attached = kv.attach(gemma(torch.bfloat16), sys.argv[1], block_tokens=16, deadline_seconds=20)
    assert attached.client.wait_connected(20)
    ids = torch.tensor([[int(token) for token in sys.argv[2].split(",")]])
    found = run(attached.model, ids)
    print(attached.last.hit_tokens, found.logits.view(torch.uint8).numpy().tobytes().hex())
    kv.detach(attached.model)
"""


def test_two_processes_share_one_daemon(attach: Attach, store: DaemonProcess) -> None:
    attached = attach(gemma(torch.bfloat16))
    ids = prompt(4 * BLOCK + 1)
    here = run(attached.model, ids)
    assert attached.last.hit_tokens == 0
    settled(attached)
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(store.socket)]
    command.append(",".join(map(str, ids[0].tolist())))
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path.cwd(), timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    logits = here.logits.view(torch.uint8).numpy().tobytes().hex()
    assert done.stdout.split() == [str(4 * BLOCK), logits]
