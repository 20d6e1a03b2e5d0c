"""Settings that may make outputs exact, the checks that decide, and what came of them. Values only; runs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from millpond.runtime.base import ContextParams

FULL_ROWS = ContextParams(n_cells=1, n_slots=1).n_ubatch + 1
"""The most rows that a default context computes in one pass."""
KV_CANDIDATES = (("f16", "f16"), ("f16", "bf16"), ("q8_0", "q8_0"))


class Check(Enum):
    """In the order they run: a trial ends at the first one that is not exact, except REPREFILL."""

    BATCH = "batch"
    """A row decoded beside others equals the same row decoded alone."""
    RESTORE = "restore"
    """A state saved and restored into another slot goes on as the original."""
    CHUNK = "chunk"
    """A prompt prefilled in odd chunks equals one prefilled whole."""
    MIXED = "mixed"
    """Decode rows and prefill rows in one batch equal each alone."""
    REPREFILL = "re-prefill"
    """A history computed in one chunk equals the same history decoded token by token."""


@dataclass(frozen=True, slots=True)
class ExactSettings:
    """How the engine must load model and context, always with separate KV streams."""

    kv_type_k: str
    kv_type_v: str
    use_extra_bufts: bool
    """False: weights are not repacked."""
    pass_rows: int = FULL_ROWS
    """The most rows of one pass through the model; a longer prefill chunk takes several."""
    restore_only: bool = False
    """Re-prefilling is not exact but restoring is: parked sequences must be saved."""

    @property
    def kv_types(self) -> tuple[str, str]:
        return (self.kv_type_k, self.kv_type_v)

    def describe(self) -> str:
        """For people: `f16/bf16, no repacking, 4 rows a pass`."""
        parts = [f"{self.kv_type_k}/{self.kv_type_v}"]
        if not self.use_extra_bufts:
            parts.append("no repacking")
        if self.pass_rows != FULL_ROWS:
            parts.append(f"{self.pass_rows} {'row' if self.pass_rows == 1 else 'rows'} a pass")
        if self.restore_only:
            parts.append("parked sequences saved")
        return ", ".join(parts)


NARROW = (
    ExactSettings("f16", "bf16", False, pass_rows=7),
    ExactSettings("f16", "bf16", False, pass_rows=4),
    ExactSettings("f16", "f16", True, pass_rows=1),
)
"""Tried where nothing at full width is exact: kernels of wide products start at 8 or 4 rows, or at the second one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    check: Check
    exact: bool
    """Every logit of every row compared is equal bit for bit."""
    largest_difference: float
    """Between two logits of the same token; 0.0 when exact."""
    rows: int
    """Rows of logits compared."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one sequence alone, as measured in the trial."""

    prefill_tokens_per_second: float
    decode_ms: float
    """Milliseconds a token."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the checks said of one candidate."""

    settings: ExactSettings
    verdicts: tuple[Verdict, ...] = ()
    speed: Speed | None = None
    longest_view: int = 0
    """Cells that the longest history compared held."""
    failure: str = ""
    """Why the candidate could not be tried to the end."""

    def verdict(self, check: Check) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if verdict.check is check), None)

    def is_exact(self, checks: Iterable[Check] = Check) -> bool:
        found = [self.verdict(check) for check in checks]
        return not self.failure and all(verdict is not None and verdict.exact for verdict in found)

    @property
    def qualified(self) -> ExactSettings | None:
        """The settings that this trial allows, or None."""
        if self.is_exact():
            return self.settings
        if self.is_exact(check for check in Check if check is not Check.REPREFILL):
            plain = self.settings
            return ExactSettings(
                plain.kv_type_k, plain.kv_type_v, plain.use_extra_bufts, plain.pass_rows, restore_only=True
            )
        return None

    @property
    def reason(self) -> str:
        """Why it is not exact; empty when it is."""
        if self.failure:
            return self.failure
        wrong = [verdict for verdict in self.verdicts if not verdict.exact]
        return "; ".join(f"{verdict.check.value} differs by {verdict.largest_difference:.2g}" for verdict in wrong)


@dataclass(frozen=True, slots=True)
class Qualification:
    """Of one model file, library build and thread count. `trials` in the order they ran."""

    model_digest: str
    library: str
    threads: int
    trials: tuple[Trial, ...] = ()

    @property
    def chosen(self) -> ExactSettings | None:
        return self.choose()

    def choose(self, kv_type_k: str | None = None, kv_type_v: str | None = None) -> ExactSettings | None:
        """The cheapest settings that qualified, among the candidates for the KV types named; None: none of them did.

        One that is fully exact goes before one that is only while parked sequences are saved.
        """
        allowed = candidates(kv_type_k, kv_type_v)
        fitting = [trial.qualified for trial in self.trials if trial.settings in allowed]
        found = [settings for settings in fitting if settings is not None]
        return min(found, key=_cost, default=None)

    def trial_of(self, settings: ExactSettings) -> Trial | None:
        return next((trial for trial in self.trials if trial.settings == settings), None)


def candidates(kv_type_k: str | None = None, kv_type_v: str | None = None) -> list[ExactSettings]:
    """Cheapest first. Named KV types replace the list's own, and are not tried with narrow passes."""
    named = kv_type_k is not None or kv_type_v is not None
    pairs = [pair for pair in KV_CANDIDATES if _allows(pair, kv_type_k, kv_type_v)]
    if named and not pairs:
        pairs = [(kv_type_k or "f16", kv_type_v or kv_type_k or "f16")]
    wide = [ExactSettings(*pair, use_extra_bufts) for use_extra_bufts in (True, False) for pair in pairs]
    if named:
        return wide
    return [*wide, *NARROW]


def _allows(pair: tuple[str, str], kv_type_k: str | None, kv_type_v: str | None) -> bool:
    return kv_type_k in (None, pair[0]) and kv_type_v in (None, pair[1])


def _cost(settings: ExactSettings) -> tuple[bool, int, bool, int]:
    pair = settings.kv_types
    place = KV_CANDIDATES.index(pair) if pair in KV_CANDIDATES else len(KV_CANDIDATES)
    return (settings.restore_only, -settings.pass_rows, not settings.use_extra_bufts, place)
