"""`millpond generate` over a fake engine: where prompts come from, JSON lines in order, what fails and how it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_local_engine import fake_local_engine, fake_runtime
from typer.testing import CliRunner, Result

import millpond.llm
from millpond.cli.main import build_app
from millpond.config import Config
from millpond.llm import LLM
from millpond.sampling_params import SamplingParams

FLAGS = ("--temperature", "0", "--ignore-eos", "--max-tokens", "10")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that engines were asked for; each is a fake one."""
    asked: list[Config] = []

    def load_engine(config: Config) -> Any:
        asked.append(config)
        return fake_local_engine(fake_runtime(), max_running=3, max_model_len=400)

    monkeypatch.setattr(millpond.llm, "load_engine", load_engine)
    monkeypatch.chdir(tmp_path)
    return asked


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(build_app(), ["generate", *arguments], input=stdin)


def raw(prompt: str) -> str:
    return LLM(engine=fake_local_engine(fake_runtime())).generate(prompt, GREEDY)[0].text


def answer(prompt: str, system: str | None = None) -> str:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return LLM(engine=fake_local_engine(fake_runtime())).chat(messages, GREEDY)[0].text


def test_a_prompt_is_answered_and_stdout_is_the_output_alone(configs: list[Config]) -> None:
    result = run("the duck", *FLAGS, "--model", "some-model", "--kv-cells", "99")
    assert (result.exit_code, result.stdout) == (0, answer("the duck") + "\n")
    assert (configs[0].model, configs[0].engine.kv_cells) == ("some-model", 99)


def test_raw_continues_and_system_is_a_message(configs: list[Config]) -> None:
    assert run("the duck", "--raw", *FLAGS).stdout == raw("the duck") + "\n"
    assert run("the duck", "-s", "be a pond", *FLAGS).stdout == answer("the duck", "be a pond") + "\n"
    refused = run("the duck", "--raw", "-s", "be a pond", *FLAGS)
    assert (refused.exit_code, "leave out --system" in refused.stderr) == (1, True)


def test_the_prompt_can_come_from_a_file_or_stdin(configs: list[Config], tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("the duck", encoding="utf-8")
    wanted = raw("the duck") + "\n"
    assert run("--raw", "--file", "prompt.txt", *FLAGS).stdout == wanted
    assert run("--raw", *FLAGS, stdin="the duck").stdout == wanted
    assert run("-", "--raw", *FLAGS, stdin="the duck").stdout == wanted
    assert run("--raw", "--file", "-", *FLAGS, stdin="the duck").stdout == wanted


def test_output_goes_to_a_file(configs: list[Config], tmp_path: Path) -> None:
    result = run("the duck", "--raw", *FLAGS, "-o", "out.txt")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (tmp_path / "out.txt").read_text() == raw("the duck") + "\n"


def test_a_schema_a_grammar_or_a_regex_constrains_the_output(configs: list[Config], tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": [true, null]}', encoding="utf-8")
    (tmp_path / "gbnf.txt").write_text('root ::= "duck" [0-9]', encoding="utf-8")
    found = [
        run("the duck", "--max-tokens", "20", *flags).stdout.strip()
        for flags in (["--json-schema", "schema.json"], ["--grammar", "gbnf.txt"], ["--regex", "[a-c]{3}"])
    ]
    assert found[0] in ("true", "null") and re.fullmatch(r"duck\d", found[1]) and re.fullmatch("[a-c]{3}", found[2])
    both = run("the duck", "--regex", "a", "--grammar", "gbnf.txt")
    assert both.exit_code == 1 and "cannot be used with" in both.stderr
    missing = run("the duck", "--json-schema", "nope.json")
    assert missing.exit_code == 1 and "nope.json" in missing.stderr
    (tmp_path / "bad.json").write_text('{"type": "string", "pattern": "(?<=x)a"}', encoding="utf-8")
    refused = run("the duck", "--json-schema", "bad.json")
    assert refused.exit_code == 1 and "look-around" in refused.stderr


def test_json_has_usage(configs: list[Config]) -> None:
    record = json.loads(run("the duck", "--raw", "--json", *FLAGS, "--logprobs", "1").stdout)
    assert record["text"] == raw("the duck")
    assert record["finish_reason"] == "length"
    assert record["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "cached_tokens": 0}
    assert len(record["logprobs"]) == 10
    assert record["logprobs"][0]["id"] == record["logprobs"][0]["top"][0]["id"]


def write_lines(path: Path, lines: list[Any]) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n\n", encoding="utf-8")


def test_lines_are_answered_in_order(configs: list[Config], tmp_path: Path) -> None:
    lines: list[Any] = [{"prompt": f"duck {n}", "id": f"n{n}", "params": {"max_tokens": 40 - n}} for n in range(30)]
    lines[7]["stop"] = "e"
    lines.append({"messages": [{"role": "user", "content": "the duck"}]})
    write_lines(tmp_path / "in.jsonl", lines)
    result = run("--jsonl", "in.jsonl", *FLAGS)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 0, result.output
    assert [record["id"] for record in records] == [*(f"n{n}" for n in range(30)), 31]
    lengths = [record["usage"]["completion_tokens"] for record in records if record["id"] != "n7"]
    assert lengths == [*(40 - n for n in range(30) if n != 7), 10]
    assert records[3]["text"].startswith(raw("duck 3"))
    assert (records[7]["finish_reason"], "e" in records[7]["text"]) == ("stop", False)
    assert records[30]["text"] == answer("the duck")
    assert "31 prompts" in result.stderr
    assert "0 failed" in result.stderr


def test_a_wrong_line_fails_alone_and_the_exit_code_says_so(configs: list[Config], tmp_path: Path) -> None:
    lines: list[Any] = [
        {"prompt": "the duck", "id": 5},
        "{not json",
        {"prompt": ""},
        {"prompt": "a", "messages": []},
        {"prompt": "the duck", "params": {"max_token": 3}, "id": "x"},
        {"prompt": "the duck " * 200},
        {"prompt": [1, 2, 99999]},
        {"prompt": "the pond"},
        '["a"]',
    ]
    write_lines(tmp_path / "in.jsonl", lines)
    result = run("--jsonl", "in.jsonl", *FLAGS)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    assert [record["id"] for record in records] == [5, 2, 3, 4, "x", 6, 7, 8, 9]
    assert [place for place, record in enumerate(records) if "error" not in record] == [0, 7]
    assert records[0]["text"] == raw("the duck")
    assert records[4]["error"]["message"] == "max_token: is not a sampling parameter; did you mean max_tokens?"
    assert records[5]["error"]["code"] == "context_length_exceeded"
    assert "9 prompts, 20 tokens, 7 failed" in result.stderr


def test_lines_can_be_piped(configs: list[Config]) -> None:
    result = run("--jsonl", "-", *FLAGS, stdin='{"prompt": "the duck"}\n')
    assert json.loads(result.stdout)["text"] == raw("the duck")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--file", "y"], "error: prompt: give PROMPT or --file, not both"),
        (["--file", "no.txt"], "error: file: cannot read no.txt: "),
        (["--jsonl", "no.jsonl"], "error: jsonl: cannot read no.jsonl: "),
        (["x", "--jsonl", "y"], "error: jsonl: cannot be used with PROMPT"),
        (["x", "-o", "no/such/folder"], "error: output: cannot write no/such/folder: No such file"),
        (["x", "--top-p", "7"], "error: top_p: must be between 0.0 and 1.0, got 7.0"),
        (["x", "--stop", ""], "error: stop: "),
        (["", "--raw"], "error: prompt: must not be empty"),
    ],
)
def test_an_error_is_one_line(configs: list[Config], arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(words)
    assert len(result.stderr.splitlines()) == 1
