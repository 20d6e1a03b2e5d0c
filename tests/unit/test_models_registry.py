"""How a MODEL argument is read."""

from __future__ import annotations

import pytest

from millpond.config import DEFAULT_MODEL
from millpond.errors import ModelFileError
from millpond.models.registry import REGISTRY, HubFile, LocalFile, parse_model_name


def test_the_default_model_is_registered_with_a_full_checksum() -> None:
    model = REGISTRY[DEFAULT_MODEL]
    assert len(bytes.fromhex(model.sha256)) == 32
    assert model.source.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "==" in model.source.requirement


@pytest.mark.parametrize("name", ["./model.gguf", "/data/model.gguf", "model.gguf", "folder/model", "~/x.gguf"])
def test_paths(name: str) -> None:
    assert parse_model_name(name) == LocalFile(name)


def test_hub_files() -> None:
    assert parse_model_name("hf:org/repo/file.gguf") == HubFile("org/repo", "file.gguf")
    assert parse_model_name("hf:org/repo/sub/file.gguf") == HubFile("org/repo", "sub/file.gguf")


@pytest.mark.parametrize(
    "name", ["hf:", "hf:org/repo", "hf:org/file.gguf", "hf:org/repo/file.bin", "hf:../../x.gguf", "hf:a/b/../../c.gguf"]
)
def test_hub_names_that_cannot_be_are_refused_with_the_form(name: str) -> None:
    with pytest.raises(ModelFileError, match=r"hf:org/repo/file\.gguf"):
        parse_model_name(name)


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ModelFileError, match="did you mean smollm2-135m"):
        parse_model_name("smollm-135m")
    with pytest.raises(ModelFileError, match="known names: smollm2-135m"):
        parse_model_name("gpt")
