"""Answers from a server with the OpenAI API, over the standard library's HTTP client. Knows its wire format only."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from millpond.cli.chat_session import Message, Show
from millpond.cli.sampling import changed_values
from millpond.errors import CallerError, CapacityError, ConfigError, InternalError, InvalidParameter, SetupError
from millpond.sampling_params import GrammarKind, GrammarSpec, SamplingParams

_CONNECT_SECONDS = 10.0
_READ_SECONDS = 600.0
"""Between two bytes: other servers than ours say nothing while a prompt is read."""
_NOT_ON_THE_WIRE = ("penalty_window", "logprobs")
_MAX_ERROR_BYTES = 65536

Json = dict[str, Any]


class RemoteBackend:
    """`url` with or without /v1. `model`: the name to ask for; None: the first that the server lists."""

    def __init__(self, url: str, api_key: str = "", model: str | None = None) -> None:
        """Raises ConfigError for a wrong URL, SetupError when nobody answers there, CallerError for a wrong key."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme not in ("http", "https") or not parts.hostname or (port is None and _names_port(parts.netloc)):
            raise ConfigError("url", f"{url!r} is not a server's address, like http://127.0.0.1:8000")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._url = url
        self._key = api_key
        self.model = model or self._first_model()

    def answer(
        self, messages: list[Message], params: SamplingParams, stop: tuple[str, ...], show: Show, think: Show
    ) -> str:
        """See Backend. Raises CallerError, CapacityError or InternalError as the server says."""
        body: Json = {"model": self.model, "messages": messages, "stream": True, **wire_params(params)}
        if stop:
            body["stop"] = list(stop)
        with self._response("POST", "/chat/completions", body) as response:
            return _read_answer(_events(response), show, think)

    def _first_model(self) -> str:
        with self._response("GET", "/models") as response:
            listed: Any = _parsed(response.read())
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise SetupError(f"{self._url} lists no model; is it a server with the OpenAI API?") from None

    @contextmanager
    def _response(self, method: str, path: str, body: Json | None = None) -> Generator[http.client.HTTPResponse]:
        """The connection ends with the block: an answer that is left early is cancelled by the server."""
        connection = self._connect()
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, content, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise InternalError(f"lost the connection to {self._url}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=_CONNECT_SECONDS, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise SetupError(
                f"cannot reach {self._url}: {error.strerror or error}; start a server with: millpond serve, "
                "or leave out --url"
            ) from error
        connection.sock.settimeout(_READ_SECONDS)
        return connection


def _names_port(netloc: str) -> bool:
    return netloc.rpartition("]")[2].rpartition("@")[2].count(":") > 0


def wire_params(params: SamplingParams) -> Json:
    """The fields that differ from the defaults: another server keeps its own for the rest."""
    changed = changed_values(params)
    for name in _NOT_ON_THE_WIRE:
        if name in changed:
            raise InvalidParameter(name, "cannot be sent to a server; set it back, or chat without --url")
    return changed | ({} if params.grammar is None else _wire_grammar(params.grammar))


def _wire_grammar(spec: GrammarSpec) -> Json:
    """A schema under OpenAI's name, the others under ours."""
    if spec.kind is not GrammarKind.JSON_SCHEMA:
        return {spec.kind.value: spec.text}
    try:
        schema = json.loads(spec.text)
    except ValueError as error:
        raise InvalidParameter(spec.param, f"not valid JSON: {error}") from None
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _refusal(response: http.client.HTTPResponse) -> CallerError | CapacityError | InternalError:
    body = response.read(_MAX_ERROR_BYTES)
    message, code = _error_of(_parsed(body))
    status = response.status
    text = message or f"the server answered {status} {response.reason}"
    if status in (429, 503):
        wait = response.headers.get("Retry-After", "")
        seconds = int(wait) if wait.isdigit() else 1
        return CapacityError(f"{text}; try again in {seconds} s", retry_after=seconds)
    if status == 401:
        return CallerError(f"{text} (--api-key, or MILLPOND_API_KEY in the environment)", code="invalid_api_key")
    if 400 <= status < 500:
        return CallerError(text, code=code or "invalid_value")
    return InternalError(text)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _error_of(body: Any) -> tuple[str | None, str | None]:
    """(message, code) of an OpenAI error object."""
    if not isinstance(body, dict):
        return None, None
    error = cast(Json, body).get("error")
    if not isinstance(error, dict):
        return (str(error), None) if error else (None, None)
    fields = cast(Json, error)
    return fields.get("message"), fields.get("code")


def _events(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each server-sent event; those of this API have one line."""
    for line in lines:
        name, _, value = line.decode("utf-8", "replace").strip().partition(":")
        if name == "data":
            yield value.strip()


def _read_answer(events: Iterator[str], show: Show, think: Show) -> str:
    reason: str | None = None
    for data in events:
        if data == "[DONE]":
            return reason or "stop"
        chunk = _parsed(data.encode())
        message, _ = _error_of(chunk)
        if message is not None:
            raise InternalError(message)
        choices: list[Json] = cast(Json, chunk or {}).get("choices") or []
        for choice in choices:
            delta: Json = choice.get("delta") or {}
            # vLLM's name of the field is the shorter one.
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if thought:
                think(thought)
            if delta.get("content"):
                show(delta["content"])
            reason = choice.get("finish_reason") or reason
    raise InternalError("the server's answer ended too early")
