"""`promtool check metrics` on what a server answers after some load, a park and a refusal among it."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from fake_stack import whole_stack
from raw_http import CHAT, TEXT, chat, exchange, head, post

PROMTOOL = shutil.which("promtool")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: apt-get install prometheus)"),
]


async def page_after_load(compat: str) -> bytes:
    """/metrics under these names."""
    async with whole_stack(kv_cells=256, max_running=4, server={"metrics_compat": compat}) as stack:
        asked = [post(CHAT, chat(max_tokens=80, ignore_eos=True, seed=number)) for number in range(4)]
        answers = await asyncio.gather(*(exchange(stack.port, body) for body in asked))
        assert {answer.status for answer in answers} == {200}
        assert (await exchange(stack.port, post(TEXT, {"prompt": "word " * 2000}))).status == 400
        return (await exchange(stack.port, head("GET", "/metrics"))).body


async def complaints(page: bytes) -> list[str]:
    assert PROMTOOL is not None
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        PROMTOOL, "check", "metrics", stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate(page)
    lines = output.decode().splitlines()
    assert (process.returncode == 0) == (not lines)
    return lines


async def test_the_page_is_clean():
    page = await page_after_load("none")
    assert b"millpond_preemptions_total" in page
    assert await complaints(page) == []


async def test_of_vllms_names_it_dislikes_the_colon_and_nothing_else():
    page = await page_after_load("vllm")
    disliked = await complaints(page)
    assert disliked
    assert [line for line in disliked if not line.startswith("vllm:") or "should not contain ':'" not in line] == []
    assert await complaints(page.replace(b"vllm:", b"vllm_")) == []


async def test_it_finds_what_is_wrong():
    assert await complaints(b"# HELP a A.\n# TYPE a counter\na 1\n")
    assert await complaints(b"# HELP a_total A.\n# TYPE a_total counter\na_total{b=1} 1\n")
