"""Every live token log, and what an engine's events, its death and its successor mean for them.

Knows commands and events, no sockets, processes or tasks: time comes in as arguments, commands go out through the
sender of the engine that is attached. `attach` gives an engine everything alive; `detach` is its death, `judge` what
is known of it a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from millpond.engine.messages import AbortSequence, AddRequest, Command, StepFrame
from millpond.engine_client.admission import Backlog, ServiceRates, tokens_left
from millpond.engine_client.observer import NullObserver, Observer
from millpond.engine_client.poison import Death, Quarantine
from millpond.engine_client.token_log import Append, TokenLog
from millpond.outputs import FinishEvent, StepStats
from millpond.request import Request, finish_reason_of
from millpond.types import FinishReason, SequenceId, TokenId

POISON_MESSAGE = "the engine died each time it ran this request alone"
END_PATIENCE = 2.0
"""Seconds the engine has to confirm an end or a deadline before the server does it alone."""
_MESSAGES = {
    FinishReason.DEADLINE: "the request took longer than it may",
    FinishReason.SHUTDOWN: "the server is shutting down",
}


class LogBook:
    """Live logs by sequence id, in order of acceptance."""

    def __init__(
        self, eog_ids: frozenset[TokenId], clock: Callable[[], float], observer: Observer | None = None
    ) -> None:
        self._observer = observer or NullObserver()
        self._eog_ids = eog_ids
        self._clock = clock
        self._live: dict[SequenceId, TokenLog] = {}
        self._given: set[SequenceId] = set()
        self._given_to_dead: set[SequenceId] = set()
        self._closing_until: dict[SequenceId, float] = {}
        self._send: Callable[[Command], None] | None = None
        self._quarantine = Quarantine()
        self._next_id = 1
        self._on_empty: list[Callable[[], None]] = []
        self.rates = ServiceRates()
        self.last_stats: StepStats | None = None
        self.tokens = 0
        """Output tokens of all sequences so far, those taken again after an engine's death included."""
        self.end_listeners: list[Callable[[TokenLog], None]] = []
        """Told of every log that ended, on the loop's thread; they must be quick and not raise."""
        self.losses = 0
        """Accepted sequences whose end was an error."""

    @property
    def live(self) -> Collection[TokenLog]:
        return self._live.values()

    @property
    def engine_has_work(self) -> bool:
        """The attached engine owes a step."""
        return bool(self._given)

    def open(self, request: Request) -> TokenLog:
        """Accepts a request: from here on its log ends exactly once."""
        log = TokenLog(SequenceId(self._next_id), request)
        self._next_id += 1
        self._live[log.sequence_id] = log
        self._observer.on_accepted(log)
        self._give_due()
        return log

    def backlog(self) -> Backlog:
        """What is ahead of a new request."""
        mean = self.rates.mean_length
        requests, prompts, outputs = [0, 0], [0, 0], [0.0, 0.0]
        for log in self._live.values():
            row = log.started_at is None  # asked for by every request: each attribute here counts
            requests[row] += 1
            length = len(log.ids)
            if not length:
                prompts[row] += len(log.request.prompt_ids)
            outputs[row] += tokens_left(mean, length, log.request.max_tokens)
        return Backlog(requests[1], prompts[1], outputs[1], requests[0], prompts[0], outputs[0])

    def attach(self, send: Callable[[Command], None]) -> None:
        """An engine is ready: it gets what had begun, suspects one at a time and last, then what had not.

        The last would only take the places of suspects, whose streams are open, and a suspect runs alone anyway.
        """
        self._send = send
        self.rates.begin_engine()
        self._quarantine.record_ready(self._clock())
        for log in list(self._live.values()):
            if not log.is_waiting and not self._quarantine.is_suspect(log.sequence_id):
                self._give(log, send, quarantine=False)
        self._give_due()

    def detach(self) -> None:
        """The engine is dead. Logs that are complete are finished; the others wait for the next one."""
        now = self._clock()
        self._send = None
        self._given_to_dead, self._given = self._given, set()
        for sequence_id in self._given_to_dead:
            self._live[sequence_id].note_engine_death(now)
        for log in list(self._live.values()):
            self._finish_if_complete(log)

    def judge(self, death: Death) -> None:
        """How it died, before the next one is attached. The poison rule may convict one of those that it had."""
        given, self._given_to_dead = self._given_to_dead, set()
        convicted = self._quarantine.record_death(death, [s for s in given if s in self._live], self._clock())
        if convicted is not None:
            self._finish_alone(self._live[convicted], FinishReason.ERROR, POISON_MESSAGE)

    def apply(self, frame: StepFrame) -> str | None:
        """Commits a frame. Returns what the engine did wrong, if it broke the protocol."""
        now = self._clock()
        live = self._live
        for token in frame.tokens:
            log = live.get(token.sequence_id)
            if log is not None and log.append(token, now) is Append.GAP:
                return f"token {token.output_index} of sequence {log.sequence_id} came after {len(log.ids)} tokens"
        for status in frame.statuses:
            log = live.get(status.sequence_id)
            if log is not None:
                log.note_status(status.status, now)
        self._observer.on_frame(frame, now)
        for finish in frame.finished:
            log = live.get(finish.sequence_id)
            if log is not None and log.closing is None and finish.output_length != len(log.ids):
                return f"sequence {log.sequence_id} ended at {finish.output_length}, its log has {len(log.ids)} tokens"
            if log is not None:
                self._finish(log, finish, now)
        self.tokens += len(frame.tokens)
        self.rates.record_tokens(len(frame.tokens))
        if frame.stats is not None:
            self.last_stats = frame.stats
            self.rates.record_stats(frame.stats)
        self._note_trial_progress()
        return None

    def end(self, sequence_id: SequenceId, reason: FinishReason, length: int | None = None) -> None:
        """Ends a sequence at `length` output tokens (None: all it has). Unknown and ended ones are ignored.

        No token is taken after this; the finish comes with the engine's usage, or without it when that takes too long.
        """
        log = self._live.get(sequence_id)
        if log is None or log.closing is not None:
            return
        log.close(reason, len(log.ids) if length is None else length)
        if sequence_id not in self._given or self._send is None:
            self._finish_alone(log, reason, _MESSAGES.get(reason, ""))
            return
        self._closing_until[sequence_id] = self._clock() + END_PATIENCE
        self._send(AbortSequence(sequence_id, reason))

    def sweep(self) -> None:
        """Ends what is due: deadlines that no engine enforces, ends not confirmed by one, the rests of suspects."""
        now = self._clock()
        for log in list(self._live.values()):
            patience = END_PATIENCE if log.sequence_id in self._given else 0.0
            deadline = log.request.deadline
            if log.closing is not None:
                if now >= self._closing_until.get(log.sequence_id, now):
                    self._finish_alone(log, log.closing, _MESSAGES.get(log.closing, ""))
            elif deadline is not None and now >= deadline + patience:
                self._abandon(log, FinishReason.DEADLINE, _MESSAGES[FinishReason.DEADLINE])
        self._give_due()

    def finish_all(self, reason: FinishReason, message: str = "") -> None:
        """Ends every live log now, without waiting for an engine."""
        for log in list(self._live.values()):
            self._abandon(log, reason, message or _MESSAGES.get(reason, ""))

    def when_empty(self, callback: Callable[[], None]) -> None:
        """Calls back once, when no log is alive (now, if none is)."""
        self._on_empty.append(callback)
        self._tell_if_empty()

    def _give(self, log: TokenLog, send: Callable[[Command], None], *, quarantine: bool) -> None:
        self._given.add(log.sequence_id)
        send(AddRequest(log.sequence_id, log.request, tuple(log.ids), quarantine))

    def _give_due(self) -> None:
        """The next suspect, if nobody is on trial; everybody else while none is due."""
        if self._send is None:
            return
        now = self._clock()
        chosen = self._quarantine.take_next(lambda sequence_id: len(self._live[sequence_id].ids), now)
        if chosen is not None:
            self._give(self._live[chosen], self._send, quarantine=True)
        elif len(self._given) < len(self._live) and self._quarantine.is_quiet(now):
            for sequence_id, log in self._live.items():
                if sequence_id not in self._given and not self._quarantine.is_suspect(sequence_id):
                    self._give(log, self._send, quarantine=False)

    def _note_trial_progress(self) -> None:
        on_trial = self._quarantine.on_trial
        if on_trial is None:
            return
        log = self._live.get(on_trial)
        if log is None or self._quarantine.record_progress(on_trial, len(log.ids)):
            self._give_due()

    def _finish_if_complete(self, log: TokenLog) -> None:
        reason = log.closing or finish_reason_of(log.request, log.ids, self._eog_ids)
        if reason is not None:
            self._finish_alone(log, reason, _MESSAGES.get(reason, ""))

    def _abandon(self, log: TokenLog, reason: FinishReason, message: str) -> None:
        """Ends a log now and tells the engine, which may be too busy to answer."""
        if self._send is not None and log.sequence_id in self._given:
            self._send(AbortSequence(log.sequence_id, reason))
        self._finish_alone(log, reason, message)

    def _finish_alone(self, log: TokenLog, reason: FinishReason, message: str) -> None:
        now = self._clock()
        event = FinishEvent(log.sequence_id, len(log.ids), reason, log.own_usage(now), message)
        self._finish(log, event, now)

    def _finish(self, log: TokenLog, event: FinishEvent, now: float) -> None:
        was_on_trial = self._quarantine.on_trial == log.sequence_id
        del self._live[log.sequence_id]
        self._given.discard(log.sequence_id)
        self._closing_until.pop(log.sequence_id, None)
        self._quarantine.forget(log.sequence_id)
        log.set_finish(event, now)
        assert log.finish is not None
        if log.finish.reason is FinishReason.ERROR:
            self.losses += 1
        if log.finish.reason.is_asked_for:
            self.rates.record_output_length(len(log.ids))
        self._observer.on_finished(log, now)
        for listener in self.end_listeners:
            listener(log)
        if was_on_trial:
            self._give_due()
        self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        if self._live:
            return
        waiting, self._on_empty = self._on_empty, []
        for callback in waiting:
            callback()
