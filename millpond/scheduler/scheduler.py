"""Plans one step: who runs, with how many rows, and what moves in KV memory. PURE: time and results come in as values.

One rule for chunked prefill, prefix hits and resumed sequences: num_computed_tokens catches up with num_tokens, under
a budget of rows, time, slots and cells. The lanes below only differ in who asks first:

    grow      one row for every sequence that is up to date; short of cells: evict, then park
    start     parked ones, then waiting ones, while slots and cells last
    catch up  the rest of the budget, by restores where the state is saved, else by rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from millpond.kvcache.checkpoints import checkpoint_lengths
from millpond.kvcache.history import TokenHistory
from millpond.kvcache.manager import CacheHandle, KVCacheManager, PrefixMatch
from millpond.kvcache.ops import KVOp
from millpond.kvcache.payload import PAGE_TOKENS, StateIdentity
from millpond.outputs import FinishEvent, PoolRun, SequenceProgress, StatusEvent, StepStats, TokenEvent
from millpond.request import Request, finish_reason_of
from millpond.scheduler import policy
from millpond.scheduler.budget import IdleRent, MoveCost, StepBudget, StepCost, StepWork, step_limit
from millpond.scheduler.meter import StepMeter
from millpond.scheduler.output import (
    OpResults,
    RunnerOutput,
    ScheduledRows,
    SchedulerOutput,
    StepOutcome,
)
from millpond.scheduler.preemption import (
    IMMUNITY_TOKENS,
    VictimRule,
    choose_slot_victim,
    choose_victim,
    least_generated,
)
from millpond.scheduler.sequence import Ending, Sequence, Shortage
from millpond.types import FinishReason, SequenceId, SequenceStatus, SlotId, TokenId

CONSIDERED_WAITERS = 32
"""Waiting sequences that one step looks at; the others are behind them anyway."""
ALONE_FACTOR = 3.0
"""A step that no stream waits for may take this much longer; it still bounds how late an abort is seen."""
MAX_FAILURES = 2
PROMPT_LOGITS_ROWS = 32
"""Rows of one step whose logits are all wanted: 4 bytes a vocabulary entry each, and some tenths of a millisecond."""
IDLE_PIECES_PER_STEP = 2
"""Spans of idle prefixes that housekeeping moves out in one step, a few milliseconds each."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_running: int
    max_rows: int
    max_step_ms: float | None
    """None: see step_limit."""
    growth_cells: int
    """Cells that stay free when something starts beside others."""
    cache_cells: int | None
    """Cells that idle prefixes may hold; None: a quarter of the pool, while their rent is not due."""
    quantum: int
    identity: StateIdentity
    share_prefixes: bool
    can_save: bool
    """There is a tier to save to."""
    always_save: bool
    """Saved states are exact and recomputed ones are not."""
    can_cut: bool
    """A slot can be cut back to its counter after a failed decode; else it starts over."""
    victim_rule: VictimRule = least_generated


class Scheduler:
    """Owns every sequence of the engine, their order and their progress."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, eog_ids: frozenset[TokenId]) -> None:
        self._config = config
        self._manager = manager
        self._eog_ids = eog_ids
        self._sequences: dict[SequenceId, Sequence] = {}
        self._waiting: dict[SequenceId, Sequence] = {}
        self._held: dict[SequenceId, Sequence] = {}
        """WAITING too, but for something outside: not to be started before release()."""
        self._running: list[Sequence] = []
        self._parked: dict[SequenceId, Sequence] = {}
        self._endings: dict[SequenceId, Ending] = {}
        self._next_deadline = float("inf")
        self._arrivals = 0
        self._housekeeping = False
        self._rows: dict[SequenceId, ScheduledRows] = {}
        self._restores: dict[SequenceId, int] = {}
        self._statuses: list[StatusEvent] = []
        self._work = StepWork(0, 0)
        self._prefill_rows = 0
        self._handed_over: float | None = None
        """When the last step's results were there, if it had rows and more is to do."""
        self.meter = StepMeter()
        self.cost = StepCost()
        self.save_cost = MoveCost()
        self.restore_cost = MoveCost()
        self._rent = IdleRent(PAGE_TOKENS)
        self.steps = 0
        self.preemptions = 0
        self.resumes = 0
        self.recomputed_tokens = 0

    # -- commands --------------------------------------------------------------------------------------------------

    def add(
        self,
        sequence_id: SequenceId,
        request: Request,
        output_ids: Iterable[TokenId] = (),
        *,
        quarantine: bool = False,
        held: bool = False,
    ) -> None:
        """A new sequence, or one whose first output tokens another engine process made. Unknown ids only.

        `held`: it waits for something outside, and starts only after release()."""
        assert sequence_id not in self._sequences
        namespace = request.namespace if self._config.share_prefixes else f"{request.namespace}\0{sequence_id}"
        outputs = list(output_ids)
        history = TokenHistory(self._config.identity, namespace, [*request.prompt_ids, *outputs])
        stops = self._checkpoints(request)
        sequence = Sequence(sequence_id, request, CacheHandle(history), self._arrivals, stops, quarantine)
        sequence.output_ids = outputs
        self._arrivals += 1
        self._sequences[sequence_id] = sequence
        (self._held if held else self._waiting)[sequence_id] = sequence
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def release(self, sequence_id: SequenceId) -> None:
        """What the sequence was held for is there; ids that ended meanwhile are ignored."""
        sequence = self._held.pop(sequence_id, None)
        if sequence is not None:
            self._waiting[sequence_id] = sequence

    def _checkpoints(self, request: Request) -> tuple[int, ...]:
        if not self._config.share_prefixes or not self._manager.layout.needs_checkpoints:
            return ()
        return checkpoint_lengths(request.prompt_ids, self._eog_ids)

    def end(self, sequence_id: SequenceId, reason: FinishReason, message: str = "") -> None:
        """Takes effect in the next schedule() or update(), whichever comes first; unknown ids are ignored."""
        if sequence_id in self._sequences:
            self._endings.setdefault(sequence_id, Ending(reason, message))

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or self._housekeeping or self._manager.has_ops

    # -- plan ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        self._rows, self._restores, self._statuses = {}, {}, []
        self.steps += 1
        if self._handed_over is not None:
            self.meter.emit_ms += (now - self._handed_over) * 1e3
        self._expire(now)
        finished = self._apply_endings(now)
        growing = self._growing()
        alone = 1.0 if growing else ALONE_FACTOR
        limit = step_limit(self._config.max_step_ms, self.cost)
        budget = StepBudget(self.cost, self._config.max_rows, limit * alone)
        self._grow(growing, budget, now)
        self._start(now)
        self._catch_up(budget, now)
        self._housekeeping = self._bound_idle()
        self._work = StepWork(budget.rows, budget.row_cells)
        self._prefill_rows = budget.prefill_rows
        rows = sorted(self._rows.values(), key=lambda scheduled: scheduled.slot)
        return SchedulerOutput(self._manager.take_ops(), rows, dict(self._restores), self._statuses, finished)

    def _eligible(self) -> list[Sequence]:
        """Who may have rows: everybody who runs, or the first suspect alone."""
        suspects = [seq for seq in self._running if seq.quarantine]
        return suspects[:1] or self._running

    def _growing(self) -> list[Sequence]:
        """Who is up to date but for the last token."""
        return [seq for seq in self._eligible() if seq.behind == 1][: self._config.max_rows]

    def _grow(self, growing: list[Sequence], budget: StepBudget, now: float) -> None:
        while not self._try_obtain(len(growing)):
            if not self._park_one(now):
                self._endings_for_lack(growing)
                return
            self.meter.parked_to_grow += 1
            growing = self._growing()
        for sequence in growing:
            self._plan_rows(sequence, 1)
            budget.take(1, sequence.num_tokens)

    def _start(self, now: float) -> None:
        """Parked sequences before new work of their class; a parked one that does not fit holds back its class."""
        for sequence in self._start_candidates():
            if self._waits_for_leader(sequence):
                continue
            while (short := self._shortage(sequence)) is not None:
                if not self._try_displace(sequence, short, now):
                    break
            if short is None:
                self._run(sequence, now)
            elif self._running and (sequence.status is SequenceStatus.PREEMPTED or policy.is_overdue(sequence)):
                return

    def _start_candidates(self) -> list[Sequence]:
        if not self._waiting and not self._parked:
            return []
        if len(self._running) >= self._config.max_running and not self._could_displace():
            return []
        pressed = [seq for seq in self._parked.values() if not seq.yielded]
        yielded = [seq for seq in self._parked.values() if seq.yielded]
        first_come = sorted(self._waiting.values(), key=lambda seq: (-seq.request.priority, seq.order))
        considered = [*first_come[:CONSIDERED_WAITERS], *yielded]
        resumable = policy.resume_order(pressed, self._missing)
        startable = policy.start_order(considered, self._reusable)
        return sorted([*resumable, *startable], key=lambda seq: -seq.request.priority)

    def _catch_up(self, budget: StepBudget, now: float) -> None:
        behind = [seq for seq in self._eligible() if seq.id not in self._rows]
        behind.sort(key=lambda seq: (-seq.request.priority, seq.order))
        for sequence in behind:
            if sequence.status is not SequenceStatus.RUNNING or self._try_restore(sequence, budget):
                continue
            self._plan_chunk(sequence, budget, now)

    # -- cells -----------------------------------------------------------------------------------------------------

    def _try_obtain(self, cells: int, keep: Sequence | None = None) -> bool:
        """Frees cells that nobody who runs needs: idle prefixes, then what parked ones still hold. All or nothing."""
        save = self._saves_pay()
        if self._manager.try_make_room(cells, save=save):
            return True
        residues = self._residues(keep)
        if not self._manager.can_have(cells, giving=[seq.handle for seq in residues]):
            return False
        # What several of them share is free only when all have let go, so it comes last.
        return self._give_up(residues, cells, shared=False) or self._give_up(residues, cells, shared=True)

    def _give_up(self, residues: list[Sequence], cells: int, *, shared: bool) -> bool:
        for sequence in residues:
            while sequence.handle.slot is not None and (shared or self._manager.exclusive_cells(sequence.handle)):
                self._park_piece(sequence)
                if self._manager.try_make_room(cells, save=self._saves_pay()):
                    return True
        return False

    def _residues(self, keep: Sequence | None) -> list[Sequence]:
        """Parked sequences that still hold cells, the last to resume first."""
        holding = [seq for seq in self._parked.values() if seq is not keep and seq.handle.slot is not None]
        return policy.resume_order(holding, self._missing)[::-1]

    def _park_one(self, now: float) -> bool:
        movable = [seq for seq in self._running if seq.id not in self._restores]
        victim = choose_victim(movable, self._config.victim_rule)
        if victim is None:
            return False
        self._park(victim, Shortage.CELLS, now)
        return True

    def _park(self, victim: Sequence, short: Shortage, now: float) -> None:
        """The victim stops. It keeps its cells until somebody needs them, then gives them up span by span."""
        planned = self._rows.pop(victim.id, None)
        if planned is not None:
            self._manager.give_back(victim.handle, len(planned.token_ids))
        self._manager.commit(victim.handle)
        self._running.remove(victim)
        self._parked[victim.id] = victim
        victim.yielded = False
        victim.parked_for = short
        victim.parked_length = self._manager.length(victim.handle)
        victim.become(SequenceStatus.PREEMPTED, now)
        self.preemptions += 1
        self._statuses.append(StatusEvent(victim.id, victim.status))
        if not self._manager.layout.keeps_residents:
            self._park_piece(victim)

    def _park_piece(self, sequence: Sequence) -> None:
        self._manager.park_piece(sequence.handle, save=self._saves_pay())
        sequence.num_computed_tokens = self._manager.length(sequence.handle)

    def _count_park(self, sequence: Sequence) -> None:
        """A park is over: what became of the state that the sequence had?"""
        match = self._manager.reach(sequence.handle, sequence.parked_length)
        if match.resident >= sequence.parked_length:
            self.meter.parks_kept += 1
        elif match.total >= sequence.parked_length:
            self.meter.parks_saved += 1
        else:
            self.meter.parks_requeued += 1

    def _saves_pay(self) -> bool:
        """Saving and restoring a token costs less than computing it again, as measured; or must be done anyway."""
        return self._config.can_save and (self._config.always_save or self._moving_ms < self.cost.ms_per_row)

    @property
    def _moving_ms(self) -> float:
        """Of one token, out and back."""
        return self.save_cost.ms_per_token + self.restore_cost.ms_per_token

    def _bound_idle(self) -> bool:
        """Idle prefixes leave that exceed their share of the pool, or that have cost what moving them costs."""
        save, limit, before = self._saves_pay(), self._config.cache_cells, self._manager.evicted_tokens
        price = self._moving_ms if save else self.cost.ms_per_row
        if limit is None:
            idle = self._manager.idle_cells
            limit = min(self._manager.n_cells // 4, idle - self._rent.due(idle, price))
        more = self._manager.bound_idle(limit, IDLE_PIECES_PER_STEP, save=save)
        self._rent.settle((self._manager.evicted_tokens - before) * price)
        return more

    # -- starting --------------------------------------------------------------------------------------------------

    def _missing(self, sequence: Sequence) -> int:
        return sequence.num_tokens - self._manager.length(sequence.handle)

    def _reusable(self, sequence: Sequence) -> int:
        return self._match(sequence).total

    def _could_displace(self) -> bool:
        if self._config.quantum:
            return True
        lowest = min(seq.request.priority for seq in self._running)
        return any(seq.request.priority > lowest for seq in [*self._waiting.values(), *self._parked.values()])

    def _try_displace(self, waiter: Sequence, short: Shortage, now: float) -> bool:
        """Parks a runner of lower priority, or for a slot one whose turn is over."""
        victim = choose_slot_victim(self._running, waiter, turns=short is Shortage.SLOTS)
        if victim is None or victim.id in self._restores:
            return False
        self._park(victim, short, now)
        self.meter.parked_for_turn += 1
        if victim.request.priority == waiter.request.priority:
            victim.yielded = True
            victim.order = self._arrivals
            self._arrivals += 1
        return True

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        if sequence.status is not SequenceStatus.WAITING or policy.is_overdue(sequence):
            return False
        reusable = self._match(sequence).total
        return policy.leader_of(sequence, self._running, reusable, sequence.reusable_limit) is not None

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """What the sequence could start from; walked once per change of the pool."""
        if sequence.handle.slot is not None:
            held = self._manager.length(sequence.handle)
            return PrefixMatch(held, None, held)
        if sequence.matched is None or sequence.matched[0] != self._manager.version:
            found = self._manager.match(sequence.handle.history, sequence.reusable_limit)
            sequence.matched = (self._manager.version, found)
        return sequence.matched[1]

    def _shortage(self, sequence: Sequence) -> Shortage | None:
        """What keeps the sequence from starting: all of it plus growth must fit beside what the others yet need."""
        match = self._match(sequence)
        residues = self._residues(sequence)
        if len(self._running) >= self._config.max_running:
            return Shortage.SLOTS
        if sequence.handle.slot is None and not residues and not self._manager.has_slot(keeping=match.source):
            return Shortage.SLOTS
        outstanding = sum(seq.behind for seq in self._running) - len(self._rows)
        growth = self._config.growth_cells if self._running else 0
        needed = outstanding + sequence.num_tokens - match.resident + growth
        needed = min(needed, self._manager.n_cells - match.resident)
        giving = [seq.handle for seq in residues]
        return None if self._manager.can_have(needed, giving=giving, keeping=match.source) else Shortage.CELLS

    def _open(self, sequence: Sequence) -> None:
        """Gives the sequence a slot and what it can share; a parked one gives up its slot where none is left."""
        match = self._match(sequence)
        for residue in self._residues(sequence):
            while not self._manager.has_slot(keeping=match.source) and residue.handle.slot is not None:
                self._park_piece(residue)
        self._manager.open(sequence.handle, match)
        sequence.num_computed_tokens = 0
        self.meter.resident_hit_tokens += sequence.advance_cached(match.resident)

    def _run(self, sequence: Sequence, now: float) -> None:
        resumed = self._parked.pop(sequence.id, None) is not None
        if resumed:
            self._count_park(sequence)
        if sequence.handle.slot is None:
            self._open(sequence)
        self._waiting.pop(sequence.id, None)
        policy.count_bypasses(sequence, [*self._waiting.values(), *self._parked.values()])
        sequence.become(SequenceStatus.RUNNING, now)
        sequence.bypassed = 0
        self._running.append(sequence)
        self._statuses.append(StatusEvent(sequence.id, sequence.status))
        if resumed:
            self.resumes += 1
            sequence.immune_until = sequence.num_output_tokens + IMMUNITY_TOKENS
        if self._config.quantum:
            sequence.turn_ends = sequence.num_output_tokens + self._config.quantum

    # -- catching up -----------------------------------------------------------------------------------------------

    def _try_restore(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Brings saved spans back, as many as the step has time for, one at least."""
        restored = 0
        while (match := self._manager.next_stored(sequence.handle, sequence.reusable_limit)) is not None:
            # All of the span comes in before it is cut to the part that is wanted.
            tokens = match.key.end - self._manager.length(sequence.handle)
            cost = tokens * self.restore_cost.ms_per_token
            if (restored and budget.left_ms < cost) or not self._try_obtain(tokens, keep=sequence):
                break
            restored += self._manager.plan_restore(sequence.handle, match)
            budget.spend(cost)
        if restored:
            self._restores[sequence.id] = restored
        return restored > 0

    def _plan_chunk(self, sequence: Sequence, budget: StepBudget, now: float) -> None:
        rows = sequence.until_checkpoint(budget.chunk(sequence.behind, sequence.num_computed_tokens))
        rows = min(rows, PROMPT_LOGITS_ROWS) if sequence.wants_prompt_rows else rows
        while rows > 0 and not self._try_obtain(rows, keep=sequence):
            if self._manager.free_cells > 0:
                rows = min(rows, self._manager.free_cells)
            elif not self._try_park_for_chunk(now) or sequence.status is not SequenceStatus.RUNNING:
                return
        if rows > 0:
            self._plan_rows(sequence, rows)
            budget.take_chunk(rows, sequence.num_computed_tokens + rows // 2)

    def _try_park_for_chunk(self, now: float) -> bool:
        parked = self._park_one(now)
        self.meter.parked_to_prefill += parked
        return parked

    def _plan_rows(self, sequence: Sequence, rows: int) -> None:
        slot = sequence.handle.slot
        assert slot is not None
        start = sequence.num_computed_tokens
        self._manager.grow(sequence.handle, rows)
        tokens = sequence.handle.history.token_ids[start : start + rows]
        samples = start + rows == sequence.num_tokens
        self._rows[sequence.id] = ScheduledRows(
            sequence.id, slot, start, tokens, samples, sequence.output_ids, sequence.wants_prompt_rows
        )

    # -- results ---------------------------------------------------------------------------------------------------

    def update(self, runner: RunnerOutput, ops: OpResults, now: float) -> StepOutcome:
        """Moves counters by what really happened; every accepted sequence gets exactly one FinishEvent in the end."""
        self._statuses = []
        self.meter.count(runner, ops, self._work.rows, self._prefill_rows)
        self._manager.acknowledge(ops.saved, ops.lost)
        self.save_cost.observe(ops.saved_tokens, ops.save_ms)
        self.restore_cost.observe(ops.restored_tokens, ops.restore_ms)
        self._settle_restores(ops.failed_slots, ops.disk_tokens_by_slot)
        tokens: list[TokenEvent] = []
        if runner.failure is not None:
            self._settle_failure(runner.failure.exhausted, runner.failure.message, now)
        elif self._rows:
            self.cost.observe(self._work, runner.decode_ms)
            self._rent.accrue(self._manager.idle_cells * len(self._rows) * self.cost.ms_per_cell)
            tokens = self._settle_rows(runner, ops.failed_slots, now)
        finished = self._apply_endings(now)
        self._handed_over = now if self._rows and self._sequences else None
        self._rows, self._restores = {}, {}
        return StepOutcome(tokens, finished, self._statuses)

    def _settle_restores(self, failed: frozenset[SlotId], from_disk: Mapping[SlotId, int]) -> None:
        for sequence in list(self._sequences.values()) if failed else []:
            if sequence.handle.slot in failed:
                self._forget(sequence, sequence.num_computed_tokens if sequence.id in self._restores else 0)
        for sequence_id, tokens in self._restores.items():
            sequence = self._sequences[sequence_id]
            slot = sequence.handle.slot
            if slot is not None and slot not in failed:
                hits = sequence.advance_cached(tokens)
                self.meter.stored_hit_tokens += hits
                if from_disk:
                    self.meter.disk_hit_tokens += min(hits, from_disk.get(slot, 0))
                self._manager.commit(sequence.handle)

    def _settle_rows(self, runner: RunnerOutput, failed: frozenset[SlotId], now: float) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for scheduled in self._rows.values():
            sequence = self._sequences[scheduled.sequence_id]
            if scheduled.slot in failed:
                continue
            before = sequence.high_water
            sequence.advance(len(scheduled.token_ids), cached=False)
            self.recomputed_tokens += min(before, sequence.num_computed_tokens) - min(before, scheduled.start)
            if sequence.num_computed_tokens <= sequence.num_prompt_tokens or len(scheduled.token_ids) > 1:
                self._manager.commit(sequence.handle)
            if sequence.num_computed_tokens in sequence.checkpoints:
                self._manager.checkpoint(sequence.handle)
            error = runner.sample_errors.get(sequence.id)
            if error is not None:
                self.end(sequence.id, error.reason, error.message)
            elif scheduled.samples:
                events += self._append(sequence, runner, now)
        return events

    def _append(self, sequence: Sequence, runner: RunnerOutput, now: float) -> list[TokenEvent]:
        """The sampled token and what a grammar makes follow it, up to a token that ends the output."""
        sampled = runner.tokens[sequence.id]
        sequence.quarantine = False
        sequence.failures = 0
        if sequence.handle.pins:
            self._manager.unpin(sequence.handle)
        events: list[TokenEvent] = []
        for token_id in (sampled.token_id, *sampled.forced):
            about_prompt = () if events else sampled.prompt_logprobs
            index = sequence.num_output_tokens
            events.append(TokenEvent(sequence.id, index, token_id, sampled.logprobs, about_prompt))
            sequence.append(token_id, now)
            reason = finish_reason_of(sequence.request, sequence.output_ids, self._eog_ids)
            if reason is not None:
                self._endings[sequence.id] = Ending(reason)
                break
        return events

    def _settle_failure(self, exhausted: bool, message: str, now: float) -> None:
        """No row counts. Short of cells: one more is parked. Else each one of the batch is tried again alone."""
        batch = [self._sequences[sequence_id] for sequence_id in self._rows]
        for sequence in batch:
            if exhausted:
                self._manager.give_back(sequence.handle, len(self._rows[sequence.id].token_ids))
            else:
                self._forget(sequence, sequence.num_computed_tokens if self._config.can_cut else 0)
            if len(batch) == 1 or not exhausted:
                sequence.failures += len(batch) == 1
                sequence.quarantine = not exhausted
            if sequence.failures > MAX_FAILURES:
                self.end(sequence.id, FinishReason.ERROR, message)
        if exhausted:
            self._rows = {}
            self._manager.clear_idle()
            self.meter.parked_exhausted += self._park_one(now)

    def _forget(self, sequence: Sequence, length: int) -> None:
        if sequence.handle.slot is None:
            return
        kept = min(length, sequence.num_computed_tokens)
        self._manager.forget(sequence.handle, kept)
        if kept < sequence.num_computed_tokens and sequence.first_token is None:
            sequence.num_cached_tokens = min(sequence.num_cached_tokens, kept)
            sequence.high_water = kept
        sequence.num_computed_tokens = kept

    def _endings_for_lack(self, growing: list[Sequence]) -> None:
        """Unreachable while max_model_len fits the pool; if it is not so, the client hears it."""
        for sequence in growing:
            self.end(sequence.id, FinishReason.ERROR, "the KV pool is too small for this sequence")

    # -- ends ------------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        if now < self._next_deadline:
            return
        self._next_deadline = float("inf")
        for sequence in self._sequences.values():
            deadline = sequence.request.deadline
            if deadline is None:
                continue
            if deadline <= now:
                self.end(sequence.id, FinishReason.DEADLINE)
            else:
                self._next_deadline = min(self._next_deadline, deadline)

    def _apply_endings(self, now: float) -> list[FinishEvent]:
        endings: Mapping[SequenceId, Ending] = self._endings
        self._endings = {}
        return [self._finish(self._sequences[sequence_id], ending, now) for sequence_id, ending in endings.items()]

    def _finish(self, sequence: Sequence, ending: Ending, now: float) -> FinishEvent:
        del self._sequences[sequence.id]
        self._waiting.pop(sequence.id, None)
        self._held.pop(sequence.id, None)
        if self._parked.pop(sequence.id, None) is not None:
            self._count_park(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        sequence.become(SequenceStatus.FINISHED, now)
        self._manager.commit(sequence.handle)
        self._manager.close(sequence.handle, keep=self._config.share_prefixes)
        return FinishEvent(sequence.id, sequence.num_output_tokens, ending.reason, sequence.usage(now), ending.message)

    def close(self, now: float) -> list[KVOp]:
        """Ends everything, with SHUTDOWN; only plan_flush() may follow."""
        for sequence_id in self._sequences:
            self.end(sequence_id, FinishReason.SHUTDOWN)
        self._apply_endings(now)
        return self._manager.take_ops()

    def plan_flush(self, pieces: int) -> tuple[list[KVOp], bool]:
        """Saves of idle prefixes that the store has not, the hottest first; and whether there are more."""
        more = self._saves_pay() and self._manager.plan_flush(pieces)
        return self._manager.take_ops(), more

    def settle_flush(self, results: OpResults) -> None:
        self._manager.acknowledge(results.saved, results.lost)

    # -- figures ---------------------------------------------------------------------------------------------------

    def pool_runs(self) -> list[PoolRun]:
        """Every used cell once, with the sequences whose slots hold it. For display, between steps."""
        owners = {seq.handle.slot: seq.id for seq in self._sequences.values()}
        return [
            PoolRun(slots, [owners[slot] for slot in slots if slot in owners], run.start, run.cells)
            for run in self._manager.pool_map()
            if (slots := sorted(run.holders))
        ]

    def progress(self) -> list[SequenceProgress]:
        """Of every live sequence. For display, between steps."""
        return [
            SequenceProgress(
                seq.id,
                seq.status,
                seq.num_computed_tokens,
                min(seq.num_cached_tokens, seq.num_prompt_tokens),
                seq.parked_for.value if seq.parked_for and seq.status is SequenceStatus.PREEMPTED else None,
            )
            for seq in self._sequences.values()
        ]

    def stats(
        self, runner: RunnerOutput, ops: OpResults, schedule_ms: float, *, ram_bytes: int, disk_bytes: int
    ) -> StepStats:
        """`ram_bytes`, `disk_bytes`: what the spill tiers hold."""
        return StepStats(
            step=self.steps,
            running=len(self._running),
            waiting=len(self._waiting) + len(self._held),
            preempted=len(self._parked),
            cells_total=self._manager.n_cells,
            cells_used=self._manager.used_cells,
            cells_cached=self._manager.idle_cells,
            cells_pinned=self._manager.parked_cells([seq.handle for seq in self._parked.values()]),
            ram_bytes=ram_bytes,
            disk_bytes=disk_bytes,
            rows=self._work.rows,
            prefill_rows=self._prefill_rows,
            schedule_ms=schedule_ms,
            move_ms=ops.ms,
            decode_ms=runner.decode_ms,
            sample_ms=runner.sample_ms,
            preemptions=self.preemptions,
            resumes=self.resumes,
            saved_bytes=ops.saved_bytes,
            restored_bytes=ops.restored_bytes,
            recomputed_tokens=self.recomputed_tokens,
            evicted_tokens=self._manager.evicted_tokens,
            totals=self.meter.totals(
                resumes=self.resumes,
                recomputed_tokens=self.recomputed_tokens,
                evicted_tokens=self._manager.evicted_tokens,
            ),
        )

    def check(self) -> None:
        """Asserts that counters and ledger agree; for tests, between steps."""
        meter = self.meter
        lanes = meter.parked_to_grow, meter.parked_to_prefill, meter.parked_exhausted, meter.parked_for_turn
        over = meter.parks_kept + meter.parks_saved + meter.parks_requeued
        assert self.preemptions == sum(lanes) == over + len(self._parked)
        for sequence in self._sequences.values():
            running = sequence.status is SequenceStatus.RUNNING
            assert running == (sequence in self._running)
            if sequence.handle.slot is not None:
                assert self._manager.length(sequence.handle) == sequence.num_computed_tokens
        self._manager.check()
