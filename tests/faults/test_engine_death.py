"""Deaths of the real engine process over FakeRuntime: every token is checked against an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest
from fault_engine import IMPATIENT, ORACLE, all_ended, assert_undisturbed, engine, eventually, kill, request

from millpond.engine_client.logbook import POISON_MESSAGE
from millpond.engine_client.token_log import TokenLog
from millpond.types import FinishReason

pytestmark = pytest.mark.faults

POISON = 77


async def test_kill_9_in_the_middle_of_four_streams_is_only_a_pause():
    async with engine() as client:
        logs = client.submit([request(number) for number in range(4)])
        await logs[3].wait_beyond(15)
        await kill(client)
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)
            assert log.finish is not None
            assert log.finish.usage.preemptions >= 1
        assert (client.restarts, client.losses) == (1, 0)


@pytest.mark.parametrize(
    "plan",
    [
        "1:decode@1=abort",
        "1:decode@3=abort; 2:decode@2=exit",
        "1:decode@2=exit",
        "1:decode@30=abort",
        "1:decode@5=abort; 2:decode@5=exit; 3:decode@9=abort",
    ],
)
async def test_a_death_at_any_decode_changes_nothing(plan: str):
    async with engine(plan) as client:
        logs = client.submit([request(number, 40) for number in range(6)])
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)
        assert client.restarts == plan.count("=abort") + plan.count("=exit")
        assert client.losses == 0


@pytest.mark.parametrize(
    "fault",
    ["save@1=abort", "save@2=exit", "restore@1=abort", "trim@1=exit", "copy@1=abort", "merge@1=abort", "drop@1=exit"],
)
async def test_a_death_in_any_move_of_state_changes_nothing(fault: str):
    """Half of them share a prefix, and the pool is too small for all."""
    prefix = tuple(3 + place * 5 % 60 for place in range(128))
    async with engine(f"1:{fault}", kv_cells=512) as client:
        prompts = [(*prefix, 5 + number) if number % 2 else None for number in range(6)]
        logs = client.submit([request(number, 80, prompt=prompt) for number, prompt in enumerate(prompts)])
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)
        assert (client.restarts, client.losses) == (1, 0)


async def test_a_death_in_the_midst_of_a_long_prefill_changes_nothing():
    async with engine("1:decode@5=abort; 2:decode@7=exit") as client:
        long = request(1, 20, prompt=tuple(3 + place * 11 % 60 for place in range(500)))
        logs = client.submit([long, request(2, 20)])
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)
        assert (client.restarts, client.losses) == (2, 0)


async def test_kills_from_outside_one_after_another_convict_nobody():
    """By turns before any engine has made a token and just after."""
    async with engine() as client:
        logs = client.submit([request(number, 40) for number in range(3)])
        for turn in range(6):
            await eventually(lambda: client.state[0] == "ready")
            await asyncio.sleep(0.05 * (turn % 2))
            await kill(client)
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)
        assert (client.restarts, client.losses) == (6, 0)


async def test_a_poison_request_fails_alone_beside_three_good_ones():
    async with engine(f"poison={POISON}=abort") as client:
        good = [request(number, prompt=tuple(range(3, 20 + number))) for number in range(3)]
        wanted = {POISON} & {
            token for asked in good for token in ORACLE.expected_greedy(asked.prompt_ids, 60, ignore_eos=True)
        }
        assert wanted == set(), "the good outputs must not hold the poison token"
        logs = client.submit([good[0], request(9, prompt=(5, POISON, 6)), good[1], good[2]])
        await all_ended(logs)
        for log in (logs[0], logs[2], logs[3]):
            assert_undisturbed(log)
        assert logs[1].finish is not None
        assert (logs[1].finish.reason, logs[1].finish.message) == (FinishReason.ERROR, POISON_MESSAGE)
        assert client.losses == 1
        later = client.submit([request(1)])
        await all_ended(later)
        assert_undisturbed(later[0])


async def test_a_decode_that_hangs_is_noticed_and_repeated():
    async with engine("1:decode@30=hang", timing=IMPATIENT) as client:
        logs = client.submit([request(number, 40) for number in range(6)])
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)
        assert client.restarts >= 1


async def test_a_stopped_engine_is_noticed_and_replaced():
    async with engine(timing=IMPATIENT) as client:
        logs = client.submit([request(number) for number in range(2)])
        await logs[1].wait_beyond(5)
        await kill(client, signal.SIGSTOP)
        await eventually(lambda: client.state[0] == "stalled")
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)
        assert client.restarts >= 1


async def test_ctrl_c_and_sigterm_do_not_touch_the_engine():
    async with engine() as client:
        logs = client.submit([request(1)])
        await logs[0].wait_beyond(3)
        await kill(client, signal.SIGINT)
        await kill(client, signal.SIGTERM)
        await all_ended(logs)
        assert_undisturbed(logs[0])
        assert client.restarts == 0


async def test_a_kill_while_it_loads_is_survived():
    async with engine() as client:
        logs = client.submit([request(1)])
        await kill(client)
        await all_ended(logs)
        assert_undisturbed(logs[0])
        assert client.restarts == 1


async def test_kills_at_random_moments_lose_repeat_and_change_nothing(fault_seed: int):
    rng = random.Random(fault_seed)
    async with engine(kv_cells=512) as client:
        logs: list[TokenLog] = []
        for wave in range(5):
            logs += client.submit([request(rng.randrange(6), rng.randrange(20, 120)) for _ in range(3)])
            cancelled = logs[rng.randrange(len(logs))]
            await client.wait_ready()
            await asyncio.sleep(rng.random() * 0.3)
            if wave % 2:
                client.end(cancelled.sequence_id, FinishReason.CANCELLED)
            await kill(client)
        await all_ended(logs)
        for log in logs:
            assert log.finish is not None
            if log.finish.reason is not FinishReason.CANCELLED:
                assert_undisturbed(log)
        assert (client.losses, client.live_sequences, client.restarts) == (0, 0, 5)
