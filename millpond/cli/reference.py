"""Writes what can be set: the commented sample file and the table of docs/configuration.md. Reads no configuration."""

from __future__ import annotations

import json

from millpond.cli.options import metavar
from millpond.cli.settings import AUTO, DEFAULT_FILE, PREFIX, Setting, public_settings, shown_value

_HEADINGS = {None: "Model", "engine": "Engine", "queue": "Queue", "server": "Server"}
_OTHER = {
    f"{PREFIX}CONFIG": f"the TOML file to read, instead of `./{DEFAULT_FILE}`",
    f"{PREFIX}HOME": "folder for pulled models and checksums, instead of the platform's cache folder",
    f"{PREFIX}LIBLLAMA": "another build of llama.cpp's library, instead of the one installed with millpond",
    f"{PREFIX}TEST_MODEL": "the model file that the test suite uses, instead of the pulled default",
}

_INTRO = f"""# Configuration

Generated from the fields of `millpond/config.py` by `make docs`; a test holds it up to date. Do not edit it here.

Every setting has one name. `kv_cells` is `kv_cells` in the TOML file, `{PREFIX}KV_CELLS` in the environment and
`--kv-cells` on the command line. A later source wins: defaults, then the TOML file (`--config FILE`, else
`{PREFIX}CONFIG`, else `./{DEFAULT_FILE}` if there is one), then the environment, then flags. A name that does not
exist is an error, in the file and in the environment alike.

`{AUTO}` is resolved at start and printed. On and off are `true` and `false` in the file and the environment,
`--name` and `--no-name` as flags. `millpond serve --sample-config > {DEFAULT_FILE}` writes a file with every setting,
commented out; `millpond serve --show-config` prints the values that all sources together give, secrets hidden.
"""


def sample_config() -> str:
    """A TOML file that sets nothing: every setting, its help and its default, commented out."""
    lines = [f"# Millpond settings. Uncomment what you change; `{AUTO}` lets millpond choose."]
    for group, title in _HEADINGS.items():
        lines += ["", f"# ---- {title} ----"]
        for setting in _of_group(group):
            lines += ["", f"# {setting.help} ({metavar(setting)})", f"#{setting.name} = {_toml(setting)}"]
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    """docs/configuration.md."""
    parts = [_INTRO]
    for group, title in _HEADINGS.items():
        rows = "\n".join(_row(setting) for setting in _of_group(group))
        parts.append(f"## {title}\n\n| setting | flag | value | default | meaning |\n|---|---|---|---|---|\n{rows}\n")
    rows = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in _OTHER.items())
    parts.append(f"## Other variables\n\n| variable | meaning |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def _of_group(group: str | None) -> list[Setting]:
    return [setting for setting in public_settings() if setting.group == group]


def _row(setting: Setting) -> str:
    flag = "argument `MODEL`" if setting.group is None else f"`{setting.flag}`"
    if setting.kind is bool:
        flag = f"`{setting.flag}`, `--no-{setting.flag[2:]}`"
    default = shown_value(setting, setting.default)
    shown = f"`{default}`" if default else "none"
    value = metavar(setting).replace("|", " \\| ")
    return f"| `{setting.name}` | {flag} | {value} | {shown} | {setting.help} |"


def _toml(setting: Setting) -> str:
    if isinstance(setting.default, str):
        return json.dumps(setting.default)
    text = shown_value(setting, setting.default)
    return json.dumps(text) if setting.default is None else text
