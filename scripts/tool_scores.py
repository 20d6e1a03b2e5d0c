"""Replays canitoolcall's recorded model outputs through our parsers and counts the verdicts of its checks.

python scripts/tool_scores.py         writes the table in docs/tools.md
python scripts/tool_scores.py FAMILY  prints what fails in one family; with --served, its cut calls too

Texts are cut the way its strategies say, with markers whole and
everything else by letters, which is finer than any tokenizer.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParseResult, Status, StreamAccumulator

from millpond.text.channels import ChannelDelta, ChannelPlan, MarkerTokens
from millpond.text.tool_formats.base import ThinkTags, ToolSet, Turn
from millpond.text.tool_formats.registry import FORMATS

_THINK = ThinkTags("<think>", "</think>")
_SQUARE_THINK = ThinkTags("[THINK]", "[/THINK]")
_DIALECTS: Mapping[str, tuple[str, ThinkTags | None]] = {
    "qwen3-hybrid": ("hermes", _THINK),
    "qwen3-thinking-2507": ("hermes", _THINK),
    "qwen3-instruct-2507": ("hermes", None),
    "qwen3.8": ("qwen3_coder", _THINK),
    "qwen3.6": ("qwen3_coder", _THINK),
    "qwen3.5": ("qwen3_coder", _THINK),
    "qwen3-coder": ("qwen3_coder", None),
    "qwen3-coder-next": ("qwen3_coder", None),
    "llama3-json": ("llama3", None),
    "llama4-pythonic": ("pythonic", None),
    "v13-think": ("mistral", _SQUARE_THINK),
    "v13plus-think": ("mistral", _SQUARE_THINK),
    "v13": ("mistral", None),
    "devstral-2507": ("mistral", None),
    "v11": ("mistral", None),
    "v11-think-text": ("mistral", _THINK),
    "v3": ("mistral", None),
    "gemma4": ("gemma4", None),
    "gpt-oss": ("harmony", None),
    "glm45-newline": ("glm", _THINK),
    "glm47-compact": ("glm", _THINK),
    "glm53-compact": ("glm", _THINK),
    "kimi-k2-thinking": ("kimi_k2", _THINK),
    "kimi-k2-instruct": ("kimi_k2", None),
    "kimi-k3-xtml": ("kimi_k3", None),
    "deepseek-v3": ("deepseek", None),
    "deepseek-v31": ("deepseek", _THINK),
    "deepseek-v32": ("deepseek_dsml", _THINK),
    "deepseek-v4": ("deepseek_dsml", _THINK),
    "deepseek-v41": ("deepseek_dsml", _THINK),
}
"""Format and tags by the suite's name of a reference model's variant."""
STRATEGIES = ("one", "letters", "special", "rand:1:8", "rand:2:8", "rand:3:8")


@dataclass(frozen=True, slots=True)
class Verdict:
    fixture: Fixture
    status: Status | None
    """None: no parser is registered for the model."""
    details: tuple[str, ...]
    """What failed."""
    is_cut_call: bool
    """The objection is that a call which a limit cut was handed out as far as it came."""


@dataclass(frozen=True, slots=True)
class Mode:
    whole_calls: bool = False
    """`--cut-tool-calls drop`."""
    tell_limits: bool = False
    """Recordings tagged as cut by a limit end by one, as a server would see it; else every text ends by itself."""


READ, SERVED, STRICT = MODES = (Mode(), Mode(tell_limits=True), Mode(whole_calls=True, tell_limits=True))


def score(mode: Mode) -> Iterator[Verdict]:
    """Every fixture in the package's order."""
    families = load_families()
    for fixture in load_fixtures(None):
        yield judge(fixture, families[fixture.family], mode)


def judge(fixture: Fixture, family: Family, mode: Mode) -> Verdict:
    plan = plan_of(fixture, family, whole_calls=mode.whole_calls)
    if plan is None:
        return Verdict(fixture, None, (), False)
    was_cut = mode.tell_limits and "truncated" in fixture.tags
    streams = {name: replay(plan, cut(fixture, family, name), was_cut=was_cut) for name in STRATEGIES}
    observation = Observation(replay(plan, [fixture.raw_output], was_cut=was_cut), streams)
    rows = run_checks(fixture, family, observation)
    failed = [row for row in rows if row.status in (Status.FAIL, Status.ERROR)]
    details = tuple(dict.fromkeys(f"{row.check}: {row.detail}" for row in failed))
    is_cut_call = bool(failed) and was_cut and _is_one_call_more(fixture, observation.nonstream)
    return Verdict(fixture, case_status(rows), details, is_cut_call)


def plan_of(fixture: Fixture, family: Family, *, whole_calls: bool) -> ChannelPlan | None:
    reference = next((r for r in family.reference_models if r.repo == fixture.models[0]), None)
    dialect = _DIALECTS.get(reference.variant or "") if reference else None
    if reference is None or dialect is None:
        return None
    form = FORMATS[dialect[0]]
    think = form.think or dialect[1]
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = reference.default_generation_prompt or ""
    turn = Turn(ToolSet.of(fixture.tools), think, think is not None and form.opens_thinking(prompt, think))
    return ChannelPlan(form, turn, MarkerTokens.none(), whole_calls=whole_calls)


def replay(plan: ChannelPlan, pieces: Sequence[str], *, was_cut: bool = False) -> ParseResult:
    machine = plan.machine("fixture", 0)
    client = StreamAccumulator()
    for piece in pieces:
        _accumulate(client, machine.feed(piece))
    _accumulate(client, machine.finish(was_cut=was_cut))
    return client.result()


def _accumulate(client: StreamAccumulator, delta: ChannelDelta) -> None:
    client.add_content(delta.content)
    client.add_reasoning(delta.reasoning)
    for call in delta.tool_calls:
        client.add_tool_call(call.index, call.name, call.arguments)


def cut(fixture: Fixture, family: Family, strategy: str) -> list[str]:
    """The output in pieces."""
    if strategy == "one":
        return [fixture.raw_output]
    markers = "|".join(re.escape(marker) for marker in sorted(family.markers, key=len, reverse=True))
    units = [unit for unit in re.split(f"({markers})", fixture.raw_output) if unit]
    if strategy == "special":
        return units
    if strategy == "letters":
        return list(fixture.raw_output)
    _, seed, largest = strategy.split(":")
    generator = random.Random(int(seed))
    letters = [piece for unit in units for piece in ([unit] if unit in family.markers else unit)]
    pieces: list[str] = []
    while letters:
        size = generator.randint(1, int(largest))
        pieces.append("".join(letters[:size]))
        letters = letters[size:]
    return pieces


def _is_one_call_more(fixture: Fixture, result: ParseResult) -> bool:
    """Beside the expected calls there is the cut one. A list of calls counts as one."""
    expected = len(fixture.expected.tool_calls) if fixture.expected is not None else 0
    return len(result.tool_calls) > expected


def table(verdicts: Mapping[Mode, Sequence[Verdict]]) -> str:
    """Markdown: one row a family; how its texts are read, and what comes of those that a limit cut."""
    lines = [
        "| family | fixtures | pass | whitespace only | fail | cut calls handed out with `length` | and with `drop` |",
        "|---|---|---|---|---|---|---|",
    ]
    rows: list[list[int]] = []
    families = sorted({verdict.fixture.family for verdict in verdicts[READ]})
    for family in families:
        read, served, strict = ([v for v in verdicts[mode] if v.fixture.family == family] for mode in MODES)
        passed, soft = (sum(v.status is status for v in read) for status in (Status.PASS, Status.SOFT_PASS))
        cut_calls = sum(v.is_cut_call for v in served)
        handed_out = sum(v.is_cut_call for v in strict)
        rows.append([len(read), passed, soft, len(read) - passed - soft, cut_calls, handed_out])
        lines.append(" | ".join([f"| {family}", *map(str, rows[-1])]) + " |")
    lines.append(" | ".join(["| all", *map(str, map(sum, zip(*rows, strict=True)))]) + " |")
    return "\n".join(lines) + "\n"


PAGE = Path(__file__).resolve().parent.parent / "docs" / "tools.md"
BEGIN, END = "<!-- scores: begin -->\n", "<!-- scores: end -->\n"


def page_with(page: str, scores: str) -> str:
    head, rest = page.split(BEGIN)
    return head + BEGIN + scores + END + rest.split(END)[1]


def main(arguments: Sequence[str]) -> None:
    if arguments:
        for verdict in score(SERVED if "--served" in arguments else READ):
            if verdict.fixture.family == arguments[0] and verdict.status not in (Status.PASS, Status.SOFT_PASS):
                print(verdict.fixture.id, verdict.status, *verdict.details, sep="\n    ")
        return
    scores = table({mode: list(score(mode)) for mode in MODES})
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), scores), encoding="utf-8")
    print(scores)


if __name__ == "__main__":
    main(sys.argv[1:])
