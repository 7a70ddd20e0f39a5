"""The awaitable client: the same answers, from any loop; a cancelled copy ends before its caller
goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_kit import LAYOUT, SECONDS, SPACE, STORED, chain_of, coloured, eventually, fill

import kvstore
from kvstore import AsyncKVClient
from kvstore.hints import SESSION, Hint
from kvstore.planner import Ability
from kvstore.types import BlockStatus, NamespaceId, NamespaceKind

Make = Callable[..., Any]


def test_every_verb(make_fake: Make, tmp_path: Path) -> None:
    fake = make_fake()

    async def scenario() -> None:
        async with AsyncKVClient(str(tmp_path / "s.sock"), engine="gateway") as client:
            assert await client.wait_connected(SECONDS)
            assert client.connected
            space = await client.namespace(SPACE, LAYOUT)
            assert (space.id, space.layout) == (SPACE, LAYOUT)
            chain, blocks = chain_of(space.handle, 4), coloured(4)
            hints = [Hint(is_session=True)]
            ticket = await space.store(chain, blocks[:2], hints=hints)
            assert await space.stored(ticket) == (STORED,) * 2
            assert await space.stored(ticket) == (STORED,) * 2
            fake.on_disk[chain[2]] = blocks[2].tobytes()
            async with await space.reserve(chain, start=3) as reservation:
                reservation.reservation.view(0)[:] = blocks[3]
                assert await reservation.commit() == (STORED,)
            assert space.join(reservation.reservation.share()).reservation.granted == (0,)
            assert await space.match(chain) == 2
            assert (await space.match_each(chain)).tolist() == [True, True, False, True]
            into = np.zeros_like(blocks)
            assert (await space.load(chain, into)).blocks == 4
            assert (into == blocks).all()
            able = Ability(prompt_tokens=len(chain) * LAYOUT.block_tokens)
            async with await space.lease(chain, ability=able, hints=hints) as lease:
                runs = [(ready.first, ready.count) async for ready in lease.load()]
                assert (lease.blocks, lease.reason, runs) == (4, "", [(0, 4)])
                assert await lease.renew() == 10
            async with await client.match_groups([chain]) as lease:
                assert lease.blocks == 4
            assert (await space.exists(chain)).prefix_blocks == 4
            assert (await space.flush(chain)).tolist() == [False, False, True, False]
            assert await space.prefetch(chain) == 4
            assert await space.delete(chain, 3) == 1
            await space.clear()
            assert await client.stat() == {"blocks": 3}
            flat = await client.namespace(NamespaceId(b"f" * 32), LAYOUT, kind=NamespaceKind.FLAT)
            assert len(flat.keys([b"a", b"b"])) == 2
            assert client.statistics().stores == 1
        assert (await space.load(chain, into)).reason == "closed"
        assert fake.called("Commit")[0].hint_classes == bytes([SESSION] * 2)
        [asked] = [match for match in fake.called("Match") if match.HasField("plan")]
        assert asked.plan.prompt_tokens == able.prompt_tokens
        assert asked.groups[0].hints[0].hint_class == SESSION

    asyncio.run(scenario())


def test_two_loops_may_share_a_client(make_fake: Make, tmp_path: Path) -> None:
    make_fake()
    client = AsyncKVClient(str(tmp_path / "s.sock"))
    handles = []

    async def use(seed: int) -> None:
        assert await client.wait_connected(SECONDS)
        space = await client.namespace(SPACE, LAYOUT)
        handles.append(space.handle)
        for turn in range(5):
            chain = chain_of(space.handle, 2, 10 * seed + turn)
            blocks = coloured(2, seed=10 * seed + turn)
            await space.stored(await space.store(chain, blocks))
            into = np.zeros_like(blocks)
            assert (await space.load(chain, into)).blocks == 2
            assert (into == blocks).all()

    loops = [threading.Thread(target=asyncio.run, args=(use(seed),)) for seed in (1, 2)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    asyncio.run(client.close())
    assert client.statistics().store_stored == 20
    assert handles[0] is handles[1]


def test_a_cancelled_load_waits_for_its_copy(make_fake: Make, tmp_path: Path) -> None:
    fake = make_fake()
    copied = threading.Event()

    async def scenario() -> None:
        async with AsyncKVClient(str(tmp_path / "s.sock")) as client:
            assert await client.wait_connected(SECONDS)
            space = await client.namespace(SPACE, LAYOUT)
            chain, blocks = chain_of(space.handle, 2), coloured(2)
            fill(fake, space.handle, chain, blocks, 1)
            fake.hold["Match"] = threading.Event()
            into = np.zeros_like(blocks)
            load = asyncio.create_task(space.load(chain, into))
            await asyncio.sleep(0.05)
            load.cancel()
            await asyncio.sleep(0.05)
            assert not load.done(), "the copy may still write into our memory"
            fake.hold["Match"].set()
            with pytest.raises(asyncio.CancelledError):
                await load
            assert (into == blocks).all()
            copied.set()

    asyncio.run(scenario())
    assert copied.is_set()


@pytest.mark.parametrize("verb", ["reserve", "lease"])
def test_what_a_cancelled_verb_came_by_is_given_back(
    make_fake: Make, tmp_path: Path, verb: str
) -> None:
    fake = make_fake()

    async def scenario() -> None:
        async with AsyncKVClient(str(tmp_path / "s.sock")) as client:
            assert await client.wait_connected(SECONDS)
            space = await client.namespace(SPACE, LAYOUT)
            chain = chain_of(space.handle, 2)
            fill(fake, space.handle, chain, coloured(2), 1)
            asked = "Reserve" if verb == "reserve" else "Match"
            fake.hold[asked] = threading.Event()
            task = asyncio.create_task(getattr(space, verb)(chain))
            await asyncio.to_thread(eventually, lambda: fake.called(asked))
            task.cancel()
            fake.hold[asked].set()
            with pytest.raises(asyncio.CancelledError):
                await task
            given_back = "Abort" if verb == "reserve" else "Release"
            await asyncio.to_thread(eventually, lambda: fake.called(given_back))
            assert not fake.reservations

    asyncio.run(scenario())


def test_a_store_nobody_takes_resolves_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with AsyncKVClient(str(tmp_path / "s.sock"), attach=False) as client:
            space = await client.namespace(SPACE, LAYOUT)
            ticket = await space.store(chain_of(space.handle, 1), coloured(1))
            assert await space.stored(ticket) == (BlockStatus.REFUSED,)

    asyncio.run(scenario())


def test_the_package_root_offers_what_engines_use() -> None:
    for name in kvstore.__all__:
        assert getattr(kvstore, name)
    with pytest.raises(AttributeError, match="nothing"):
        _ = kvstore.nothing
