"""The documentation says what the code does: settings, the README's tree, its links, commands and flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from millpond.cli.main import build_app
from millpond.cli.reference import configuration_page
from millpond.cli.settings import public_settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_SOURCE = {"build", "dist", "htmlcov", "node_modules", "results", "__pycache__"}
TREE_LINE = re.compile(r"^(?P<indent> *)(?P<name>[\w./-]+)/ +(?P<about>\S.*)$")


def test_the_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == configuration_page(), "run: make docs"


def test_every_setting_is_in_the_configuration_page() -> None:
    page = configuration_page()
    for setting in public_settings():
        assert f"| `{setting.name}` |" in page
        assert setting.group is None or f"`{setting.flag}`" in page
        assert setting.help in page


def tree_lines() -> dict[str, str]:
    """Folder -> description, from the block below the README's heading."""
    block = README.split("## The tree")[1].split("```")[1]
    folders: dict[str, str] = {}
    parents: list[str] = []
    for line in block.strip("\n").splitlines():
        match = TREE_LINE.match(line)
        assert match, f"not a line of the tree: {line!r}"
        depth = len(match["indent"]) // 2
        parents = [*parents[:depth], match["name"]]
        folders["/".join(parents)] = match["about"]
    return folders


def source_folders() -> set[str]:
    """Folders at the root and packages right below millpond/, as far as they hold files."""
    candidates = [path for parent in (ROOT, ROOT / "millpond") for path in parent.iterdir() if path.is_dir()]
    return {
        path.relative_to(ROOT).as_posix()
        for path in candidates
        if not path.name.startswith(".") and path.name not in NOT_SOURCE and _holds_files(path)
    }


def _holds_files(folder: Path) -> bool:
    return any(path.is_file() and "__pycache__" not in path.parts for path in folder.rglob("*"))


def test_the_tree_of_the_readme_is_the_tree() -> None:
    assert set(tree_lines()) == source_folders()


def test_a_missing_folder_would_be_noticed() -> None:
    assert {"millpond/models", "tests", "docs"} <= source_folders()
    assert "millpond/__pycache__" not in source_folders()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    used = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"serve", "test", "check"} <= used
    assert used <= targets


def test_flags_and_commands_of_the_readme_exist() -> None:
    commands, flags = _command_line()
    used_flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    used_commands = set(re.findall(r"bin/millpond ([a-z]+)", README))
    assert used_flags
    assert used_flags <= flags
    assert used_commands <= commands


def _command_line() -> tuple[set[str], set[str]]:
    """Names of the commands, and every flag of any of them."""
    commands: set[str] = set()
    flags = {"--help"}
    waiting = [typer.main.get_command(build_app())]
    while waiting:
        command = waiting.pop()
        flags.update(flag for parameter in command.params for flag in [*parameter.opts, *parameter.secondary_opts])
        for name, inner in getattr(command, "commands", {}).items():
            commands.add(name)
            waiting.append(inner)
    return commands, flags
