"""The served names of the plan as models."""

from __future__ import annotations

import time
from typing import Any

from runtime.plan import Plan
from runtime.server.models.schema import model_list, model_object
from runtime.server.names import require_model


class ModelService:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._created = int(time.time())

    def all(self) -> dict[str, Any]:
        return model_list([model_object(name, self._created) for name in self._plan.served_names])

    def one(self, name: str) -> dict[str, Any]:
        """ModelNotFound for a name that is not served."""
        require_model(self._plan, name)
        return model_object(name, self._created)
