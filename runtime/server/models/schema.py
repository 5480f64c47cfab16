"""The wire of models."""

from __future__ import annotations

from typing import Any

OWNER = "omnictl"


def model_object(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER}


def model_list(models: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": models}
