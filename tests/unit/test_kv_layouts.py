"""Halves of a split stage that do not fit together are refused with both numbers."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.kv_layouts import check_kv_layouts
from runtime.pool import Pools
from tests.golden.split_plan import split_plan

LAYOUT = {"num_layers": 4, "block_size": 32, "block_shape": [1, 32, 64], "dtype": "float32", "has_rows": False}


def check(prefill: dict[str, Any], thinker: dict[str, Any]) -> None:
    plan = split_plan()
    pools = Pools(plan)
    pools.replica("prefill", 0).facts["kv_layout"] = prefill
    pools.replica("thinker", 0).facts["kv_layout"] = thinker
    check_kv_layouts(plan, pools)


def test_equal_layouts() -> None:
    check(LAYOUT, dict(LAYOUT))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_layers", 28, "num_layers is 4 where prompts are computed and 28 where they are used"),
        ("block_size", 64, "block_size is 32 where prompts are computed and 64 where they are used"),
        ("dtype", "bfloat16", "dtype is float32 where prompts are computed and bfloat16 where they are used"),
        ("has_rows", True, "has_rows is False where prompts are computed and True where they are used"),
    ],
)
def test_different_layouts(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"edge prefill->thinker: {message}"):
        check(LAYOUT, LAYOUT | {name: value})


def test_every_difference_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        check(LAYOUT, LAYOUT | {"block_size": 64, "dtype": "float16"})
    assert len(caught.value.problems) == 2
