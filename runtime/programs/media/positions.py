"""Positions of prompt tokens in three dimensions (time, height, width), when only some of the tokens are used.

Text counts on in all three at once; a picture spreads out in two, a video in three, and what follows goes on behind
the largest of them. Knows no model; talkers, which leave out part of the thinker's prompt, call it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def moved_together(positions: Positions, is_kept: Mask, is_flat: Mask, num_more: int) -> Positions:
    """int64 [3, m]: of the kept tokens as if there were no others, and of `num_more` tokens of text behind them.

    positions: int64 [3, n] of all tokens; is_kept, is_flat: bool [n]; flat tokens count on like text. What is left out
    and what is flat begins and ends between media.
    """
    pieces, start = [], 0
    for first, stop in _runs(is_kept, is_flat):
        piece = np.broadcast_to(np.arange(stop - first), (3, stop - first))
        if not is_flat[first]:
            piece = positions[:, first:stop] - positions[0, first]
        pieces.append(piece + start)
        start = int(pieces[-1].max()) + 1
    return np.concatenate([*pieces, np.broadcast_to(np.arange(num_more), (3, num_more)) + start], 1)


def _runs(is_kept: Mask, is_flat: Mask) -> list[tuple[int, int]]:
    """(first, stop) of the longest stretches of kept tokens that are all flat, or all not."""
    kinds = np.where(is_kept, 1 + is_flat, 0)
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    return [(first, stop) for first, stop in zip(edges, edges[1:], strict=False) if first < stop and kinds[first]]
