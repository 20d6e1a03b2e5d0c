"""A plugin that bounds what a client may ask, and counts what it got. Package it with this line in its pyproject.toml:

[project.entry-points."millpond.plugins"]
policy = "plugin_policy:Policy"
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from millpond.hooks.spec import Change, Ending, IncomingRequest, Refusal, hookimpl

MAX_PROMPT_TOKENS = 1000
MAX_OUTPUT_TOKENS = 200


class Policy:
    """Long prompts are refused, long outputs are cut, and prompts of up to 100 tokens go first."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()

    @hookimpl
    def on_request(self, request: IncomingRequest) -> Change | Refusal | None:
        """Seen before the request is accepted; None would let it pass as it is."""
        if len(request.prompt_ids) > MAX_PROMPT_TOKENS:
            return Refusal(f"prompts of more than {MAX_PROMPT_TOKENS} tokens are not served here")
        limit = min(request.params.max_tokens or MAX_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)
        priority = 1 if len(request.prompt_ids) <= 100 else request.priority
        return Change(replace(request.params, max_tokens=limit), priority)

    @hookimpl
    def on_finish(self, ending: Ending) -> None:
        """Runs on the plugin's own thread: no request waits for it."""
        self.ends[ending.reason.value] += 1
