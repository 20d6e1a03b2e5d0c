"""Sums of what steps cost and moved since the engine started. PURE: adds values it is given, one call a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from millpond.outputs import StepTotals
from millpond.scheduler.output import OpResults, RunnerOutput


@dataclass(slots=True)
class StepMeter:
    """Changed by the scheduler and by `count`, once a step; `totals` reads it. Meanings as in StepTotals."""

    steps: int = 0
    rows: int = 0
    prefill_rows: int = 0
    schedule_ms: float = 0.0
    move_ms: float = 0.0
    decode_ms: float = 0.0
    sample_ms: float = 0.0
    emit_ms: float = 0.0
    save_ms: float = 0.0
    restore_ms: float = 0.0
    saved_tokens: int = 0
    saved_bytes: int = 0
    saved_disk_bytes: int = 0
    restored_tokens: int = 0
    disk_tokens: int = 0
    restored_bytes: int = 0
    restored_disk_bytes: int = 0
    failed_moves: int = 0
    failed_restores: int = 0
    decode_failures: int = 0
    parked_to_grow: int = 0
    parked_to_prefill: int = 0
    parked_exhausted: int = 0
    parked_for_turn: int = 0
    resident_hit_tokens: int = 0
    stored_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    parks_kept: int = 0
    parks_saved: int = 0
    parks_requeued: int = 0

    def count(self, runner: RunnerOutput, ops: OpResults, rows: int, prefill_rows: int) -> None:
        """One step's work."""
        self.steps += 1
        self.rows += rows
        self.prefill_rows += prefill_rows
        self.decode_ms += runner.decode_ms
        self.sample_ms += runner.sample_ms
        if runner.failure is not None:
            self.decode_failures += 1
        if ops.ms:
            self.move_ms += ops.ms
            self.save_ms += ops.save_ms
            self.restore_ms += ops.restore_ms
            self.saved_tokens += ops.saved_tokens
            self.saved_bytes += ops.saved_bytes
            self.saved_disk_bytes += ops.saved_disk_bytes
            self.restored_tokens += ops.restored_tokens
            self.disk_tokens += ops.disk_tokens
            self.restored_bytes += ops.restored_bytes
            self.restored_disk_bytes += ops.restored_disk_bytes
            self.failed_moves += len(ops.failed_slots)
            self.failed_restores += ops.failed_restores

    def totals(self, *, resumes: int, recomputed_tokens: int, evicted_tokens: int) -> StepTotals:
        return StepTotals(
            **asdict(self),
            resumes=resumes,
            recomputed_tokens=recomputed_tokens,
            evicted_tokens=evicted_tokens,
        )
