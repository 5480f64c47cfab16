"""Names a client may use: the served model, the voices. Pure look-ups in the plan; every endpoint asks here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from runtime.errors import InvalidRequest, ModelNotFound, UnsupportedValue
from runtime.plan import Plan
from runtime.server.wire import shown


def _voice_id(value: Any) -> Any:
    return value["id"] if isinstance(value, dict) and value.keys() == {"id"} else value


VoiceName = Annotated[str, BeforeValidator(_voice_id)]
"""A voice on the wire: its name, or {"id": name}."""


def require_model(plan: Plan, name: str) -> None:
    """ModelNotFound unless this deployment serves `name`."""
    if name not in plan.served_names:
        raise ModelNotFound(f"model: {shown(name)}; served: {', '.join(plan.served_names)}", param="model")


def find_voice(plan: Plan, name: str | None, param: str) -> str | None:
    """The plan's name of a voice or of an alias, in whatever case; the default voice for None. UnsupportedValue lists
    the voices.
    """
    voices = plan.voices
    if voices is None:
        if name is not None:
            raise UnsupportedValue(f"{param}: {shown(name)}; {plan.name} has no voices to choose from", param=param)
        return None
    if name is None:
        return voices.default
    known = {voice.lower(): voice for voice in voices.names} | {k.lower(): v for k, v in voices.aliases.items()}
    if (found := known.get(name.lower())) is None:
        names = ", ".join([*voices.names, *voices.aliases])
        raise UnsupportedValue(f"{param}: unknown voice {shown(name)}; voices: {names}", param=param)
    return found


def require_text(plan: Plan, text: str, param: str) -> None:
    """InvalidRequest unless there is something to read in `text` and no more of it than the plan allows."""
    if not text.strip():
        raise InvalidRequest(f"{param}: empty; expected text", param=param)
    limit = plan.limits.max_text_chars
    if len(text) > limit:
        raise InvalidRequest(f"{param}: {len(text)} characters; at most {limit} (limit max_text_chars)", param=param)
