"""Declared namespaces: one shape for ever, an index that stays, clear counts."""

from __future__ import annotations

import pytest

from kvstore.errors import (
    ConfigError,
    InvalidRequest,
    NamespaceConflict,
    NamespaceUnknown,
    Overloaded,
)
from kvstore.layout import BlockLayout
from kvstore.namespaces import LABEL_CHARS_MAX, Namespace, NamespaceTable
from kvstore.types import NamespaceId, NamespaceKind

LAYOUT = BlockLayout(16, 4, 4096)
A, B = NamespaceId(b"a" * 32), NamespaceId(b"b" * 32)


@pytest.fixture
def table():
    return NamespaceTable(4)


def declare(table, name=A, kind="chained", layout=LAYOUT, window_tokens=0, label="x"):
    found, is_new = table.propose(name, kind, layout, window_tokens, label)
    return table.add(found) if is_new else found


def test_a_declared_namespace_is_found_by_id_and_index(table):
    a, b = declare(table), declare(table, B)
    assert table.get(A) is a
    assert table.at(1) is b
    assert (len(table), list(table), a.index, b.index) == (2, [a, b], 0, 1)


def test_declaring_it_again_is_no_change(table):
    first = declare(table)
    first.clear_count = 3
    assert declare(table, label="other words") is first
    assert first.label == "x"


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "flat"},
        {"layout": BlockLayout(16, 2, 8192)},
        {"layout": BlockLayout(8, 4, 4096)},
        {"window_tokens": 64},
    ],
)
def test_one_identity_has_one_shape(table, other):
    """KEY-2: the same bytes a block do not make it the same layout."""
    declare(table)
    with pytest.raises(NamespaceConflict, match="must be part of the identity"):
        declare(table, **other)
    assert len(table) == 1


def test_the_second_of_two_concurrent_declarations_gets_the_first(table):
    one, _ = table.propose(A, "chained", LAYOUT, 0, "")
    other, is_new = table.propose(A, "chained", LAYOUT, 0, "")
    assert is_new
    assert table.add(one) is one
    assert table.add(other) is one


def test_what_is_no_declaration_is_refused(table):
    with pytest.raises(InvalidRequest, match="31 bytes"):
        declare(table, b"x" * 31)
    with pytest.raises(InvalidRequest, match="'ring'"):
        declare(table, kind="ring")
    with pytest.raises(InvalidRequest, match="3 bytes"):
        table.get(b"abc")
    with pytest.raises(NamespaceUnknown, match="never declared"):
        table.get(A)


def test_there_is_a_limit_and_labels_are_cut(table):
    for number in range(4):
        found = declare(table, NamespaceId(bytes([number]) * 32), label="l" * 999)
        assert len(found.label) == LABEL_CHARS_MAX
    with pytest.raises(Overloaded, match="namespaces_max"):
        declare(table, A)
    assert declare(table, NamespaceId(bytes(32))).index == 0, "known ones need no room"


@pytest.mark.parametrize(
    ("kind", "window", "needs"), [("chained", 0, True), ("chained", 64, False), ("flat", 0, False)]
)
def test_only_full_attention_chains_need_their_parents(table, kind, window, needs):
    found = declare(table, kind=kind, window_tokens=window)
    assert found.is_prefix_closed is needs
    assert table.leaf_exempt[found.index] != needs
    assert not table.leaf_exempt[found.index + 1 :].any()


def test_clear_counts_are_the_namespaces_own(table):
    a, b = declare(table), declare(table, B)
    table.set_clear_count(a, 7)
    assert table.clear_counts[:2].tolist() == [7, 0]
    assert (a.clear_count, b.clear_count) == (7, 0)


def test_a_restart_keeps_indexes_and_counts(table):
    kept = [
        Namespace(1, A, NamespaceKind.FLAT, LAYOUT, clear_count=9),
        Namespace(0, B, NamespaceKind.CHAINED, LAYOUT),
    ]
    table.restore(kept)
    assert [found.id for found in table] == [B, A]
    assert table.clear_counts[:2].tolist() == [0, 9]
    assert table.leaf_exempt[:2].tolist() == [False, True]


def test_a_limit_below_what_is_known_is_refused_with_the_way_out():
    kept = [
        Namespace(0, A, NamespaceKind.FLAT, LAYOUT),
        Namespace(1, B, NamespaceKind.FLAT, LAYOUT),
    ]
    with pytest.raises(ConfigError, match=r"limits\.namespaces_max=1, .* raise it to 2"):
        NamespaceTable(1).restore(kept)
