"""`millpond generate` and `millpond chat` as a user starts them, on the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]


def millpond(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millpond", *arguments]
    environment = {**os.environ, "MILLPOND_CONFIG": os.devnull}
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=200, check=False, env=environment
    )


def test_generate_answers_lines_in_one_batch(smollm2_path: Path) -> None:
    lines = [
        {"prompt": "The capital of France is", "id": "raw"},
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "id": "chat"},
        {"prompt": ""},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    flags = ("--model", str(smollm2_path), "--temperature", "0", "--max-tokens", "12")
    done = millpond("generate", "--jsonl", "-", *flags, stdin=text)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert [record["id"] for record in records] == ["raw", "chat", 3]
    assert "Paris" in records[0]["text"]
    assert records[1]["text"].strip()
    assert records[1]["usage"]["prompt_tokens"] > 20, "the template was rendered around the question"
    assert records[2]["error"]["message"] == "prompt: must not be empty"


def test_chat_answers_what_is_piped_in(smollm2_path: Path) -> None:
    flags = ("--model", str(smollm2_path), "--temperature", "0", "--max-tokens", "30")
    first = "Write one sentence about ducks."
    done = millpond("chat", *flags, stdin=f"{first}\n/clear\n{first}\n/exit\n")
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) % 2 == 0
    assert answers[: len(answers) // 2] == answers[len(answers) // 2 :], "after /clear nothing of before is left"
    assert len(done.stdout.split()) > 10
