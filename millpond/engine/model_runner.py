"""Builds one batch from the scheduled rows, decodes it and samples. Knows rows and samplers; no plan and no cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    """Lists first: most batches are a few rows, and arrays of those cost more to join than to make."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wants: list[bool] = []
    for scheduled in rows:
        count = len(scheduled.token_ids)
        tokens += scheduled.token_ids
        positions += range(scheduled.start, scheduled.start + count)
        slots += [scheduled.slot] * count
        wants += [scheduled.wants_all] * (count - 1)
        wants.append(scheduled.samples or scheduled.wants_all)
    return Batch(
        np.array(tokens, np.int32), np.array(positions, np.int32), np.array(slots, np.int32), np.array(wants, np.bool_)
    )
