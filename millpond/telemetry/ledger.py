"""Counts what happens to requests and what the engine reports. Knows observers' events; no metric names, no export.

Everything that is a sum only grows while the server lives, across engine restarts too: an engine's totals start at 0,
so those of the dead are kept and added. Nothing here changes while nothing happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import fields

from millpond.engine.messages import StepFrame
from millpond.engine_client.observer import NullObserver
from millpond.engine_client.token_log import TokenLog
from millpond.outputs import StepStats, StepTotals
from millpond.telemetry.histogram import REQUEST_TIME, TIME_TO_FIRST_TOKEN, TOKEN_GAP, TOKENS, Histogram
from millpond.types import EngineEpoch, FinishReason, SequenceId

_TOTALS = tuple(field.name for field in fields(StepTotals))


class EngineTotals:
    """StepTotals summed over all engine processes of a server."""

    def __init__(self) -> None:
        self._of_the_dead = dict.fromkeys(_TOTALS, 0.0)
        self._current = StepTotals()
        self._epoch = EngineEpoch(0)

    def update(self, epoch: EngineEpoch, totals: StepTotals) -> None:
        if epoch != self._epoch:
            for name in _TOTALS:
                self._of_the_dead[name] += getattr(self._current, name)
            self._epoch = epoch
        self._current = totals

    def __getitem__(self, name: str) -> float:
        return self._of_the_dead[name] + float(getattr(self._current, name))


class Ledger(NullObserver):
    """Reads are for the thread of the events, too: the event loop's."""

    def __init__(self) -> None:
        self._alive: dict[SequenceId, TokenLog] = {}
        self._last: dict[SequenceId, None] = {}
        """Sequences of the last frame that brought tokens, each once."""
        self._last_at = 0.0
        self._paused_at: dict[SequenceId, float] = {}
        """Last token of each one that has begun and was not in that frame."""
        self.stats = StepStats()
        """The engine's last word on its state; empty after a restart."""
        self.totals = EngineTotals()
        self.accepted = 0
        self.finished: Counter[FinishReason] = Counter()
        self.refused: Counter[str] = Counter()
        self.responses: Counter[int] = Counter()
        """HTTP answers by status."""
        self.restarts = 0
        self.prompt_tokens = self.cached_tokens = self.computed_tokens = 0
        """Of outputs that got a first token, at their end, as their usage says: prompt = cached + computed."""
        self.generated_tokens = 0
        self.delivered_tokens = 0
        self._parked_seconds = 0.0
        self.queue = Histogram(REQUEST_TIME)
        self.prefill = Histogram(REQUEST_TIME)
        self.decode = Histogram(REQUEST_TIME)
        self.first_token = Histogram(TIME_TO_FIRST_TOKEN)
        self.gap = Histogram(TOKEN_GAP)
        self.mean_gap = Histogram(TOKEN_GAP)
        self.whole = Histogram(REQUEST_TIME)
        self.prompt_lengths = Histogram(TOKENS)
        self.output_lengths = Histogram(TOKENS)

    @property
    def alive(self) -> Collection[TokenLog]:
        return self._alive.values()

    def states(self) -> dict[str, int]:
        """Live sequences by what they do; every one is counted once."""
        parked = sum(log.is_parked for log in self._alive.values())
        waiting = sum(log.is_waiting for log in self._alive.values())
        return {"waiting": waiting, "running": len(self._alive) - waiting - parked, "parked": parked}

    def queued_prompt_tokens(self) -> int:
        """Of outputs that wait to begin."""
        return sum(len(log.request.prompt_ids) for log in self._alive.values() if log.is_waiting)

    def parked_seconds(self, now: float) -> float:
        """Of the ended and, up to now, of the living."""
        return self._parked_seconds + sum(log.total_parked(now) for log in self._alive.values())

    def count_response(self, status: int) -> None:
        self.responses[status] += 1

    def on_accepted(self, log: TokenLog) -> None:
        self._alive[log.sequence_id] = log
        self.accepted += 1

    def on_frame(self, frame: StepFrame, now: float) -> None:
        stats = frame.stats
        if stats is not None:  # not every frame has to bring them
            self.stats = stats
            if stats.totals is not None:
                self.totals.update(frame.epoch, stats.totals)
        tokens = frame.tokens
        if not tokens:
            return
        self.generated_tokens += len(tokens)
        those = dict.fromkeys([token.sequence_id for token in tokens])
        if len(those) < len(tokens):
            self.gap.observe(0.0, len(tokens) - len(those))
        if those == self._last:
            self.gap.observe(now - self._last_at, len(those))
        else:
            self._note_other_rows(those, now)
        self._last, self._last_at = those, now

    def on_finished(self, log: TokenLog, now: float) -> None:
        finish = log.finish
        assert finish is not None
        del self._alive[log.sequence_id]
        self._paused_at.pop(log.sequence_id, None)
        self.finished[finish.reason] += 1
        parked = log.total_parked(now)
        self._parked_seconds += parked
        arrival = log.request.arrival
        self.whole.observe(now - arrival)
        self.prompt_lengths.observe(len(log.request.prompt_ids))
        self.output_lengths.observe(finish.output_length)
        if log.first_token_at is None:
            self.queue.observe((now if log.started_at is None else log.started_at) - arrival)
            return
        self.prompt_tokens += finish.usage.prompt_tokens
        self.cached_tokens += finish.usage.cached_tokens
        self.computed_tokens += finish.usage.computed_prompt_tokens
        decode = now - log.first_token_at - parked
        self.decode.observe(decode)
        if finish.output_length > 1:
            self.mean_gap.observe(decode / (finish.output_length - 1))

    def on_delivered(self, log: TokenLog, tokens: int, reason: FinishReason | None) -> None:
        self.delivered_tokens += tokens

    def on_refused(self, kind: str) -> None:
        self.refused[kind] += 1

    def on_restart(self, epoch: EngineEpoch, cause: str) -> None:
        self.restarts += 1
        self.stats = StepStats()

    def _note_other_rows(self, those: dict[SequenceId, None], now: float) -> None:
        """Gaps where the frame's sequences are not those of the one before."""
        before = self._last
        for sequence_id in before:
            if sequence_id not in those and sequence_id in self._alive:
                self._paused_at[sequence_id] = self._last_at
        for sequence_id in those:
            if sequence_id in before:
                self.gap.observe(now - self._last_at)
            elif (paused := self._paused_at.pop(sequence_id, None)) is not None:
                self.gap.observe(now - paused)
            elif (log := self._alive.get(sequence_id)) is not None:
                self._note_first_token(log, now)

    def _note_first_token(self, log: TokenLog, now: float) -> None:
        arrival = log.request.arrival
        started = now if log.started_at is None else log.started_at
        self.first_token.observe(now - arrival)
        self.queue.observe(started - arrival)
        self.prefill.observe(now - started)
