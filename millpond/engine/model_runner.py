"""Builds one batch from the scheduled rows, decodes it and samples. Knows rows and samplers; no plan and no cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from millpond.errors import DecodeFailed, GrammarFailed, InvalidBatch, KVExhausted, RuntimeFailure
from millpond.outputs import SampledToken
from millpond.request import Request
from millpond.runtime.base import Batch, Runtime
from millpond.sampling.logprobs import PromptLogprobs
from millpond.sampling.sampler import Sampler, SamplerFactory
from millpond.sampling.structured.base import Grammar
from millpond.scheduler.output import DecodeFailure, RunnerOutput, ScheduledRows
from millpond.scheduler.sequence import Ending
from millpond.types import FinishReason, SequenceId

NOTHING_RUN = RunnerOutput()


class ModelRunner:
    """`clock` in seconds, monotonic."""

    def __init__(self, runtime: Runtime, samplers: SamplerFactory, clock: Callable[[], float]) -> None:
        self._runtime = runtime
        self._factory = samplers
        self._clock = clock
        self._samplers: dict[SequenceId, Sampler] = {}
        self._prompts: dict[SequenceId, PromptLogprobs] = {}

    def add(self, sequence_id: SequenceId, request: Request, grammar: Grammar | None = None) -> None:
        """`grammar`: the request's, compiled. Raises InvalidParameter if it names ids that the model does not have."""
        self._samplers[sequence_id] = self._factory.create(request, grammar)
        if request.params.prompt_logprobs is not None:
            self._prompts[sequence_id] = PromptLogprobs(request.prompt_ids, request.params.prompt_logprobs)

    def remove(self, sequence_id: SequenceId) -> None:
        self._samplers.pop(sequence_id, None)
        self._prompts.pop(sequence_id, None)

    def run(self, rows: Sequence[ScheduledRows], before_sampling: Callable[[], None]) -> RunnerOutput:
        """`before_sampling` is called once the model is done, while the clock of the step still runs."""
        if not rows:
            before_sampling()
            return NOTHING_RUN
        began = self._clock()
        try:
            self._runtime.decode(_batch_of(rows))
        except KVExhausted as error:
            return RunnerOutput(failure=DecodeFailure(True, str(error)))
        except (DecodeFailed, InvalidBatch) as error:
            return RunnerOutput(failure=DecodeFailure(False, str(error)))
        decoded = self._clock()
        before_sampling()
        tokens: dict[SequenceId, SampledToken] = {}
        errors: dict[SequenceId, Ending] = {}
        first = 0
        for scheduled in rows:
            try:
                token = self._sample(scheduled, first)
            except GrammarFailed as error:
                errors[scheduled.sequence_id] = Ending(FinishReason.GRAMMAR, str(error))
            except RuntimeFailure as error:
                errors[scheduled.sequence_id] = Ending(FinishReason.ERROR, str(error))
            else:
                if token is not None:
                    tokens[scheduled.sequence_id] = token
            first += len(scheduled.token_ids)
        sampled = self._clock()
        return RunnerOutput(tokens, errors, None, (decoded - began) * 1e3, (sampled - decoded) * 1e3)

    def _sample(self, scheduled: ScheduledRows, first: int) -> SampledToken | None:
        """`first`: the batch's row of its first token. None: the sequence is not up to date yet."""
        about_prompt = self._prompts.get(scheduled.sequence_id) if scheduled.wants_all else None
        if about_prompt is not None:
            for offset in range(len(scheduled.token_ids)):
                about_prompt.take(scheduled.start + offset, self._runtime.logits(first + offset))
        if not scheduled.samples:
            return None
        last = first + len(scheduled.token_ids) - 1
        token = self._samplers[scheduled.sequence_id].sample(self._runtime.logits(last), scheduled.output_ids)
        return token if about_prompt is None else token._replace(prompt_logprobs=about_prompt.all())


def _batch_of(rows: Sequence[ScheduledRows]) -> Batch:
    if all(len(scheduled.token_ids) == 1 for scheduled in rows):
        return _batch_of_single(rows)
    counts = [len(scheduled.token_ids) for scheduled in rows]
    total = sum(counts)
    tokens = np.fromiter(chain.from_iterable(scheduled.token_ids for scheduled in rows), np.int32, total)
    slots = np.repeat(np.fromiter((scheduled.slot for scheduled in rows), np.int32, len(rows)), counts)
    wants = np.zeros(total, np.bool_)
    positions = np.empty(total, np.int32)
    begin = 0
    for scheduled, count in zip(rows, counts, strict=True):
        positions[begin : begin + count] = np.arange(scheduled.start, scheduled.start + count, dtype=np.int32)
        begin += count
        wants[begin - 1] = scheduled.samples
        if scheduled.wants_all:
            wants[begin - count : begin] = True
    return Batch(tokens, positions, slots, wants)


def _batch_of_single(rows: Sequence[ScheduledRows]) -> Batch:
    """One row each: the usual step, and the most frequent."""
    columns = np.array([(row.token_ids[0], row.start, row.slot) for row in rows], np.int32).T
    wants = np.array([row.samples or row.wants_all for row in rows], np.bool_)
    return Batch(columns[0], columns[1], columns[2], wants)
