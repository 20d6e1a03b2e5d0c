"""Planned failures of a runtime, for tests. Knows the Runtime protocol and the errors it may raise; no engine.

A plan is text, so that it fits in a setting (`fault_plan`) and reaches an engine process:

    plan   = fault { ";" fault }
    fault  = [ epoch ":" ] when "=" action [ "(" argument ")" ]
    when   = op "@" n        the n-th call of op, from 1
           | op "@" n "+"    the n-th call and every later one
           | op "%" n        every n-th call
           | "poison" "=" id any decode whose batch holds token `id`
    op     = decode | save | restore | copy | merge | trim | drop
    action = exhausted       KVExhausted, nothing changed                     (decode, copy, restore)
           | fail            decode: DecodeFailed with the first half of the rows in, `fail(n)`: with n rows in;
                             other ops: RuntimeFailure, nothing changed
           | enospc          RuntimeFailure that names the full disk, nothing changed
           | reject          StateRejected, nothing changed                   (restore)
           | corrupt         the saved or restored bytes have a broken head   (save, restore)
           | truncate        the saved or restored bytes are cut in half      (save, restore)
           | flip            one bit near the end of the bytes differs        (save, restore): only a checksum sees it
           | slow(seconds)   the call takes that much longer
           | hang            the call never returns
           | abort | exit    the process dies: by a signal, or at once with code 70

`decode@5=fail; save@1=enospc; poison=77=abort` fails the fifth decode, the first save and dies whenever token 77 is
computed. `1:decode@5=abort` dies in engine epoch 1 only, so the restarted engine lives. The first match wins.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from millpond.errors import ConfigError, DecodeFailed, KVExhausted, RuntimeFailure, StateRejected
from millpond.outputs import ModelInfo
from millpond.runtime.base import Batch, Candidates, ContextLimits, Logits, Runtime, Vocab
from millpond.types import SlotId, TokenId

_EVERYWHERE = frozenset({"fail", "enospc", "slow", "hang", "abort", "exit"})
_BYTES = frozenset({"corrupt", "truncate", "flip"})
_ACTIONS: dict[str, frozenset[str]] = {
    "decode": _EVERYWHERE | {"exhausted"},
    "save": _EVERYWHERE | _BYTES,
    "restore": _EVERYWHERE | _BYTES | {"exhausted", "reject"},
    "copy": _EVERYWHERE | {"exhausted"},
    "merge": _EVERYWHERE,
    "trim": _EVERYWHERE,
    "drop": _EVERYWHERE,
}
_FAULT = re.compile(
    r"(?:(?P<epoch>\d+):)?"
    r"(?:poison=(?P<poison>\d+)|(?P<op>[a-z]+)(?:@(?P<at>\d+)(?P<later>\+?)|%(?P<every>\d+)))"
    r"=(?P<action>[a-z]+)(?:\((?P<argument>\d+(?:\.\d+)?)\))?"
)
INJECTED_RETURN_CODE = -3
EXIT_CODE = 70


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of a plan. `poison` excludes a count; otherwise exactly one of `at`, `since` and `every` is set."""

    op: str
    action: str
    argument: float | None = None
    at: int | None = None
    since: int | None = None
    every: int | None = None
    poison: TokenId | None = None
    epoch: int | None = None
    """None: in every engine process."""

    def matches(self, op: str, call: int, token_ids: Sequence[TokenId]) -> bool:
        if op != self.op:
            return False
        if self.poison is not None:
            return self.poison in token_ids
        if self.since is not None:
            return call >= self.since
        if self.every is not None:
            return call % self.every == 0
        return call == self.at


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What will go wrong, as a value; the empty plan is the default everywhere."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str, *, epoch: int = 1) -> FaultPlan:
        """The faults of `text` that apply to this engine process. Raises ConfigError for text outside the grammar."""
        parsed = (_parse_fault(part.strip()) for part in text.split(";") if part.strip())
        return cls(tuple(fault for fault in parsed if fault.epoch is None or fault.epoch == epoch))


def _parse_fault(text: str) -> Fault:
    match = _FAULT.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ConfigError("fault_plan", f"cannot read {text!r}")
    op, action, argument = match["op"] or "decode", match["action"], match["argument"]
    if action not in _ACTIONS.get(op, frozenset()):
        raise ConfigError("fault_plan", f"{text!r}: {op} has no {action}")
    if action == "slow" and argument is None:
        raise ConfigError("fault_plan", f"{text!r}: slow needs seconds, slow(0.1)")
    at, every = _number(match["at"]), _number(match["every"])
    if at == 0 or every == 0:
        raise ConfigError("fault_plan", f"{text!r}: calls count from 1")
    return Fault(
        op=op,
        action=action,
        argument=None if argument is None else float(argument),
        at=None if match["later"] else at,
        since=at if match["later"] else None,
        every=every,
        poison=_number(match["poison"]),
        epoch=_number(match["epoch"]),
    )


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def hang_forever() -> None:
    threading.Event().wait()


def exit_now() -> None:
    os._exit(EXIT_CODE)


@dataclass(frozen=True, slots=True)
class FaultEffects:
    """What the drastic actions do; a test in one process puts its own callables here."""

    abort: Callable[[], object] = os.abort
    exit: Callable[[], object] = exit_now
    hang: Callable[[], object] = hang_forever
    sleep: Callable[[float], object] = time.sleep


@dataclass(slots=True)
class FaultInjector:
    """Runs a runtime's calls and lets the planned ones fail. Counts calls; one injector serves one runtime."""

    plan: FaultPlan
    effects: FaultEffects = field(default_factory=FaultEffects)
    calls: dict[str, int] = field(default_factory=dict[str, int])
    """Calls so far by op."""
    fired: list[Fault] = field(default_factory=list[Fault])
    """Faults that struck, in order."""

    def decode(self, run: Callable[[Batch], None], batch: Batch) -> None:
        fault = self._next("decode", batch)
        if fault is None:
            return run(batch)
        if fault.action == "fail":
            self._fail_half_way(run, batch, fault)
        self._apply(fault)
        return run(batch)

    def save(self, run: Callable[[SlotId, int, int], bytes], slot: SlotId, start: int, end: int) -> bytes:
        fault = self._next("save")
        self._apply(fault)
        return _damaged(run(slot, start, end), fault)

    def restore(
        self, run: Callable[[SlotId, int, int, bytes], None], slot: SlotId, start: int, end: int, data: bytes
    ) -> None:
        fault = self._next("restore")
        self._apply(fault)
        run(slot, start, end, _damaged(data, fault))

    def move(self, op: str, run: Callable[..., None], *arguments: Any) -> None:
        """copy, merge, trim and drop."""
        self._apply(self._next(op))
        run(*arguments)

    def _next(self, op: str, batch: Batch | None = None) -> Fault | None:
        if not self.plan.faults:
            return None
        call = self.calls[op] = self.calls.get(op, 0) + 1
        token_ids: Sequence[TokenId] = () if batch is None else batch.token_ids.tolist()
        fault = next((fault for fault in self.plan.faults if fault.matches(op, call, token_ids)), None)
        if fault is not None:
            self.fired.append(fault)
        return fault

    def _apply(self, fault: Fault | None) -> None:
        """Raises or delays; actions on bytes are left to _damaged."""
        if fault is None or fault.action in _BYTES:
            return
        match fault.action:
            case "slow":
                self.effects.sleep(fault.argument or 0.0)
            case "hang":
                self.effects.hang()
            case "abort":
                self.effects.abort()
            case "exit":
                self.effects.exit()
            case _:
                _raise_planned(fault)

    def _fail_half_way(self, run: Callable[[Batch], None], batch: Batch, fault: Fault) -> NoReturn:
        rows = len(batch) // 2 if fault.argument is None else min(int(fault.argument), len(batch))
        if rows > 0:
            run(_first_rows(batch, rows))
        raise DecodeFailed(f"injected: {rows} of {len(batch)} rows are in", return_code=INJECTED_RETURN_CODE)


def _raise_planned(fault: Fault) -> NoReturn:
    match fault.action:
        case "exhausted":
            raise KVExhausted(f"injected: no cell free ({fault.op})")
        case "reject":
            raise StateRejected("injected: the saved bytes were not taken")
        case "enospc":
            raise RuntimeFailure(f"injected: no space left on device ({fault.op})")
        case _:
            raise RuntimeFailure(f"injected: {fault.op} failed")


def _first_rows(batch: Batch, rows: int) -> Batch:
    return Batch(batch.token_ids[:rows], batch.positions[:rows], batch.slots[:rows], batch.wants_logits[:rows])


def _damaged(data: bytes, fault: Fault | None) -> bytes:
    if fault is None or fault.action not in _BYTES or not data:
        return data
    if fault.action == "truncate":
        return data[: len(data) // 2]
    broken = bytearray(data)
    if fault.action == "corrupt":
        broken[:16] = bytes(byte ^ 0xFF for byte in broken[:16])
    else:
        broken[len(broken) - 1 - len(broken) // 8] ^= 0x10
    return bytes(broken)


class FaultyRuntime:
    """Any Runtime with planned failures around it; otherwise the inner runtime's behaviour, promise for promise."""

    def __init__(self, inner: Runtime, plan: FaultPlan, *, effects: FaultEffects | None = None) -> None:
        self._inner = inner
        self._injector = FaultInjector(plan, effects or FaultEffects())

    @property
    def injector(self) -> FaultInjector:
        return self._injector

    @property
    def model(self) -> ModelInfo:
        return self._inner.model

    @property
    def limits(self) -> ContextLimits:
        return self._inner.limits

    @property
    def vocab(self) -> Vocab:
        return self._inner.vocab

    @property
    def candidates(self) -> Candidates:
        return self._inner.candidates

    def decode(self, batch: Batch) -> None:
        self._injector.decode(self._inner.decode, batch)

    def logits(self, row: int) -> Logits:
        return self._inner.logits(row)

    def copy(self, source: SlotId, target: SlotId, end: int) -> None:
        self._injector.move("copy", self._inner.copy, source, target, end)

    def merge(self, source: SlotId, target: SlotId, start: int, end: int) -> None:
        self._injector.move("merge", self._inner.merge, source, target, start, end)

    def trim(self, slot: SlotId, end: int) -> None:
        self._injector.move("trim", self._inner.trim, slot, end)

    def drop(self, slot: SlotId) -> None:
        self._injector.move("drop", self._inner.drop, slot)

    def span(self, slot: SlotId) -> tuple[int, int] | None:
        return self._inner.span(slot)

    def save(self, slot: SlotId, start: int, end: int) -> bytes:
        return self._injector.save(self._inner.save, slot, start, end)

    def restore(self, slot: SlotId, start: int, end: int, data: bytes) -> None:
        self._injector.restore(self._inner.restore, slot, start, end, data)

    def close(self) -> None:
        self._inner.close()
