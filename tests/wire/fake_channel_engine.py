"""A TextEngine whose outputs are scripted bytes read by the real output processor and channel machine of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from fake_text_engine import FakeStream, FakeTextEngine, Script

from millpond.async_llm import ChatInput, Finish, OutputDelta, PromptInput, RequestOptions
from millpond.outputs import SequenceUsage
from millpond.sampling_params import SamplingParams
from millpond.text.channels import ChannelPlan, MarkerTokens
from millpond.text.output_processor import HiddenTokens, OutputProcessor
from millpond.text.stop import StopStrings
from millpond.text.tool_formats.base import ThinkTags, ToolSet, Turn
from millpond.text.tool_formats.registry import FORMATS
from millpond.types import FinishReason


@dataclass
class FakeChannelEngine(FakeTextEngine):
    """One byte a token. The script's pieces are the model's raw text; each piece is one delta."""

    form: str = "hermes"
    think: ThinkTags | None = None

    async def submit(self, prompt: PromptInput, params: SamplingParams, options: RequestOptions) -> FakeStream:
        stream = await super().submit(prompt, params, options)
        tools = ToolSet.of(prompt.tools) if isinstance(prompt, ChatInput) and prompt.tools else None
        parallel = not isinstance(prompt, ChatInput) or prompt.parallel_tool_calls
        plan = ChannelPlan(FORMATS[self.form], Turn(tools, self.think), MarkerTokens.none(), parallel)
        channels = ChannelStream(stream, plan, self.piece, options)
        self.streams[-1] = channels
        return channels


class ChannelStream(FakeStream):
    def __init__(self, raw: FakeStream, plan: ChannelPlan, piece, options: RequestOptions) -> None:
        super().__init__(Script(), SamplingParams(), options, raw.prompt_tokens)
        self._raw = raw
        hidden = HiddenTokens(frozenset({256}))
        self._processors = [
            OutputProcessor(piece, StopStrings(options.stop), hidden, plan.machine(options.request_id, index))
            for index in range(options.n)
        ]
        self._counts = [0] * options.n

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        async for delta in self._raw:
            processor = self._processors[delta.index]
            if processor.stop is not None:
                continue
            new = processor.feed(delta.token_ids, self._counts[delta.index])
            self._counts[delta.index] += new.token_count
            finish = delta.finish
            text, reasoning, calls = new.text, new.reasoning, new.tool_calls
            if finish is not None or new.stop is not None:
                rest = processor.finish(was_cut=finish is not None and finish.reason is not FinishReason.STOP)
                text, reasoning, calls = text + rest.text, reasoning + rest.reasoning, calls + rest.tool_calls
                finish = self._finish(finish, processor, self._counts[delta.index])
            yield replace(
                delta,
                text=text,
                token_ids=delta.token_ids[: new.token_count],
                finish=finish,
                reasoning=reasoning,
                tool_calls=calls,
            )

    def _finish(self, finish: Finish | None, processor: OutputProcessor, count: int) -> Finish:
        ended = finish or Finish(FinishReason.STOP, SequenceUsage(self.prompt_tokens), count)
        return replace(
            ended, reasoning_tokens=processor.reasoning_tokens, waits_for_results=processor.waits_for_results
        )
