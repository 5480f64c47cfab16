"""A small recipe as data, for tests to change: a writer on the GPU or CPU and a speaker behind it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from omnictl.recipe import Placed, Recipe
from omnictl.recipe_schema import RecipeFile

MODEL_ID = "acme/parrot"
DATA: dict[str, Any] = {
    "meta": {
        "title": "Parrot",
        "slug": "parrot",
        "provider": "acme",
        "description": "Writes and speaks.",
        "date_added": "2026-11-30",
        "date_updated": "2026-11-30",
        "difficulty": "beginner",
        "tasks": ["omni"],
    },
    "model": {
        "model_id": MODEL_ID,
        "architecture": "dense",
        "parameter_count": "1B",
        "active_parameters": "1B",
        "context_length": 4096,
    },
    "omnictl": {
        "short_names": ["parrot"],
        "stages": {
            "writer": {
                "engine": "ar",
                "program": "acme.writer",
                "parameters": "1B",
                "cache": "1 GiB",
                "cache_elements_per_token": 32768,
                "program_settings": {"temperature": 0.5, "greeting": "hello", "polite": True},
            },
            "speaker": {
                "engine": "module",
                "program": "acme.speaker",
                "parameters": "100M",
                "bytes_per_parameter": 4,
            },
        },
        "edges": [{"source": "writer", "target": "speaker", "payload": "text", "mode": "chunked", "capacity": "1 MiB"}],
        "tasks": {
            "chat": {"inputs": {"text": "writer"}, "outputs": {"text": "writer", "audio": "speaker"}},
            "speech": {"inputs": {"text": "speaker"}, "outputs": {"audio": "speaker"}},
        },
        "placements": {
            "cpu": {
                "processes": {
                    "writer": {"stages": ["writer"], "reserve": "500 MiB"},
                    "speaker": {"stages": ["speaker"], "reserve": "100 MiB"},
                }
            },
            "cuda": {
                "processes": {
                    "writer": {"stages": ["writer"], "gpus": 1, "reserve": "500 MiB"},
                    "speaker": {"stages": ["speaker"], "reserve": "100 MiB"},
                },
                "stages": {"writer": {"cache": "8 GiB", "slots": 64}},
            },
        },
    },
}


def recipe_data() -> dict[str, Any]:
    return copy.deepcopy(DATA)


def write_recipe(folder: Path, data: dict[str, Any], model_id: str = MODEL_ID) -> Path:
    """Write a recipe where a recipe folder has it."""
    path = folder / f"{model_id}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def make_recipe(data: dict[str, Any]) -> Recipe:
    """A recipe without files and layers: every placement has the same values, without sources."""
    file = RecipeFile.model_validate_json(json.dumps(data), strict=True)
    placed = {name: Placed(file.omnictl, {}) for name in file.omnictl.placements}
    return Recipe(file.meta, file.model, file.omnictl, placed, Path("test.yaml"), "file")
