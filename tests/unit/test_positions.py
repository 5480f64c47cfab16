"""Positions of a prompt of which only a part is used."""

from __future__ import annotations

import numpy as np

from runtime.programs.media.positions import Positions, moved_together


def text(num_tokens: int, start: int) -> Positions:
    return np.broadcast_to(np.arange(start, start + num_tokens), (3, num_tokens))


def picture(height: int, width: int, start: int) -> Positions:
    grid = np.indices((1, height, width)).reshape(3, -1)
    return grid + start


def test_text_alone_counts_up_whatever_is_left_out() -> None:
    is_kept = np.array([False] * 4 + [True] * 5 + [False] * 3)
    found = moved_together(text(12, 0), is_kept, np.zeros(12, np.bool_), 2)
    assert found.tolist() == [list(range(7))] * 3


def test_what_follows_a_picture_goes_on_behind_its_largest_position() -> None:
    """Two turns, of which the first has a picture of 2 x 3; four tokens before, and two between them, are left out."""
    positions = np.concatenate([text(5, 0), picture(2, 3, 5), text(4, 8), text(1, 12)], 1)
    is_kept = np.array([False] * 4 + [True] * 8 + [False] * 2 + [True] * 2)
    found = moved_together(positions, is_kept, np.zeros(16, np.bool_), 1)
    assert found[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 4, 5, 6, 7]
    assert found[1].tolist() == [0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 7]
    assert found[2].tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7]


def test_what_is_flat_counts_like_text() -> None:
    positions = np.concatenate([text(2, 0), picture(2, 2, 2), text(1, 4)], 1)
    is_flat = np.array([False] * 2 + [True] * 4 + [False])
    found = moved_together(positions, np.ones(7, np.bool_), is_flat, 0)
    assert found.tolist() == [list(range(7))] * 3
