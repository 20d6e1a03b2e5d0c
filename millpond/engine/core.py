"""One step of the engine: plan, move, run, sample, settle. Knows who does each; does none of it, and no I/O.

The same object runs in the engine process and in tests and scripts, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millpond.engine.flush import flush_prefixes
from millpond.engine.grammars import PendingGrammars
from millpond.engine.kv_executor import NOTHING_MOVED, KVExecutor
from millpond.engine.model_runner import NOTHING_RUN, ModelRunner
from millpond.errors import CallerError
from millpond.outputs import EngineInfo, FinishEvent, PoolRun, SequenceProgress, StatusEvent, StepStats, TokenEvent
from millpond.request import Request
from millpond.sampling.structured.base import Grammar
from millpond.sampling_params import GrammarSpec
from millpond.scheduler.output import ScheduledRows
from millpond.scheduler.scheduler import Scheduler
from millpond.types import FinishReason, SequenceId, TokenId


@dataclass(frozen=True, slots=True)
class StepResult:
    tokens: list[TokenEvent]
    finished: list[FinishEvent]
    statuses: list[StatusEvent]
    progressed: bool
    """False: nothing could be done now; do not spin."""
    seconds: float
    """Wall time."""


def _nothing() -> None:
    pass


class EngineCore:
    """`clock` in seconds, monotonic; the one requests' arrivals and deadlines are on."""

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        executor: KVExecutor,
        runner: ModelRunner,
        grammars: PendingGrammars,
        clock: Callable[[], float],
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self._executor = executor
        self._runner = runner
        self._grammars = grammars
        self._clock = clock
        self._last = NOTHING_RUN, NOTHING_MOVED, 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(
        self,
        sequence_id: SequenceId,
        request: Request,
        output_ids: Sequence[TokenId] = (),
        *,
        quarantine: bool = False,
    ) -> None:
        """A request that this model cannot sample for ends with ERROR in the next step; it never raises.

        One with a grammar waits until that is compiled, and ends with GRAMMAR if it cannot be."""
        constrained = request.params.grammar is not None
        self.scheduler.add(sequence_id, request, output_ids, quarantine=quarantine, held=constrained)
        if constrained:
            self._grammars.start(sequence_id, request)
            self._release_compiled()
        else:
            self._prepare(sequence_id, request, None)

    def _prepare(self, sequence_id: SequenceId, request: Request, grammar: Grammar | None) -> None:
        try:
            self._runner.add(sequence_id, request, grammar)
        except CallerError as error:
            self.scheduler.end(sequence_id, FinishReason.ERROR, str(error))

    def _release_compiled(self) -> None:
        for ready in self._grammars.take_ready():
            self.scheduler.release(ready.sequence_id)
            error = ready.future.exception()
            if error is None:
                self._prepare(ready.sequence_id, ready.request, ready.future.result())
            else:
                self.scheduler.end(ready.sequence_id, FinishReason.GRAMMAR, str(error))

    def check_grammar(self, spec: GrammarSpec) -> None:
        """For callers in this process: waits. Raises InvalidParameter for one that does not compile."""
        self._grammars.check(spec)

    def end(self, sequence_id: SequenceId, reason: FinishReason) -> None:
        self.scheduler.end(sequence_id, reason)

    def inspect(self) -> tuple[list[PoolRun], list[SequenceProgress]]:
        """The pool's runs of cells and every live sequence's progress, for display; between steps only."""
        return self.scheduler.pool_runs(), self.scheduler.progress()

    def stats(self) -> StepStats:
        """Of the last step. Made when asked for: it is larger than all else that a step returns."""
        held = self._executor.held_bytes
        return self.scheduler.stats(*self._last, ram_bytes=held(durable=False), disk_bytes=held(durable=True))

    def shutdown(self, flush_seconds: float) -> None:
        """Ends every sequence. What prefixes hold goes to the disk tier, if there is one, the hottest first and for at
        most so long. No step may follow."""
        ends = self._clock() + flush_seconds
        keeps = self._executor.begin_flush()
        ops = self.scheduler.close(self._clock())
        if keeps and flush_seconds > 0.0:
            self._executor.apply(ops)
            flush_prefixes(self.scheduler, self._executor, ends, self._clock)
        self._executor.close(max(0.0, ends - self._clock()))

    def step(
        self,
        before_decode: Callable[[Sequence[ScheduledRows]], None] | None = None,
        after_decode: Callable[[], None] = _nothing,
    ) -> StepResult:
        """`before_decode` hears whose rows are about to run; `after_decode` may call end() for what just arrived."""
        began = self._clock()
        self._release_compiled()
        plan = self.scheduler.schedule(began)
        scheduled = self._clock()
        schedule_ms = (scheduled - began) * 1e3
        self.scheduler.meter.schedule_ms += schedule_ms
        moved = self._executor.apply(plan.ops)
        rows = [row for row in plan.rows if row.slot not in moved.failed_slots]
        if before_decode is not None and rows:
            before_decode(rows)
        ran = self._runner.run(rows, after_decode)
        ended = self._clock()
        outcome = self.scheduler.update(ran, moved, ended)
        self._last = ran, moved, schedule_ms
        finished = [*plan.finished, *outcome.finished]
        for event in finished:
            self._runner.remove(event.sequence_id)
            self._grammars.forget(event.sequence_id)
        statuses = [*plan.statuses, *outcome.statuses]
        progressed = bool(plan.ops or rows or finished or statuses)
        return StepResult(outcome.tokens, finished, statuses, progressed, ended - began)
