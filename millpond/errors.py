"""Every error Millpond raises. Knows no package; the HTTP code is decided from the three families here.

MillpondError
  CallerError            the caller's fault: 4xx
    InvalidParameter       a field is wrong; carries its name
    ContextLengthExceeded  prompt does not fit; carries both numbers
    NeverFits              could never run here, even alone
    TemplateError          the chat template refused the messages
    GrammarFailed          an accepted grammar, or bans, leave no way to go on; ends that output alone
    UnknownModel           404
    PayloadTooLarge        413
  CapacityError          no capacity now: 429 or 503, with retry_after seconds
    QueueFull              429
    NotReady               503: loading, restarting or draining
  InternalError          ours: 5xx
    EngineFailed           the engine process is gone and could not be brought back
    RuntimeFailure         llama.cpp said no
      KVExhausted            no cell free for the batch; nothing changed; the scheduler preempts
      InvalidBatch           refused before the library saw it; a bug of ours
      DecodeFailed           some rows may be in; trim or recompute the batch's sequences
      StateRejected          saved bytes were not taken; the slot is empty
  SetupError             at start: printed as one line, exit code 1
    LibraryMismatch        the libllama found is not the build we declare
    ModelFileError         missing, truncated, wrong checksum, not a GGUF
    ConfigError            a setting is wrong; carries its name
"""

from __future__ import annotations


class MillpondError(Exception):
    """Root of the tree; `str(error)` is fit to be shown to the caller."""


class CallerError(MillpondError):
    """The caller's fault. `param` names the request field, `code` is the OpenAI error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidParameter(CallerError):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)


class ContextLengthExceeded(CallerError):
    def __init__(self, prompt_tokens: int | None, limit: int, *, detail: str = "", param: str = "messages") -> None:
        asked = f"{prompt_tokens} tokens" if prompt_tokens is not None else "more tokens than could fit"
        super().__init__(
            f"the prompt has {asked}; this model takes at most {limit} tokens (prompt and output together){detail}",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class NeverFits(CallerError):
    def __init__(self, needed_cells: int, pool_cells: int) -> None:
        super().__init__(
            f"the request needs {needed_cells} KV cells; the pool has {pool_cells}. "
            "Shorten the prompt, or start the server with more --kv-cells",
            code="context_length_exceeded",
        )
        self.needed_cells = needed_cells
        self.pool_cells = pool_cells


class TemplateError(CallerError):
    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages")


class GrammarFailed(CallerError):
    """`reason`: the message without its beginning."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"what this request demands of its output cannot be followed: {reason}", code="grammar_failed")
        self.reason = reason


class UnknownModel(CallerError):
    def __init__(self, name: str, served: str) -> None:
        super().__init__(
            f"the model {name!r} does not exist; this server has {served!r}", param="model", code="model_not_found"
        )


class PayloadTooLarge(CallerError):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request body is larger than {limit_bytes} bytes", code="payload_too_large")


class CapacityError(MillpondError):
    """No capacity now. `retry_after` is in whole seconds, at least 1."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = max(1, retry_after)


class QueueFull(CapacityError):
    pass


class NotReady(CapacityError):
    pass


class InternalError(MillpondError):
    pass


class EngineFailed(InternalError):
    pass


class RuntimeFailure(InternalError):
    pass


class KVExhausted(RuntimeFailure):
    pass


class InvalidBatch(RuntimeFailure):
    pass


class DecodeFailed(RuntimeFailure):
    def __init__(self, message: str, *, return_code: int) -> None:
        super().__init__(message)
        self.return_code = return_code


class StateRejected(RuntimeFailure):
    pass


class SetupError(MillpondError):
    pass


class LibraryMismatch(SetupError):
    pass


class ModelFileError(SetupError):
    pass


class ConfigError(SetupError):
    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting}: {message}")
        self.setting = setting
