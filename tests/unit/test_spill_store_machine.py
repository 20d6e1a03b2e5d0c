"""Random histories of a RAM + disk store against a dict: budgets, exact bytes, no silent loss.

The model knows what was put and not yet reported lost. Faults are injected by rules; only then may PARKED state go.
"""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from spill_faults import HEADER_BYTES, FaultyFiles, ManualClock, key_of, open_disk, span_files

from millpond.kvcache.payload import SpanKey, SpanKind
from millpond.spill.instance import InstanceLock
from millpond.spill.ram import ENTRY_OVERHEAD_BYTES, RamTier
from millpond.spill.store import SpillStore

PARKED, PREFIX = SpanKind.PARKED, SpanKind.PREFIX
UNIT = 600
RAM_BUDGET = 3 * (UNIT + ENTRY_OVERHEAD_BYTES)
DISK_BUDGET = 4 * (UNIT + HEADER_BYTES)
WAIT = 20.0

keys = st.integers(0, 9).map(key_of)
kinds = st.sampled_from(SpanKind)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.lock = InstanceLock.try_hold(self.root, "server-1")
        self.clock = ManualClock()
        self.files = FaultyFiles()
        self.held: dict[SpanKey, bytes] = {}
        self.parked: set[SpanKey] = set()
        self.may_go: set[SpanKey] = set()
        """Keys a fault was injected into: even PARKED they may be lost."""
        self.version = 0
        self.open()

    def open(self) -> None:
        self.ram = RamTier(RAM_BUDGET)
        self.disk = open_disk(self.root, DISK_BUDGET, clock=self.clock, files=self.files, queue_bytes=3 * UNIT)
        self.store = SpillStore([self.ram, self.disk])

    def teardown(self) -> None:
        self.files.gate.set()
        self.store.close(WAIT)
        assert self.lock is not None
        self.lock.release()
        self.folder.cleanup()

    @property
    def is_stopped(self) -> bool:
        return not self.files.gate.is_set()

    def settle(self) -> None:
        """Lets the writer finish, then takes what was lost into the model."""
        if not self.is_stopped:
            assert self.store.flush(WAIT)
        self.take_lost()

    def take_lost(self) -> list[SpanKey]:
        lost = self.store.take_lost()
        assert len(lost) == len(set(lost))
        for key in lost:
            assert key not in self.store
            assert key in self.held, "reported, but never held or already reported"
            assert key not in self.parked or key in self.may_go, "parked state lost without a fault"
            del self.held[key]
            self.parked.discard(key)
            self.may_go.discard(key)
        return lost

    # --- what callers do ---

    @rule(key=keys, kind=kinds, size=st.integers(0, UNIT))
    def put(self, key: SpanKey, kind: SpanKind, size: int) -> None:
        self.version += 1
        data = self.version.to_bytes(4, "little") * (size // 4)
        known, could = key in self.store, self.store.can_take(len(data), kind)
        taken = self.store.put(key, kind, data)
        assert taken is (known or could)
        if taken and not known:
            self.held[key] = data
            self.parked.discard(key)
            self.may_go.discard(key)
        if taken and kind is PARKED:
            self.parked.add(key)
        if self.files.fail:
            self.may_go |= set(self.held)
        self.settle()

    @rule(key=keys)
    def get(self, key: SpanKey) -> None:
        data = self.store.get(key)
        if data is not None:
            assert data == self.held[key]
        elif key in self.held:
            assert key in self.take_lost()
        self.settle()

    @rule(key=keys, kind=kinds)
    def set_kind(self, key: SpanKey, kind: SpanKind) -> None:
        self.store.set_kind(key, kind)
        if key in self.held:
            (self.parked.add if kind is PARKED else self.parked.discard)(key)
        self.settle()

    @rule(key=keys)
    def discard(self, key: SpanKey) -> None:
        self.store.discard(key)
        self.held.pop(key, None)
        self.parked.discard(key)
        self.may_go.discard(key)
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    # --- what the world does ---

    @precondition(lambda self: not self.is_stopped)
    @rule()
    def stop_writer(self) -> None:
        self.files.gate.clear()

    @precondition(lambda self: self.is_stopped)
    @rule()
    def start_writer(self) -> None:
        self.files.gate.set()
        self.settle()

    @precondition(lambda self: not self.is_stopped and not self.files.fail)
    @rule(
        operation=st.sampled_from(["write", "make_folder"]),
        code=st.sampled_from([errno.ENOSPC, errno.EACCES, errno.EIO]),
        torn=st.sampled_from([None, 0, 50, HEADER_BYTES + 1]),
    )
    def break_disk(self, operation: str, code: int, torn: int | None) -> None:
        self.files.fail[operation] = code
        self.files.tear_after = torn
        self.may_go |= set(self.held)

    @precondition(lambda self: not self.is_stopped and self.files.fail)
    @rule()
    def repair_disk(self) -> None:
        self.files.fail.clear()

    @precondition(lambda self: not self.is_stopped)
    @rule(data=st.data())
    def damage_file(self, data: st.DataObject) -> None:
        names = sorted(name for name in span_files(self.root) if not name.startswith("quarantine"))
        if not names:
            return
        path = self.root / data.draw(st.sampled_from(names))
        raw = bytearray(path.read_bytes())
        if not raw:
            return
        if data.draw(st.booleans()):
            raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
        else:
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        self.may_go |= {key for key in self.held if path.name.startswith(key.name)}

    @precondition(lambda self: not self.is_stopped and not self.files.fail)
    @rule()
    def restart_engine(self) -> None:
        on_disk, damaged = set(self.disk.held_keys()), set(self.may_go)
        self.store.close(WAIT)
        self.open()
        assert self.store.flush(WAIT)
        found = set(self.store.held_keys())
        assert on_disk - damaged <= found <= on_disk
        assert self.store.take_lost() == []
        self.held = {key: data for key, data in self.held.items() if key in found}
        self.parked.clear()
        self.may_go &= found

    # --- what is always true ---

    @invariant()
    def budgets_hold(self) -> None:
        assert self.ram.used_bytes <= RAM_BUDGET
        assert self.disk.used_bytes <= DISK_BUDGET
        if not self.is_stopped:
            assert self.store.flush(WAIT)
            assert sum(span_files(self.root).values()) <= DISK_BUDGET

    @invariant()
    def nothing_is_lost_silently(self) -> None:
        self.take_lost()
        assert set(self.store.held_keys()) == set(self.held)

    @invariant()
    def counts_agree(self) -> None:
        tiers = self.store.stats().tiers
        assert sum(tier.parked_entries for tier in tiers) == len(self.parked)
        assert sum(tier.parked_entries + tier.prefix_entries for tier in tiers) == len(self.held)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
