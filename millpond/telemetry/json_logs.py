"""Log lines as JSON objects, one a line. Knows log records; never looks at prompts or outputs.

Fields: time (UTC, ISO 8601), level, logger, message; request_id and the record's own `fields` where it has them, and
the traceback as `exception`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import msgspec


class JsonFormatter(logging.Formatter):
    """`extra={"request_id": ..., "fields": {...}}` of a log call become members of the object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            line["request_id"] = str(request_id)
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            line.update(cast("Mapping[str, Any]", fields))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()
