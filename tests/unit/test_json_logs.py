"""One log record, one line of JSON, whatever is in it."""

from __future__ import annotations

import json
import logging
import sys

from millpond.telemetry.json_logs import JsonFormatter
from millpond.wiring import configure_logging


def record(message: str, *values: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("millpond.x", logging.WARNING, "x.py", 1, message, values, None)
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def test_a_record_is_one_line_with_its_fields():
    line = JsonFormatter().format(record('he said "%s"\nand left', "hi\u2028", request_id="r-1", fields={"tokens": 3}))
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed.pop("time").endswith("+00:00")
    assert parsed == {
        "level": "warning",
        "logger": "millpond.x",
        "message": 'he said "hi\u2028"\nand left',
        "request_id": "r-1",
        "tokens": 3,
    }


def test_a_traceback_is_a_field():
    try:
        raise ValueError("no")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    parsed = json.loads(JsonFormatter().format(made))
    assert parsed["exception"].startswith("Traceback") and parsed["exception"].endswith("ValueError: no")


def test_what_json_has_no_form_for_is_text():
    assert json.loads(JsonFormatter().format(record("x", fields={"path": object})))["path"].startswith("<class")


def test_the_format_is_the_setting_s():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure_logging("info", "json")
        assert [type(handler.formatter) for handler in root.handlers] == [JsonFormatter]
        configure_logging("info", "text")
        assert [type(handler.formatter) for handler in root.handlers] == [logging.Formatter]
    finally:
        root.handlers[:] = before
        root.setLevel(level)
