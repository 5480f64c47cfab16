"""Reading what a client sent: strict JSON into strict models. A field we do not know, a known one we do not
honour, and a value of the wrong type or range are refused by name; null means unset. Called by the routes.
"""

from __future__ import annotations

import asyncio
import difflib
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from starlette.requests import Request

from runtime.errors import InvalidRequest, UnsupportedMedia, UnsupportedValue

INLINE_PARSE_BYTES = 64 << 10
"""Bodies up to this size are parsed on the event loop; larger ones in a thread."""
_MAX_SHOWN_PROBLEMS = 5
_UNSUPPORTED_TYPES = {"unsupported_value", "literal_error"}

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 60

Model = TypeVar("Model", bound="WireModel")


class WireModel(BaseModel):
    """`neutral`: fields of the public API that we know and do not honour -> the values that ask for nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _keep_honoured(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None and cls._is_honoured(name, value)}

    @classmethod
    def _is_honoured(cls, name: str, value: Any) -> bool:
        if name in cls.model_fields:
            return True
        if name not in cls.neutral:
            close = difflib.get_close_matches(name, cls.model_fields, n=1)
            raise refusal(name, "unknown field" + (f"; did you mean {close[0]!r}?" if close else ""), "unknown_field")
        accepted = cls.neutral[name]
        if any(type(value) is type(other) and value == other for other in accepted):
            return False
        instead = f"; leave it out or send {accepted[0]!r}" if accepted else ""
        raise refusal(name, f"{shown(value)} is not supported by this server{instead}")


def refusal(field: str, message: str, kind: str = "unsupported_value") -> PydanticCustomError:
    """To raise inside a validator: an error about one field of the model, with our own words."""
    return PydanticCustomError(kind, "{message}", {"field": field, "message": message})


def shown(value: Any) -> str:
    """A value for a message, cut to a length that a message can bear."""
    return _brief.repr(value)


async def read_json(request: Request, model: type[Model]) -> Model:
    """The body as `model`. InvalidRequest, UnsupportedValue or UnsupportedMedia name what is wrong."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise UnsupportedMedia(f"content-type: {content_type!r}; expected application/json")
    body = await request.body()
    if len(body) <= INLINE_PARSE_BYTES:
        return _parse(model, body)
    return await asyncio.to_thread(_parse, model, body)


def _parse(model: type[Model], body: bytes) -> Model:
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as exc:
        raise InvalidRequest(f"body: not valid JSON: {exc}") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"body: {type(data).__name__}; expected a JSON object")
    return validate(model, data)


def validate(model: type[Model], data: Mapping[str, Any]) -> Model:
    """`data` as `model`; all problems in one InvalidRequest whose `param` is the first one's field."""
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        details = exc.errors(include_url=False)
    problems = tuple(_problem(detail) for detail in details)
    error_class = UnsupportedValue if details[0]["type"] in _UNSUPPORTED_TYPES else InvalidRequest
    raise error_class("; ".join(problems[:_MAX_SHOWN_PROBLEMS]), param=_path(details[0]), problems=problems)


def _problem(detail: ErrorDetails) -> str:
    message = detail["msg"]
    if detail["type"] == "missing":
        message = "missing"
    elif "message" not in detail.get("ctx", {}):
        message = f"{shown(detail['input'])}: {message[:1].lower()}{message[1:]}"
    return f"{_path(detail)}: {message}"


def _path(detail: ErrorDetails) -> str:
    """("messages", 0, "role") -> messages[0].role"""
    steps = [*detail["loc"], *([detail["ctx"]["field"]] if "field" in detail.get("ctx", {}) else [])]
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
