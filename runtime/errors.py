"""The one error tree.

    OmniError                     status  exit  code
    + InvalidRequest                 400     2  invalid_request
    |   - UnsupportedValue           400     2  unsupported_value
    |   - RequestTimeout             408     2  request_timeout         the client stopped sending
    |   - PayloadTooLarge            413     2  payload_too_large
    |   - UnsupportedMedia           415     2  unsupported_media_type
    |   - NotFound                   404     2  not_found
    |       · ModelNotFound          404     2  model_not_found
    + Unauthorized                   401     2  invalid_api_key
    + ConfigError                    400     3  invalid_config      recipe, settings, plan file
    |   - PlanError                  400     4  does_not_fit        carries every problem
    + EnvironmentProblem             500     5  environment         versions, missing program, no device
    |   - PortInUse                  500     6  port_in_use
    |   - WeightsError               500     7  weights
    + NotRunning                     404     8  not_running         no such deployment
    + StartFailed                    500     9  start_failed
    + Overloaded                     429    10  overloaded          carries retry_after_s
    + Unavailable                    503    11  unavailable         stage down, loading, draining
    + DeadlineExceeded               504    12  deadline_exceeded
    + StageError                     500    13  stage_error         a stage raised
    |   - StageDied                  503    13  stage_died
    |   - ConnectorError             500    13  connector_error
    + Aborted                        499    14  aborted

Every error says where, what, the value and what was expected in `message`, and the next step in `hint`.
Edges map an error exactly once: the server to OpenAI error JSON, the tool to stderr and an exit code.
"""

from __future__ import annotations

from typing import Any, ClassVar


class OmniError(Exception):
    """Base of everything we raise for users. `param` names the offending request field or recipe key."""

    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        problems: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.retry_after_s = retry_after_s
        self.problems = problems

    def __str__(self) -> str:
        return self.message

    def to_fields(self) -> dict[str, Any]:
        """A plain dictionary that survives a process boundary; `from_fields` restores the class."""
        fields: dict[str, Any] = {"class": type(self).__name__, "message": self.message}
        for name in ("hint", "param", "retry_after_s"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if self.problems:
            fields["problems"] = list(self.problems)
        return fields


class InvalidRequest(OmniError):
    status, exit_code, code = 400, 2, "invalid_request"


class UnsupportedValue(InvalidRequest):
    """A field or value that we know and do not honour: refused rather than ignored."""

    code = "unsupported_value"


class RequestTimeout(InvalidRequest):
    status, code = 408, "request_timeout"


class PayloadTooLarge(InvalidRequest):
    status, code = 413, "payload_too_large"


class UnsupportedMedia(InvalidRequest):
    status, code = 415, "unsupported_media_type"


class NotFound(InvalidRequest):
    status, code = 404, "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Unauthorized(OmniError):
    status, exit_code, code = 401, 2, "invalid_api_key"


class ConfigError(OmniError):
    status, exit_code, code = 400, 3, "invalid_config"


class PlanError(ConfigError):
    """A recipe that cannot be placed. `problems` holds all of them, not only the first."""

    exit_code, code = 4, "does_not_fit"


class EnvironmentProblem(OmniError):
    exit_code, code = 5, "environment"


class PortInUse(EnvironmentProblem):
    exit_code, code = 6, "port_in_use"


class WeightsError(EnvironmentProblem):
    exit_code, code = 7, "weights"


class NotRunning(OmniError):
    status, exit_code, code = 404, 8, "not_running"


class StartFailed(OmniError):
    exit_code, code = 9, "start_failed"


class Overloaded(OmniError):
    status, exit_code, code = 429, 10, "overloaded"


class Unavailable(OmniError):
    status, exit_code, code = 503, 11, "unavailable"


class DeadlineExceeded(OmniError):
    status, exit_code, code = 504, 12, "deadline_exceeded"


class StageError(OmniError):
    exit_code, code = 13, "stage_error"


class StageDied(StageError):
    status, code = 503, "stage_died"


class ConnectorError(StageError):
    code = "connector_error"


class Aborted(OmniError):
    status, exit_code, code = 499, 14, "aborted"


def _tree(root: type[OmniError]) -> dict[str, type[OmniError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


ERRORS: dict[str, type[OmniError]] = _tree(OmniError)


def from_fields(fields: dict[str, Any]) -> OmniError:
    """Restore an error from `OmniError.to_fields`; an unknown class becomes the base class."""
    cls = ERRORS.get(str(fields.get("class")), OmniError)
    return cls(
        str(fields.get("message", "unknown error")),
        hint=fields.get("hint"),
        param=fields.get("param"),
        retry_after_s=fields.get("retry_after_s"),
        problems=tuple(fields.get("problems", ())),
    )
