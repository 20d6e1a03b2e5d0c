"""A chat template with an error is refused when the server starts, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond import wiring
from millpond.config import Config, ServerConfig
from millpond.errors import ConfigError
from millpond.models import ResolvedModel


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"one\n{% for message in messages %}", "line 2"), (b"\xff\xfe", "cannot read"), (None, "cannot read")],
)
def test_a_bad_template_file_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, said: str
):
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr("millpond.runtime.llamacpp.vocab.load_vocab", lambda path, environ: None)
    config = Config(server=ServerConfig(chat_template=str(path)))
    model = ResolvedModel("m", tmp_path / "m.gguf", "", "a test")
    with pytest.raises(ConfigError, match=said) as error:
        wiring.build_async_llm(config, config.engine, model)
    assert error.value.setting == "chat_template"
