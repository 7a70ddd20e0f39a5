"""The boundary of several KV groups against a model that tries every token count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.boundary import GroupReach, common_boundary


def serves(group: GroupReach, boundary: int) -> bool:
    """The rule, word for word: every block from the root, or every block the window overlaps."""
    if boundary % group.block_tokens or boundary > len(group.usable) * group.block_tokens:
        return False
    first_token = max(0, boundary - group.window_tokens) if group.window_tokens else 0
    needed = range(first_token // group.block_tokens, boundary // group.block_tokens)
    return all(group.usable[block] for block in needed)


def boundary_by_trial(groups: list[GroupReach], tokens_max: int) -> int:
    most = max(len(group.usable) * group.block_tokens for group in groups)
    if tokens_max:
        most = min(most, tokens_max)
    return max(at for at in range(most + 1) if all(serves(group, at) for group in groups))


groups_of = st.builds(
    GroupReach,
    block_tokens=st.sampled_from([1, 2, 3, 4, 6, 16]),
    window_tokens=st.sampled_from([0, 0, 1, 3, 4, 7, 16, 100]),
    usable=st.lists(st.integers(0, 7).map(bool), max_size=30).map(lambda x: np.array(x, bool)),
)


@settings(max_examples=250, deadline=None)
@given(groups=st.lists(groups_of, min_size=1, max_size=3), tokens_max=st.integers(0, 120))
def test_the_boundary_is_the_largest_that_every_group_serves(groups, tokens_max):
    assert common_boundary(groups, tokens_max) == boundary_by_trial(groups, tokens_max)


def reach(block_tokens: int, window_tokens: int, usable: str) -> GroupReach:
    return GroupReach(block_tokens, window_tokens, np.array([mark == "#" for mark in usable]))


@pytest.mark.parametrize(
    ("groups", "tokens_max", "boundary"),
    [
        ([reach(4, 0, "####")], 0, 16),
        ([reach(4, 0, "##.#")], 0, 8),
        ([reach(4, 0, ".###")], 0, 0),
        ([reach(4, 0, "####")], 11, 8),
        ([reach(4, 0, "")], 0, 0),
        ([reach(4, 8, "..##")], 0, 16),
        ([reach(4, 9, "..##")], 0, 0),
        ([reach(4, 9, ".###")], 0, 16),
        ([reach(4, 4, "#.#.")], 0, 12),
        ([reach(4, 100, "##.#")], 0, 8),
        ([reach(4, 0, "####"), reach(6, 0, "##")], 0, 12),
        ([reach(4, 0, "####"), reach(4, 4, "..#.")], 0, 12),
        ([reach(4, 0, "##"), reach(4, 4, "..#.")], 0, 0),
        ([reach(4, 0, "####"), reach(8, 8, "#.")], 15, 8),
    ],
)
def test_examples(groups, tokens_max, boundary):
    assert common_boundary(groups, tokens_max) == boundary
    assert boundary_by_trial(groups, tokens_max) == boundary
