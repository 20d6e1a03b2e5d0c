"""A template's own rules over HTTP: what it raises is a 400 with its text, whatever the client's messages are."""

from __future__ import annotations

from typing import Any

import pytest
from fake_stack import whole_stack
from raw_http import CHAT, exchange, post

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: ' + m.role) }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
USER = {"role": "user", "content": "hi"}


async def test_what_a_template_raises_is_a_400_with_its_text():
    refused: list[list[dict[str, Any]]] = [[USER, USER], [USER, {"role": "assistant", "content": "yo"}, USER, USER]]
    async with whole_stack(kv_cells=512, max_running=2, template=TEMPLATE) as stack:
        for messages in refused:
            for stream in (False, True):
                reply = await exchange(
                    stack.port, post(CHAT, {"messages": messages, "max_tokens": 3, "stream": stream})
                )
                assert reply.status == 400 and "roles must alternate: user" in reply.json["error"]["message"]
        parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
        for messages in ([USER], [parts], [USER, {"role": "assistant", "content": None, "tool_calls": []}, parts]):
            reply = await exchange(stack.port, post(CHAT, {"messages": messages, "max_tokens": 3}))
            assert reply.status == 200, reply.body
