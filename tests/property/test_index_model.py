"""The index against a dictionary: any order of puts, deletes, reopens and clears of the queue."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvstore.index import RECORD, Index, NamespaceRecord
from kvstore.index import index as index_module
from kvstore.types import FINGERPRINT_BYTES, NamespaceKind

NAMES = st.integers(0, 11).map(lambda seed: bytes([seed]) * FINGERPRINT_BYTES)
GENERATIONS = st.integers(1, 3)


def record(generation: int, slot: int) -> bytes:
    found = np.zeros((), RECORD)
    found["generation"], found["slot"], found["checksums"] = generation, slot, slot
    return found.tobytes()


def generation_of(stored: bytes) -> int:
    return int(np.frombuffer(stored, RECORD)[0]["generation"])


class IndexMachine(RuleBasedStateMachine):
    """Submits are not waited for one by one, so groups form; the model applies them in order."""

    def __init__(self) -> None:
        super().__init__()
        self._group_seconds = index_module.GROUP_SECONDS
        index_module.GROUP_SECONDS = 0.002
        self.directory = Path(tempfile.mkdtemp())
        self.index = self._open()
        self.model: dict[bytes, bytes] = {}
        self.namespaces: dict[bytes, NamespaceRecord] = {}
        self.waiting: list[Future[None]] = []

    def _open(self) -> Index:
        return Index.open(self.directory / "index", map_bytes=16 << 20)

    @rule(
        puts=st.lists(st.tuples(NAMES, GENERATIONS, st.integers(0, 99)), max_size=6),
        deletes=st.lists(st.tuples(NAMES, GENERATIONS | st.none()), max_size=6),
    )
    def submit(self, puts, deletes):
        made = [(name, record(generation, slot)) for name, generation, slot in puts]
        self.waiting.append(self.index.submit(made, deletes))
        for name, generation in deletes:
            found = self.model.get(name)
            if found is not None and generation in (None, generation_of(found)):
                del self.model[name]
        self.model.update(made)

    @rule(number=st.integers(0, 3), count=st.integers(0, 9))
    def declare(self, number, count):
        made = NamespaceRecord(
            number, bytes([number]) * 32, NamespaceKind.FLAT, 1, 1, 4096, 1, clear_count=count
        )
        self.index.put_namespace(made)
        self.namespaces[made.id] = made

    @precondition(lambda self: self.waiting)
    @rule()
    def wait_and_compare(self):
        for future in self.waiting:
            future.result(10)
        self.waiting.clear()
        self.compare()

    @rule()
    def close_and_open(self):
        self.index.close()
        for future in self.waiting:
            assert future.done()
            future.result(0)
        self.waiting.clear()
        self.index = self._open()
        self.compare()

    def compare(self):
        names, records = self.index.scan()
        assert {
            name.tobytes(): found.tobytes() for name, found in zip(names, records, strict=True)
        } == self.model
        assert {item.id: item for item in self.index.load_namespaces()} == self.namespaces
        for name, stored in self.model.items():
            found = self.index.get(name)
            assert found is not None
            assert found.tobytes() == stored

    def teardown(self):
        self.index.close()
        shutil.rmtree(self.directory)
        index_module.GROUP_SECONDS = self._group_seconds


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
