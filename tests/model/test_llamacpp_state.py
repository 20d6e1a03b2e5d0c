"""Saved pieces come back exactly, refusals leave the slot as it was, and no cell leaks, on the real model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from llamacpp_rows import CLOSE, TEXT, drop_all, feed, free_cells, load, rows

from millpond.errors import DecodeFailed, InvalidBatch, KVExhausted, RuntimeFailure, StateRejected
from millpond.runtime.base import Batch
from millpond.runtime.llamacpp import LlamaCppRuntime
from millpond.runtime.llamacpp.bindings import ABORT_CALLBACK
from millpond.types import SlotId

pytestmark = [pytest.mark.model, pytest.mark.narrow, pytest.mark.slow]

A, B, C, D = (SlotId(slot) for slot in range(4))
CELLS = 256


@pytest.fixture(scope="module")
def shared(smollm2_path: Path) -> Iterator[LlamaCppRuntime]:
    runtime = load(smollm2_path, n_cells=CELLS)
    yield runtime
    runtime.close()


@pytest.fixture
def runtime(shared: LlamaCppRuntime) -> Iterator[LlamaCppRuntime]:
    yield shared
    drop_all(shared)


@pytest.fixture(scope="module")
def streams(smollm2_path: Path) -> Iterator[LlamaCppRuntime]:
    runtime = load(smollm2_path, n_cells=1024, unified=False, kv_type_v="bf16")
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def prompt(shared: LlamaCppRuntime) -> list[int]:
    return shared.vocab.tokenize(TEXT, parse_special=False)


class TestPieces:
    @pytest.mark.parametrize("cuts", [[0, 24], [0, 1, 24], [0, 7, 8, 20, 24]])
    def test_pieces_rebuild_a_slot_exactly(self, runtime: LlamaCppRuntime, prompt: list[int], cuts: list[int]) -> None:
        """Bytes put back at other cells give the same logits, because nothing else is in the pool."""
        head, tail = prompt[:24], prompt[24:]
        feed(runtime, A, head)
        pieces = [runtime.save(A, start, end) for start, end in pairwise(cuts)]
        expected = feed(runtime, A, tail)
        runtime.drop(A)
        for start, end, piece in zip(cuts, cuts[1:], pieces, strict=False):
            runtime.restore(B, start, end, piece)
            assert runtime.span(B) == (0, end - 1)
        np.testing.assert_array_equal(feed(runtime, B, tail), expected)

    def test_a_state_wrong_by_one_token_shows(self, runtime: LlamaCppRuntime, prompt: list[int]) -> None:
        """So that the test above can fail: the same with one other token in the history."""
        expected = feed(runtime, A, prompt)
        feed(runtime, B, [*prompt[:10], prompt[11], *prompt[11:24]])
        piece = runtime.save(B, 0, 24)
        runtime.drop(B)
        runtime.restore(B, 0, 24, piece)
        assert np.abs(feed(runtime, B, prompt[24:]) - expected).max() > CLOSE / 5

    def test_saving_changes_nothing_and_a_restore_is_a_copy(self, runtime: LlamaCppRuntime, prompt: list[int]) -> None:
        feed(runtime, A, prompt)
        piece = runtime.save(A, 3, 9)
        assert runtime.save(A, 3, 9) == piece
        assert runtime.span(A) == (0, len(prompt) - 1)
        for slot in (B, C):
            runtime.restore(slot, 0, 3, runtime.save(A, 0, 3))
            runtime.restore(slot, 3, 9, piece)
        runtime.drop(A)
        one, other = feed(runtime, B, prompt[9:]), feed(runtime, C, prompt[9:])
        assert np.abs(one - other).max() < CLOSE

    def test_no_cell_leaks(self, runtime: LlamaCppRuntime, prompt: list[int]) -> None:
        count = len(prompt)
        feed(runtime, A, prompt)
        for _ in range(40):
            piece = runtime.save(A, 0, count)
            runtime.restore(B, 0, count, piece)
            runtime.drop(B)
            with pytest.raises(StateRejected):
                runtime.restore(B, 0, count, piece[:-50])
        assert free_cells(runtime, D) == CELLS - count

    def test_shared_cells_are_counted_once_and_saved_whole(self, runtime: LlamaCppRuntime, prompt: list[int]) -> None:
        feed(runtime, A, prompt)
        runtime.copy(A, B, 20)
        assert runtime.save(B, 0, 20) == runtime.save(A, 0, 20)
        assert free_cells(runtime, D) == CELLS - len(prompt)

    def test_a_merge_frees_the_duplicate(self, runtime: LlamaCppRuntime, prompt: list[int]) -> None:
        feed(runtime, A, prompt)
        feed(runtime, B, prompt)
        runtime.merge(A, B, 4, 20)
        assert free_cells(runtime, D) == CELLS - 2 * len(prompt) + 16
        assert np.abs(feed(runtime, B, [100]) - feed(runtime, A, [100])).max() < CLOSE

    def test_state_size_is_what_a_save_takes(self, runtime: LlamaCppRuntime, prompt: list[int]) -> None:
        feed(runtime, A, prompt)
        assert runtime.state_size(A) == len(runtime.save(A, 0, len(prompt)))
        grown = runtime.state_size(A)
        feed(runtime, A, [100, 101])
        assert runtime.state_size(A) - grown == 2 * runtime.model.kv_bytes_per_token


class TestRefusals:
    def test_damaged_bytes(self, runtime: LlamaCppRuntime, prompt: list[int]) -> None:
        feed(runtime, A, prompt)
        head, piece = runtime.save(A, 0, 5), runtime.save(A, 5, 12)
        runtime.restore(B, 0, 5, head)
        expected = feed(runtime, B, prompt[5:])
        runtime.trim(B, 5)
        damaged = [b"", piece[:3], piece[:100], piece[:-1], piece + b"\0", b"\xff" * len(piece), head, b"\0" * 64]
        damaged += [piece[:at] + b"\x7f" + piece[at + 1 :] for at in range(0, 40)]
        refused = 0
        for data in damaged:
            try:
                runtime.restore(B, 5, 12, data)
            except (StateRejected, KVExhausted):  # a damaged count may ask for more cells than there are
                refused += 1
            else:
                runtime.trim(B, 5)
            assert runtime.span(B) == (0, 4)
        assert 8 + 28 <= refused < len(damaged)
        np.testing.assert_array_equal(feed(runtime, B, prompt[5:]), expected)

    def test_a_full_pool(self, runtime: LlamaCppRuntime, prompt: list[int]) -> None:
        feed(runtime, A, prompt[:20])
        head, piece = runtime.save(A, 0, 10), runtime.save(A, 10, 20)
        runtime.drop(A)
        runtime.restore(B, 0, 10, head)
        feed(runtime, C, [7] * (CELLS - 19))
        with pytest.raises(KVExhausted):
            runtime.restore(B, 10, 20, piece)
        assert runtime.span(B) == (0, 9)
        assert free_cells(runtime, D) == 9
        runtime.trim(C, CELLS - 20)
        runtime.restore(B, 10, 20, piece)
        assert free_cells(runtime, D) == 0

    def test_ranges_a_slot_does_not_hold(self, runtime: LlamaCppRuntime, prompt: list[int]) -> None:
        feed(runtime, A, prompt[:10])
        piece = runtime.save(A, 2, 5)
        for start, end in ((0, 11), (5, 5), (-1, 3), (6, 5)):
            with pytest.raises(RuntimeFailure):
                runtime.save(A, start, end)
        with pytest.raises(RuntimeFailure, match="holds 10 tokens, not 2"):
            runtime.restore(A, 2, 5, piece)
        with pytest.raises(StateRejected):
            runtime.restore(B, 0, 3, piece)
        assert runtime.span(B) is None
        with pytest.raises(RuntimeFailure, match="empty slot"):
            feed(runtime, B, [1])
            runtime.copy(A, B, 5)
        with pytest.raises(RuntimeFailure, match="itself"):
            runtime.merge(A, A, 0, 5)

    @pytest.mark.parametrize("slot", [-1, 4, 99])
    def test_slots_that_are_not_the_schedulers(self, runtime: LlamaCppRuntime, slot: int) -> None:
        """4 is the scratch slot."""
        for call in (runtime.span, runtime.drop, runtime.state_size, lambda s: runtime.trim(s, 1)):
            with pytest.raises(RuntimeFailure):
                call(SlotId(slot))
        with pytest.raises(InvalidBatch):
            runtime.decode(rows(slot, 0, [1]))


class TestDecode:
    def test_the_pool_fills_to_its_last_cell(self, runtime: LlamaCppRuntime) -> None:
        for slot in (A, B, C, D):
            feed(runtime, slot, [11 + slot] * (CELLS // 4))
        for slot in (A, B, C, D):
            with pytest.raises(KVExhausted):
                runtime.decode(rows(slot, CELLS // 4, [5]))
            assert runtime.span(slot) == (0, CELLS // 4 - 1)
        runtime.trim(A, CELLS // 4 - 1)
        feed(runtime, D, [5])

    def test_logits_belong_to_the_rows_that_asked(self, runtime: LlamaCppRuntime, prompt: list[int]) -> None:
        """Rows of two slots, asked in the middle: each equals the row computed alone."""
        alone = {slot: feed(runtime, slot, prompt[slot : slot + 4]) for slot in (A, B)}
        drop_all(runtime)
        parts = [rows(A, 0, prompt[0:6], wants=[3]), rows(B, 0, prompt[1:7], wants=[3, 5])]
        runtime.decode(Batch(*(np.concatenate([getattr(p, f) for p in parts]) for f in Batch.__slots__)))
        for row, slot in ((3, A), (9, B)):
            assert np.abs(runtime.logits(row) - alone[slot]).max() < CLOSE
            assert int(runtime.logits(row).argmax()) == int(alone[slot].argmax())
        assert not np.array_equal(runtime.logits(9), runtime.logits(11))
        for row in (0, 4, 10, 12, -1):
            with pytest.raises(InvalidBatch):
                runtime.logits(row)

    def test_logits_are_a_view_until_the_next_decode(self, runtime: LlamaCppRuntime) -> None:
        feed(runtime, A, [1])
        assert not runtime.logits(0).flags.owndata
        with pytest.raises(InvalidBatch):
            runtime.decode(rows(A, 5, [1]))
        assert runtime.logits(0).shape == (runtime.model.n_vocab,)
        with pytest.raises(KVExhausted):
            runtime.decode(rows(B, 0, [1] * CELLS))
        with pytest.raises(InvalidBatch):
            runtime.logits(0)

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            (Batch(*(np.zeros(n, np.int32) for n in (2, 1, 2)), np.zeros(2, np.bool_)), "different lengths"),
            (rows(0, 0, []), "0 rows"),
            (rows(0, 0, [1] * (CELLS + 1)), f"1 to {CELLS}"),
            (rows(0, 0, [49152]), "token ids"),
            (rows(0, 0, [-1]), "token ids"),
            (rows(0, 3, [1]), "continues at position 0, not 3"),
            (rows(0, -1, [1]), "position 0, not -1"),
        ],
    )
    def test_bad_batches_never_reach_the_library(self, runtime: LlamaCppRuntime, batch: Batch, message: str) -> None:
        with pytest.raises(InvalidBatch, match=message):
            runtime.decode(batch)
        assert runtime.span(A) is None

    def test_positions_must_follow_inside_a_batch_too(self, runtime: LlamaCppRuntime) -> None:
        batch = rows(A, 0, [1, 2, 3])
        batch.positions[2] = 1
        with pytest.raises(InvalidBatch, match="row 2: slot 0 continues at position 2, not 1"):
            runtime.decode(batch)

    def test_an_aborted_decode_is_known_and_trimmed(self, smollm2_path: Path, prompt: list[int]) -> None:
        """With ubatches of 8, the abort comes in the third: two are in, and the slot goes on after a trim."""
        runtime = load(smollm2_path, n_cells=CELLS, n_ubatch=8)
        expected = feed(runtime, B, prompt)
        runtime.drop(B)
        feed(runtime, A, prompt[:2])
        calls = [0]

        def abort(_data: int | None) -> bool:
            calls[0] += 1
            span = runtime.span(A)
            return span is not None and span[1] >= 17

        callback = ABORT_CALLBACK(abort)
        bindings, context = runtime._loaded.library.bindings, runtime._context.pointer
        bindings.llama_set_abort_callback(context, callback, None)
        with pytest.raises(DecodeFailed) as failure:
            runtime.decode(rows(A, 2, prompt[2:]))
        bindings.llama_set_abort_callback(context, ABORT_CALLBACK(), None)
        assert failure.value.return_code == 2
        assert calls[0] > 0
        assert runtime.span(A) != (0, 1)
        runtime.trim(A, 2)
        assert np.abs(feed(runtime, A, prompt[2:]) - expected).max() < CLOSE
        runtime.close()


class TestStreams:
    def test_whole_sequences_move_between_slots_exactly(self, streams: LlamaCppRuntime, prompt: list[int]) -> None:
        feed(streams, A, prompt[:20])
        saved = streams.save(A, 0, 20)
        expected = feed(streams, A, prompt[20:])
        feed(streams, D, [9] * 30)
        streams.restore(C, 0, 20, saved)
        np.testing.assert_array_equal(feed(streams, C, prompt[20:]), expected)
        streams.restore(B, 0, 20, saved)
        streams.trim(B, 12)
        np.testing.assert_allclose(feed(streams, B, prompt[12:]), expected, atol=CLOSE / 2)
        drop_all(streams)

    def test_nothing_is_shared_or_cut_in_pieces(self, streams: LlamaCppRuntime, prompt: list[int]) -> None:
        feed(streams, A, prompt[:20])
        whole = streams.save(A, 0, 20)
        for refused in (
            lambda: streams.copy(A, B, 20),
            lambda: streams.save(A, 5, 20),
            lambda: streams.save(A, 0, 10),
            lambda: streams.restore(B, 5, 20, whole),
        ):
            with pytest.raises(RuntimeFailure):
                refused()
        with pytest.raises(StateRejected):
            streams.restore(B, 0, 20, whole[: len(whole) // 2])
        assert streams.span(B) is None
        drop_all(streams)

    def test_a_slot_fills_to_its_own_last_cell(self, streams: LlamaCppRuntime) -> None:
        length = streams.limits.cells_per_slot
        assert length == 256
        for slot in (A, D):
            feed(streams, slot, [7] * length)
            with pytest.raises(KVExhausted):
                streams.decode(rows(slot, length, [7]))
        drop_all(streams)

    def test_unified_bytes_are_not_for_streams(self, streams: LlamaCppRuntime, shared: LlamaCppRuntime) -> None:
        feed(shared, A, [1, 2, 3])
        piece = shared.save(A, 0, 3)
        shared.drop(A)
        with pytest.raises(StateRejected):
            streams.restore(A, 0, 3, piece)
