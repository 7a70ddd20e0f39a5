"""Names: complete, equal everywhere, and pinned by golden_fingerprints.json."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fingerprint_vectors import PLAIN, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.fingerprint import Chain, Content, KVIdentity, chain, flat_fingerprint, namespace_of
from kvstore.types import FINGERPRINT_BYTES, NamespaceKind

HERE = Path(__file__).parent
OTHER_VALUES = {
    "model": "m2",
    "weights_digest": "sha256:ab",
    "kv_dtype": "fp8_e4m3",
    "layout": "HND",
    "block_tokens": 8,
    "layers": 3,
    "kv_heads_per_rank": 4,
    "head_size": 128,
    "kind": NamespaceKind.FLAT,
    "quantization": "int8",
    "adapter_digest": "sha256:cc",
    "positions": "rope 10000",
    "attention": "eager",
    "kv_group": "sliding:512",
    "tp_size": 2,
    "tp_rank_first": 1,
    "tp_ranks_local": 2,
    "pp_size": 2,
    "pp_stage": 1,
    "tenant_salt": "t",
    "extra": (("a", "b"),),
}
"""For every field one other value."""


def golden() -> dict[str, str]:
    return json.loads((HERE / "golden_fingerprints.json").read_text(encoding="utf-8"))


# KEY-5, KEY-6: equal everywhere


def test_names_are_those_of_the_golden_file():
    assert vectors() == golden()


@pytest.mark.parametrize("hash_seed", ["", "0", "1", "random"])
def test_names_do_not_depend_on_the_process(hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    if not hash_seed:
        del environment["PYTHONHASHSEED"]
    script = HERE / "fingerprint_vectors.py"
    told = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(told.stdout) == golden()


def calls_of_builtin_hash(source: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and node.id in ("hash", "id", "repr", "pickle")
    ]


def test_no_name_passes_through_the_builtin_hash():
    """Nor through id, repr or pickle; a sample shows that the check sees them."""
    root = Path(__file__).parents[2] / "kvstore"
    assert calls_of_builtin_hash("import hashlib\nx = hashlib.md5(b'')\ny = (hash(None), 1)") == [3]
    for module in ("fingerprint", "types", "layout"):
        assert calls_of_builtin_hash((root / f"{module}.py").read_text(encoding="utf-8")) == []


# KEY-1, KEY-2, KEY-3, KEY-8, KEY-9: complete


def test_every_field_is_part_of_the_name():
    assert OTHER_VALUES.keys() == {field.name for field in fields(KVIdentity)}
    spaces = [namespace_of(PLAIN)] + [
        namespace_of(replace(PLAIN, **{name: value})) for name, value in OTHER_VALUES.items()
    ]
    assert len(set(spaces)) == len(spaces)
    names = [name for space in spaces for name in chain(space, range(32), 4)]
    assert len(set(names)) == len(names) == len(spaces) * 8


def test_a_new_field_changes_every_name():
    """Identities of two versions never meet: each field's name is in the encoding."""
    encoded = PLAIN.encode()
    for field in fields(KVIdentity):
        assert field.name.encode() in encoded


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": "ab", "weights_digest": "c"}, {"model": "a", "weights_digest": "bc"}),
        ({"tenant_salt": ""}, {"tenant_salt": "\0"}),
        ({"tenant_salt": "1"}, {"tenant_salt": " 1"}),
        ({"extra": (("a", "bc"),)}, {"extra": (("ab", "c"),)}),
        ({"extra": (("a", "b"), ("c", "d"))}, {"extra": (("a", "bc"), ("", "d"))}),
        ({"extra": ()}, {"extra": (("", ""),)}),
        ({"adapter_digest": "s", "positions": ""}, {"adapter_digest": "", "positions": "s"}),
    ],
)
def test_values_that_look_alike_when_joined_stay_apart(one, other):
    assert namespace_of(replace(PLAIN, **one)) != namespace_of(replace(PLAIN, **other))


@pytest.mark.parametrize("value", [None, 1.5, True, b"bytes", ["list"], {}, 1 << 70])
def test_a_value_without_one_encoding_is_refused(value):
    with pytest.raises(InvalidRequest, match="identity"):
        replace(PLAIN, layers=value).encode()


# KEY-7: contents behind placeholder tokens


def test_contents_enter_at_full_width():
    """5,000 digests, many with equal first or last bytes: no block shared but those before it."""
    space = namespace_of(PLAIN)
    digests = [index.to_bytes(32, "big") for index in range(2000)]
    digests += [index.to_bytes(24, "big") + b"equal..." for index in range(1, 1001)]
    digests += [b"equal..." + index.to_bytes(24, "little") for index in range(2000)]
    seen = [chain(space, [9] * 8, 4, contents=[Content(5, 2, digest)]) for digest in digests]
    assert len({found[0] for found in seen}) == 1
    assert len({found[1] for found in seen}) == len(digests) == 5000


def test_contents_enter_every_block_they_overlap_and_all_that_follow():
    space = namespace_of(PLAIN)
    plain = chain(space, range(20), 4)
    for position, length, first in [(0, 1, 0), (3, 1, 0), (3, 2, 0), (4, 4, 1), (7, 9, 1)]:
        other = chain(space, range(20), 4, contents=[Content(position, length, b"x")])
        differs = [other[at] != plain[at] for at in range(5)]
        assert differs == [False] * first + [True] * (5 - first)


def test_the_same_contents_elsewhere_are_other_contents():
    space, a, b = namespace_of(PLAIN), b"a" * 32, b"b" * 32
    tokens = [9] * 16

    def names(*contents: Content) -> str:
        return chain(space, tokens, 16, contents=contents).joined.hex()

    one = names(Content(2, 3, a), Content(8, 3, b))
    assert one == names(Content(8, 3, b), Content(2, 3, a)), "the order of the list says nothing"
    assert one != names(Content(2, 3, b), Content(8, 3, a))
    assert one != names(Content(3, 3, a), Content(8, 3, b))
    assert one != names(Content(2, 4, a), Content(8, 3, b))
    assert names(Content(2, 3, a)) != names(Content(2, 3, a[:31]))
    assert names() != names(Content(2, 3, b""))


@pytest.mark.parametrize(("position", "length"), [(-1, 1), (0, 0), (3, -2)])
def test_contents_lie_somewhere(position, length):
    with pytest.raises(InvalidRequest, match="content"):
        chain(namespace_of(PLAIN), [], 4, contents=[Content(position, length, b"x")])


# KEY-10, KEY-11: whole digests of whole blocks


def test_names_are_256_bits_and_chained():
    space = namespace_of(PLAIN)
    found = chain(space, range(16), 4)
    assert len(space) == len(found[0]) == FINGERPRINT_BYTES
    assert [found.parent_of(at) for at in range(4)] == [space, found[0], found[1], found[2]]
    assert found.joined == b"".join(found)
    assert flat_fingerprint(space, b"x") not in set(found)


tokens_of = st.lists(st.integers(0, 3), max_size=60)


@settings(max_examples=150, deadline=None)
@given(shared=tokens_of, one=tokens_of, other=tokens_of, block_tokens=st.integers(1, 7))
def test_names_agree_exactly_on_whole_blocks_of_equal_tokens(shared, one, other, block_tokens):
    space = namespace_of(PLAIN)
    a, b = shared + one, shared + other
    common = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    common = min(len(a), len(b)) if common is None else common
    names_a, names_b = chain(space, a, block_tokens), chain(space, b, block_tokens)
    assert len(names_a) == len(a) // block_tokens
    assert names_a.tokens == len(names_a) * block_tokens
    equal = [x == y for x, y in zip(names_a, names_b, strict=False)]
    whole = common // block_tokens
    assert equal == [True] * whole + [False] * (len(equal) - whole)


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    block_tokens=st.integers(1, 9),
)
def test_a_chain_grown_in_pieces_is_the_chain(tokens, cuts, block_tokens):
    space = namespace_of(PLAIN)
    contents = [Content(4, 9, b"image")]
    whole = chain(space, tokens, block_tokens, contents=contents)
    grown = Chain(space, block_tokens, contents)
    edges = sorted({0, *cuts, len(tokens)})
    for start, stop in pairwise(edges):
        grown.extend(tokens[start:stop])
    assert grown.joined == whole.joined


def test_long_chains_are_those_of_short_steps():
    """Hashing in slices leaves no seam."""
    space = namespace_of(PLAIN)
    tokens = np.arange(4 * 700, dtype=np.uint32)
    grown = Chain(space, 4)
    for start in range(0, len(tokens), 4):
        grown.extend(tokens[start : start + 4])
    assert grown.joined == chain(space, tokens, 4).joined


@pytest.mark.parametrize("kind", [list, tuple, np.array, "uint32", "bytes", "memoryview", "int64"])
def test_tokens_in_any_form_give_one_name(kind):
    ids = [0, 1, 70_000, 2**32 - 1]
    array = np.array(ids, np.uint32)
    forms = {
        "uint32": array,
        "int64": array.astype(np.int64),
        "bytes": array.tobytes(),
        "memoryview": memoryview(array.tobytes()),
    }
    tokens = forms[kind] if isinstance(kind, str) else kind(ids)
    space = namespace_of(PLAIN)
    assert chain(space, tokens, 2).joined == chain(space, ids, 2).joined


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [1.5],
        ["a"],
        b"abc",
        np.array([-1]),
        np.array([2**32]),
        np.array([1.0]),
        np.array([[1]], np.uint32),
    ],
)
def test_tokens_that_are_none_are_refused(tokens):
    with pytest.raises(InvalidRequest, match="tokens"):
        chain(namespace_of(PLAIN), tokens, 1)


def test_a_chain_has_a_whole_namespace():
    with pytest.raises(InvalidRequest, match="31 bytes"):
        Chain(b"x" * 31, 4)
