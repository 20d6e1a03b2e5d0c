"""Receipts: what they hold, the chain and what breaks it, drops, retention, replay."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from scripted_engine import undisturbed
from test_engine_client_logbook import Clock, SimulatedEngine, request

from millpond.engine_client.logbook import LogBook
from millpond.errors import CallerError, ConfigError
from millpond.receipts.chain import verify
from millpond.receipts.receipt import GENESIS, EngineFacts, Receipt, decode_receipt, encode_receipt, params_of
from millpond.receipts.recorder import ReceiptRecorder, Retention
from millpond.receipts.replay import Difference, first_difference, replay, request_of
from millpond.receipts.store import NewEnd, ReceiptStore, opened
from millpond.types import FinishReason, SequenceId

FACTS = EngineFacts("m", "d" * 64, "lib", "0.1", True, "f32", "f32", 1024, 4, 512, True)


@dataclass
class Scene:
    """A log book, a simulated engine and a recorder."""

    path: Path
    retention: Retention = field(default_factory=Retention)
    queue_rows: int = 4096
    run: str = "run-1"
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.recorder = ReceiptRecorder(
            self.path,
            self.run,
            wall=lambda: self.clock.now + 1e9,
            monotonic=self.clock,
            engine=lambda: FACTS,
            retention=self.retention,
            queue_rows=self.queue_rows,
        )
        self.book = LogBook(frozenset({2}), self.clock, self.recorder)
        self.engine = SimulatedEngine()
        self.book.attach(self.engine.send)

    def run_all(self, *lengths: int) -> None:
        logs = [self.book.open(request(length, seed=length)) for length in lengths]
        while self.book.live:
            self.engine.announce()
            self.clock.now += 0.5
            assert self.book.apply(self.engine.step()) is None
        for log in logs:
            self.recorder.on_delivered(log, len(log.ids), FinishReason.LENGTH)


@contextmanager
def scene(path: Path, **options) -> Iterator[Scene]:
    made = Scene(path, **options)
    with closing(made.recorder):
        yield made


def receipts_in(path: Path) -> list[Receipt]:
    with opened(path) as store:
        return [decode_receipt(row.body) for row in store.ends()]


def test_a_receipt_says_what_was_asked_and_what_came(tmp_path: Path):
    path = tmp_path / "r.db"
    with scene(path) as made:
        made.run_all(3)
    [receipt] = receipts_in(path)
    asked = request(3, seed=3)
    assert receipt.prompt_ids == list(asked.prompt_ids)
    assert receipt.output_ids == undisturbed(asked)
    assert (receipt.reason, receipt.told, receipt.generated, receipt.delivered) == ("length", "length", 3, 3)
    assert (receipt.seed, receipt.max_tokens, receipt.request_id, receipt.run) == (3, 3, "r", "run-1")
    assert (receipt.accepted_at, receipt.ended_at) == (1e9 + 1000.0, 1e9 + 1001.5)
    assert (receipt.cached_tokens, receipt.computed_tokens) == (1, 1)
    assert receipt.engine == FACTS and receipt.complete
    assert params_of(receipt) == asked.params
    with opened(path) as store:
        assert store.unfinished() == []


def test_what_a_stop_string_cut_is_generated_and_not_delivered(tmp_path: Path):
    path = tmp_path / "r.db"
    with scene(path) as made:
        log = made.book.open(request(9))
        for _ in range(5):
            made.engine.announce()
            made.book.apply(made.engine.step())
        made.book.end(log.sequence_id, FinishReason.STOP, 2)
        made.book.finish_all(FinishReason.SHUTDOWN)
        made.recorder.on_delivered(log, 2, FinishReason.STOP)
    [receipt] = receipts_in(path)
    assert (len(receipt.output_ids), receipt.generated, receipt.delivered, receipt.reason) == (2, 5, 2, "stop")


@pytest.mark.parametrize("given_up_first", [True, False])
def test_a_stream_that_was_given_up(given_up_first: bool, tmp_path: Path):
    path = tmp_path / "r.db"
    with scene(path) as made:
        log = made.book.open(request(9))
        if given_up_first:
            made.recorder.on_delivered(log, 0, None)
        made.book.finish_all(FinishReason.CANCELLED)
        if not given_up_first:
            made.recorder.on_delivered(log, 0, None)
    [receipt] = receipts_in(path)
    assert (receipt.reason, receipt.told, receipt.delivered) == ("cancelled", None, 0)


def test_an_end_whose_delivery_nobody_tells_is_written_at_the_close(tmp_path: Path):
    path = tmp_path / "r.db"
    with scene(path) as made:
        made.book.open(request(9))
        made.book.finish_all(FinishReason.SHUTDOWN)
    [receipt] = receipts_in(path)
    assert (receipt.delivered, receipt.told) == (None, None)


def test_a_killed_server_leaves_the_beginning(tmp_path: Path):
    path = tmp_path / "r.db"
    with scene(path) as made:
        made.book.open(request(9))
    with opened(path) as store:
        assert [begin.request_id for begin in store.unfinished()] == ["r"]
        assert list(store.ends()) == []


def filled(path: Path, count: int = 6) -> None:
    with scene(path) as made:
        made.run_all(*range(1, count + 1))


def verdict_of(path: Path, head: str | None = None):
    with opened(path) as store:
        return verify(store.ends(), store.anchor(), head=head)


def test_the_chain_holds_over_several_servers(tmp_path: Path):
    path = tmp_path / "r.db"
    filled(path)
    noted = verdict_of(path).head
    with scene(path, run="run-2") as made:
        made.run_all(4)
    verdict = verdict_of(path, noted)
    assert (verdict.holds, verdict.count) == (True, 7)
    assert verdict.head != noted


def tampered(path: Path, statement: str, *values) -> tuple[str, ...]:
    with closing(sqlite3.connect(path)) as db:
        db.execute(statement, values)
        db.commit()
    return verdict_of(path).problems


def test_a_changed_output_is_found(tmp_path: Path):
    path = tmp_path / "r.db"
    filled(path)
    with opened(path) as store:
        row = list(store.ends())[2]
    receipt = decode_receipt(row.body)
    forged = msgspec.structs.replace(receipt, output_ids=[7, *receipt.output_ids[1:]])
    problems = tampered(path, "UPDATE ends SET body = ? WHERE number = 3", encode_receipt(forged))
    assert problems == ("receipt 3 was changed: its content does not have its hash",)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE ends SET hash = 'x' WHERE number = 2", "receipt 2 was changed"),
        ("UPDATE ends SET previous = 'x' WHERE number = 2", "receipt 2 does not follow"),
        ("UPDATE ends SET request_id = 'other' WHERE number = 2", "receipt 2: its columns"),
        ("UPDATE ends SET ended_at = 1.0 WHERE number = 2", "receipt 2: its columns"),
        ("DELETE FROM ends WHERE number = 2", "receipt 3 does not follow"),
        ("DELETE FROM ends WHERE number = 1", "receipt 2 does not follow"),
        ("UPDATE ends SET number = 9 WHERE number = 2", "receipt 3 does not follow"),
        ("INSERT INTO ends SELECT 9, run, sequence, request_id, ended_at, body, previous, hash FROM ends", "UNIQUE"),
    ],
)
def test_other_changes_are_found(statement: str, words: str, tmp_path: Path):
    path = tmp_path / "r.db"
    filled(path)
    if words == "UNIQUE":
        statement += " WHERE number = 2"
        words = "receipt 9 does not follow"
    assert any(words in problem for problem in tampered(path, statement))


def test_a_cut_tail_is_found_by_a_noted_head(tmp_path: Path):
    path = tmp_path / "r.db"
    filled(path)
    noted = verdict_of(path).head
    assert tampered(path, "DELETE FROM ends WHERE number = 6") == ()
    assert "no receipt has the hash" in verdict_of(path, noted).problems[0]


def test_age_takes_the_oldest_away_and_the_chain_still_holds(tmp_path: Path):
    path = tmp_path / "r.db"
    filled(path, 3)
    with scene(path, run="run-2", retention=Retention(days=1.0)) as made:
        made.clock.now += 2 * 86400.0
        made.run_all(5)
    with opened(path) as store:
        assert [row.run for row in store.ends()] == ["run-2"]
        assert store.anchor() != GENESIS
    assert verdict_of(path).holds


def test_size_takes_the_oldest_away_and_the_file_shrinks(tmp_path: Path):
    path = tmp_path / "r.db"
    with closing(ReceiptStore.open(path, create=True)) as store, store.transaction():
        store.add_ends([NewEnd("old", number, "r", 1.0, b"x" * 4096) for number in range(1000)])
    before = path.stat().st_size
    with scene(path, retention=Retention(mib=1)) as made:
        made.run_all(2)
    with opened(path) as store:
        rows = list(store.ends())
        assert store.used_bytes() <= 1024 * 1024
        assert rows[-1].run == "run-1" and 50 < len(rows) < 1000
        assert rows[0].previous == store.anchor()
    assert path.stat().st_size < before


def test_when_the_writer_is_behind_rows_are_dropped_counted_and_the_receipt_says_so(tmp_path: Path):
    path = tmp_path / "r.db"
    with closing(ReceiptStore.open(path, create=True)) as blocker, scene(path, queue_rows=2) as made:
        with blocker.transaction():
            made.run_all(1)
            while made.recorder._queue.qsize():
                pass
            logs = [made.book.open(request(1, seed=seed)) for seed in range(4)]
            assert made.recorder.dropped == 2
        while made.recorder._queue.qsize():
            pass
        made.book.finish_all(FinishReason.CANCELLED)
        for log in logs:
            made.recorder.on_delivered(log, 0, None)
            while made.recorder._queue.qsize():
                pass
    complete = {receipt.sequence: receipt.complete for receipt in receipts_in(path)}
    assert complete == {1: True, 2: True, 3: True, 4: False, 5: False}
    assert verdict_of(path).holds


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failures = threading.Semaphore(0)

    def refuse(self: ReceiptStore, ends: object) -> None:
        failures.release()
        raise sqlite3.OperationalError("database or disk is full")

    path = tmp_path / "r.db"
    with scene(path) as made:
        with monkeypatch.context() as patched:
            patched.setattr(ReceiptStore, "add_ends", refuse)
            made.run_all(1, 2)
            failures.acquire()
            while made.recorder._queue.qsize() or not made.recorder.dropped:
                pass
        assert made.recorder.dropped > 0
        made.run_all(5)
    assert receipts_in(path)[-1].max_tokens == 5
    assert verdict_of(path).holds


@pytest.mark.parametrize("kind", ["folder", "text"])
def test_a_file_that_is_not_one_is_named_at_the_start(kind: str, tmp_path: Path):
    path = tmp_path / "r.db"
    if kind == "folder":
        path.mkdir()
    else:
        path.write_text("these are no receipts, and long enough to be something else\n" * 100)
    with pytest.raises(ConfigError, match=r"receipts: .* cannot be used"):
        ReceiptStore.open(path, create=True)


def test_reading_makes_no_file(tmp_path: Path):
    with pytest.raises(ConfigError), opened(tmp_path / "none.db"):
        pass
    assert list(tmp_path.iterdir()) == []


def recorded(tmp_path: Path, count: int = 3) -> list[Receipt]:
    path = tmp_path / "r.db"
    filled(path, count)
    return receipts_in(path)


def test_a_replay_is_the_same_output(tmp_path: Path):
    assert [replay(receipt, undisturbed) for receipt in recorded(tmp_path)] == [None] * 3


def test_a_replay_of_a_cut_output_ends_where_it_was_cut(tmp_path: Path):
    receipt = recorded(tmp_path)[2]
    cut = msgspec.structs.replace(receipt, output_ids=receipt.output_ids[:2])
    assert request_of(cut, 0.0).max_tokens == 2
    assert replay(cut, undisturbed) is None


def test_an_empty_output_is_not_run(tmp_path: Path):
    empty = msgspec.structs.replace(recorded(tmp_path)[0], output_ids=[])
    assert replay(empty, lambda asked: pytest.fail("nothing to run")) is None


def test_the_first_difference_is_named(tmp_path: Path):
    receipt = recorded(tmp_path)[2]
    forged = msgspec.structs.replace(receipt, output_ids=[*receipt.output_ids[:1], 999, *receipt.output_ids[2:]])
    difference = replay(forged, undisturbed)
    assert difference == Difference(1, 999, receipt.output_ids[1])
    assert str(difference) == f"token 1 was 999 and is now {receipt.output_ids[1]}"
    assert first_difference([1, 2], [1]) == Difference(1, 2, None)
    assert str(first_difference([1], [1, 5])) == "token 1 was the end and is now 5"


def test_parameters_of_another_version_are_the_callers_error(tmp_path: Path):
    receipt = msgspec.structs.replace(recorded(tmp_path)[0], params={"top_k": "many"})
    with pytest.raises(CallerError, match="parameters"):
        replay(receipt, undisturbed)


def test_a_receipt_is_found_by_number_and_by_request(tmp_path: Path):
    path = tmp_path / "r.db"
    filled(path, 3)
    with opened(path) as store:
        assert [row.sequence for row in store.find("2")] == [SequenceId(2)]
        assert len(store.find("r")) == 3
        assert store.find("nobody") == []
        assert [row.number for row in store.ends(newest=2)] == [2, 3]
