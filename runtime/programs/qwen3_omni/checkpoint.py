"""Single tensors out of a checkpoint of safetensors files, split over several files or not."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from runtime.errors import WeightsError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Checkpoint:
    """WeightsError when the folder or a tensor in it is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX
        self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}

    def tensor(self, name: str) -> torch.Tensor:
        return self._opened(name)[:]

    def row(self, name: str, number: int) -> torch.Tensor:
        """One row, [size], of a table that is not read as a whole."""
        return self._opened(name)[number : number + 1][0]

    def below(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors whose name starts so, by the rest of their name."""
        from safetensors import SafetensorError, safe_open

        found: dict[str, torch.Tensor] = {}
        names = {file for name, file in self._file_of.items() if name.startswith(prefix)} if self._file_of else {SINGLE}
        for file in sorted(names):
            try:
                with safe_open(self.folder / file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a mapping
                        if name.startswith(prefix):
                            found[name.removeprefix(prefix)] = tensors.get_tensor(name)
            except (OSError, SafetensorError) as exc:
                raise self._broken(file, str(exc)) from exc
        if not found:
            raise self._broken(", ".join(sorted(names)) or INDEX, f"no tensor {prefix}*")
        return found

    def _opened(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._file_of.get(name, SINGLE)
        try:
            with safe_open(self.folder / file, framework="pt") as tensors:
                return tensors.get_slice(name)
        except (OSError, SafetensorError) as exc:
            raise self._broken(file, f"{name}: {exc}") from exc

    def _broken(self, file: str, reason: str) -> WeightsError:
        return WeightsError(f"{self.folder / file}: {reason}", hint="fetch the weights again with `omnictl pull`")
