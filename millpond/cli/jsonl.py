"""Lines of JSON to jobs, results to lines in the order of the input. Knows the two formats; no file, no model.

in   {"id": 7, "prompt": "..."} or {"id": 7, "messages": [...]}, with "params": {...} and "stop": [...] if wanted
out  {"id": 7, "text": "...", "finish_reason": "stop", "usage": {...}} or {"id": 7, "error": {"message": "..."}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from millpond.cli.sampling import params_of, stop_strings
from millpond.errors import CallerError, InvalidParameter
from millpond.outputs import TokenLogprobs
from millpond.sampling_params import SamplingParams
from millpond.text.inputs import ChatInput, PromptInput, TextInput, TokenInput

if TYPE_CHECKING:
    from millpond.llm import Completion, Job

_FIELDS = ("id", "prompt", "messages", "params", "stop")


def parse_line(text: str, base: SamplingParams, base_stop: tuple[str, ...]) -> tuple[object, Job | CallerError]:
    """(id, job) of one line; a line that is not valid gives its error. id None: the line has none."""
    from millpond.llm import Job

    try:
        line = json.loads(text)
    except ValueError as error:
        return None, InvalidParameter("line", f"not valid JSON: {error}")
    if not isinstance(line, dict):
        return None, InvalidParameter("line", 'must be an object like {"prompt": "..."}')
    record = cast("dict[str, Any]", line)
    name = record.get("id")
    try:
        _check_fields(record)
        params: object = record.get("params") or {}
        if not isinstance(params, dict):
            raise InvalidParameter("params", 'must be an object like {"max_tokens": 20}')
        stop = stop_strings(record["stop"]) if record.get("stop") is not None else base_stop
        return name, Job(_prompt(record), params_of(cast("dict[str, object]", params), base), stop)
    except CallerError as error:
        return name, error


def _check_fields(record: dict[str, Any]) -> None:
    unknown = [name for name in record if name not in _FIELDS]
    if unknown:
        raise InvalidParameter(unknown[0], f"is not a field of a line; they are {', '.join(_FIELDS)}")
    if ("prompt" in record) == ("messages" in record):
        raise InvalidParameter("prompt", 'a line has one of "prompt" and "messages"')


def _prompt(record: dict[str, Any]) -> PromptInput:
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list):
            raise InvalidParameter("messages", 'must be a list like [{"role": "user", "content": "..."}]')
        return ChatInput(cast("list[dict[str, Any]]", messages))
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return TextInput(prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in cast("list[object]", prompt)):
        return TokenInput(cast("list[int]", prompt))
    raise InvalidParameter("prompt", "must be text or a list of token ids")


def result_record(result: Completion | CallerError, piece: Callable[[int], bytes]) -> dict[str, Any]:
    """What a result is on its line, without the id."""
    if isinstance(result, CallerError):
        return {"error": {"message": str(result), "param": result.param, "code": result.code}}
    usage = result.usage
    record: dict[str, Any] = {
        "text": result.text,
        "finish_reason": result.finish_reason.value,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": len(result.token_ids),
            "cached_tokens": usage.cached_tokens,
        },
    }
    if result.reasoning:
        record["reasoning"] = result.reasoning
    if result.logprobs:
        pairs = zip(result.token_ids, result.logprobs, strict=True)
        record["logprobs"] = [_logprobs(token, entry, piece) for token, entry in pairs]
    if not result.finish_reason.is_asked_for:
        record["error"] = {"message": result.message or f"the output ended by {result.finish_reason.value}"}
    return record


def _logprobs(token: int, entry: TokenLogprobs, piece: Callable[[int], bytes]) -> dict[str, Any]:
    def named(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": piece(token_id).decode("utf-8", "replace"), "id": token_id, "logprob": logprob}

    return named(token, entry.chosen) | {"top": [named(*alternative) for alternative in entry.top]}


class OrderedLines:
    """Reads lines into jobs as they are asked for and writes each result once all before it are written."""

    def __init__(
        self,
        lines: Iterable[str],
        base: SamplingParams,
        stop: tuple[str, ...],
        write: Callable[[str], None],
        piece: Callable[[int], bytes],
    ) -> None:
        self._lines = lines
        self._base = base
        self._stop = stop
        self._write = write
        self._piece = piece
        self._ids: list[object] = []
        """By line; the ids of written ones are let go."""
        self._line_of_job: dict[int, int] = {}
        self._ready: dict[int, dict[str, Any]] = {}
        self._written = 0
        self.done = 0
        self.failed = 0
        self.tokens = 0

    def jobs(self) -> Iterator[Job]:
        count = 0
        for text in self._lines:
            if not text.strip():
                continue
            line = len(self._ids)
            name, job = parse_line(text, self._base, self._stop)
            self._ids.append(line + 1 if name is None else name)
            if isinstance(job, CallerError):
                self._settle(line, job)
            else:
                self._line_of_job[count] = line
                count += 1
                yield job

    def take(self, place: int, result: Completion | CallerError) -> None:
        """The result of the job at `place` among those handed out."""
        self._settle(self._line_of_job.pop(place), result)

    def _settle(self, line: int, result: Completion | CallerError) -> None:
        record = result_record(result, self._piece)
        self.done += 1
        self.failed += "error" in record
        self.tokens += record.get("usage", {}).get("completion_tokens", 0)
        self._ready[line] = {"id": self._ids[line], **record}
        while (ready := self._ready.pop(self._written, None)) is not None:
            self._ids[self._written] = None
            self._written += 1
            self._write(json.dumps(ready, ensure_ascii=False) + "\n")
