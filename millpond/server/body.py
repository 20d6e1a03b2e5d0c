"""Bytes of a request body to a checked wire type. Knows JSON and pydantic; no route and no engine.

Every refusal is a CallerError that names the field. Nothing a client can send raises anything else.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from millpond.errors import CallerError, ContextLengthExceeded, InvalidParameter
from millpond.sampling_params import MAX_LOGIT_BIAS_ENTRIES
from millpond.server.limits import MAX_JSON_VALUES
from millpond.server.schemas.generation import WireModel

Model = TypeVar("Model", bound=WireModel)

_decoder = msgspec.json.Decoder()


def decode_object(body: bytes, *, max_items: int | None = None) -> dict[str, Any]:
    """Strict JSON: UTF-8 without BOM, no NaN, no lone surrogates. Raises CallerError unless it is one object, or when
    it holds far more values than a prompt of `max_items` tokens needs (counted by bytes, before anything is built).
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES + 2 * (max_items or 0):
        raise CallerError("the request body holds too many values", code="invalid_json")
    if not body.strip():
        raise CallerError("the request body is empty; a JSON object is needed", code="invalid_json")
    try:
        value = _decoder.decode(body)
    except RecursionError:
        raise CallerError("the request body is nested too deeply", code="invalid_json") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise CallerError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise CallerError("the request body must be a JSON object", code="invalid_json")
    return cast(dict[str, Any], value)


def validate(model: type[Model], value: dict[str, Any], *, max_items: int | None = None) -> Model:
    """`max_items`: lists that cost tokens and are longer than this cannot fit, and are refused unread.

    Raises InvalidParameter, and ContextLengthExceeded for such a list.
    """
    _refuse_huge(value, max_items)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _invalid(value, error.errors(include_url=False, include_context=False, include_input=False)) from None
    except RecursionError:
        raise CallerError("the request body is nested too deeply", code="invalid_json") from None


def _refuse_huge(value: dict[str, Any], max_items: int | None) -> None:
    bias = value.get("logit_bias")
    if isinstance(bias, dict) and len(cast(dict[str, Any], bias)) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidParameter("logit_bias", f"at most {MAX_LOGIT_BIAS_ENTRIES} entries")
    messages = value.get("messages")
    if max_items is None or not isinstance(messages, list):
        return
    items = cast(list[Any], messages)
    if len(items) > max_items or sum(_part_count(item) for item in items) > max_items:
        raise ContextLengthExceeded(None, max_items)


def _part_count(message: Any) -> int:
    content = cast(dict[str, Any], message).get("content") if isinstance(message, dict) else None
    return len(cast(list[Any], content)) if isinstance(content, list) else 1


def _invalid(value: dict[str, Any], errors: list[ErrorDetails]) -> InvalidParameter:
    """The first wrong field. Where a union has several opinions, that of the member that got furthest into the value,
    with every reason given for that place."""
    paths = [_field_path(value, error) for error in errors]
    chosen = max((path for path in paths if path.startswith(paths[0])), key=len)
    reasons = dict.fromkeys(_reason(error) for error, path in zip(errors, paths, strict=True) if path == chosen)
    return InvalidParameter(chosen, "; or ".join(reasons))


def _reason(error: ErrorDetails) -> str:
    return "is required" if error["type"] == "missing" else error["msg"][:1].lower() + error["msg"][1:]


def _field_path(value: dict[str, Any], error: ErrorDetails) -> str:
    """`messages[0].role`: the part of pydantic's location that exists in the body (it also names union members)."""
    here: Any = value
    path = ""
    for step in error["loc"]:
        if isinstance(here, dict) and step in here:
            here = cast(dict[Any, Any], here)[step]
            path += f".{step}" if path else str(step)
        elif isinstance(here, list) and isinstance(step, int) and step < len(cast(list[Any], here)):
            here = cast(list[Any], here)[step]
            path += f"[{step}]"
    if error["type"] == "missing":
        path += f".{error['loc'][-1]}" if path else str(error["loc"][-1])
    return path[:200] or "body"
