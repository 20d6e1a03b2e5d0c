"""docs/fake_runtime.md against the code: its examples run, its tables name every argument, action and op."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from millpond.errors import ConfigError
from millpond.runtime.fake import FakeRuntime
from millpond.runtime.faults import FaultPlan

PAGE = (Path(__file__).parents[2] / "docs" / "fake_runtime.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
OPS = ("decode", "save", "restore", "copy", "merge", "trim", "drop")
ACTIONS = re.findall(r"^\| `([a-z]+)` \| ([a-z, ]+) \| ", PAGE.split("## Planned faults")[1], re.MULTILINE)


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_the_examples_run(index: int) -> None:
    exec(compile(EXAMPLES[index], "docs/fake_runtime.md", "exec"), {})


def test_every_argument_is_documented() -> None:
    table = PAGE.split("| argument |")[1].split("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)`", table))
    arguments = set(inspect.signature(FakeRuntime).parameters) - {"params"}
    assert arguments <= named


@pytest.mark.parametrize("op", OPS)
def test_each_action_belongs_to_the_ops_that_the_table_says(op: str) -> None:
    assert len(ACTIONS) == 11
    for action, ops in ACTIONS:
        text = f"{op}@1={action}" + ("(0.5)" if action == "slow" else "")
        if ops == "every op" or op in ops.split(", "):
            assert FaultPlan.parse(text).faults[0].action == action
        else:
            with pytest.raises(ConfigError):
                FaultPlan.parse(text)
