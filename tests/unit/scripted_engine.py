"""A small engine process that misbehaves on a plan. Its tokens are a function of the history alone.

    python scripted_engine.py PLAN_JSON FD

PLAN: {"faults": {"<epoch>": [[step, kind], ...]}, "load": {"<epoch>": kind}, "poison": [[prompt id, index], ...],
"poison_signal": n, "step_seconds": s, "max_running": n, "notes": path}. `notes` gets one line per AddRequest (epoch,
id, length, alone).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from millpond.engine.messages import (
    MAX_UNACKNOWLEDGED_FRAMES,
    AbortSequence,
    Acknowledge,
    AddRequest,
    BatchAnnounced,
    Command,
    EngineError,
    EngineReady,
    Event,
    FrameBuffer,
    Load,
    LoadProgress,
    StepFrame,
    Stop,
    decode_command,
    encode_frame,
)
from millpond.outputs import (
    EngineInfo,
    FinishEvent,
    ModelInfo,
    SequenceUsage,
    StatusEvent,
    StepStats,
    TokenEvent,
    TokenLogprobs,
)
from millpond.request import Request, finish_reason_of
from millpond.types import EngineEpoch, FinishReason, MemoryKind, SequenceId, SequenceStatus

EOG = 2
N_VOCAB = 1000


def next_token(prompt: tuple[int, ...], output: list[int], seed: int) -> int:
    """The one right continuation of a history."""
    mixed = seed * 7919 + len(prompt) * 31 + len(output) * 17
    for token in (*prompt, *output):
        mixed = (mixed * 1103515245 + token + 12345) % 2**31
    return 3 + mixed % (N_VOCAB - 3)


def undisturbed(request: Request) -> list[int]:
    """All that a request should get."""
    output: list[int] = []
    while finish_reason_of(request, output, frozenset({EOG})) is None:
        output.append(next_token(request.prompt_ids, output, request.seed))
    return output


def engine_info(max_running: int) -> EngineInfo:
    model = ModelInfo(
        name="scripted",
        architecture="none",
        description="",
        digest="",
        n_vocab=N_VOCAB,
        n_ctx_train=4096,
        n_layer=1,
        n_params=1,
        size_bytes=1,
        memory_kind=MemoryKind.ATTENTION,
        n_swa=0,
        kv_bytes_per_token=1,
        library="scripted",
    )
    return EngineInfo(model, 4096, max_running, max_running, 2048, True)


class Sequence:
    def __init__(self, command: AddRequest) -> None:
        self.id = command.sequence_id
        self.request = command.request
        self.output = list(command.output_ids)
        self.alone = command.quarantine
        self.started = False


class ScriptedEngine:
    def __init__(self, plan: dict[str, Any], sock: socket.socket) -> None:
        self.plan = plan
        self.sock = sock
        self.frames = FrameBuffer()
        self.epoch = EngineEpoch(0)
        self.sequences: dict[SequenceId, Sequence] = {}
        self.aborted: list[FinishEvent] = []
        self.announced: list[SequenceId] = []
        self.step = self.frame = self.acknowledged = 0
        self.max_running = int(plan.get("max_running", 4))

    def run(self) -> None:
        while True:
            busy = bool(self.sequences or self.aborted)
            may_step = self.frame - self.acknowledged < MAX_UNACKNOWLEDGED_FRAMES
            readable, _, _ = select.select([self.sock], [], [], 0 if busy and may_step else None)
            if readable:
                data = self.sock.recv(65536)
                if not data:
                    return
                for body in self.frames.feed(data):
                    if not self.take(decode_command(body)):
                        return
            elif busy and may_step:
                self.make_step()

    def take(self, command: Command) -> bool:
        match command:
            case Load():
                self.load(command)
            case AddRequest():
                self.note(f"{self.epoch} {command.sequence_id} {len(command.output_ids)} {command.quarantine}")
                self.sequences[command.sequence_id] = Sequence(command)
            case AbortSequence():
                sequence = self.sequences.pop(command.sequence_id, None)
                if sequence is not None:
                    self.aborted.append(self.finish(sequence, command.reason))
            case Acknowledge():
                self.acknowledged = command.frame
            case Stop():
                return self.plan.get("ignores_stop", False)
        return True

    def load(self, command: Load) -> None:
        self.epoch = command.epoch
        kind = self.plan.get("load", {}).get(str(self.epoch), "ok")
        self.send(LoadProgress(self.epoch, 0.5))
        if kind == "setup_error":
            self.send(EngineError(self.epoch, "no such file: /secret/model.gguf", True))
            sys.exit(1)
        if kind == "exit":
            sys.exit(3)
        if kind == "wait":
            time.sleep(0.3)
        if kind == "hang":
            time.sleep(3600)
        self.send(EngineReady(self.epoch, engine_info(self.max_running)))

    def make_step(self) -> None:
        self.step += 1
        started = time.monotonic()
        time.sleep(float(self.plan.get("step_seconds", 0.0)))
        rows = self.choose_rows()
        ids = [row.id for row in rows]
        if ids and ids != self.announced:
            self.send(BatchAnnounced(self.epoch, ids))
            self.announced = ids
        for row in rows:
            if [row.request.prompt_ids[0], len(row.output)] in self.plan.get("poison", []):
                os.kill(os.getpid(), self.plan.get("poison_signal", signal.SIGABRT))
        kind = next((k for step, k in self.plan.get("faults", {}).get(str(self.epoch), []) if step == self.step), "")
        self.before_tokens(kind)
        tokens, finished, statuses, prefilled = self.decode(rows)
        if kind == "repeat" and tokens:
            tokens = [*tokens, tokens[-1]]
        if kind == "skip" and tokens:
            tokens = tokens[1:]
        stats = StepStats(
            step=self.step,
            running=len(rows),
            rows=len(rows) + prefilled,
            prefill_rows=prefilled,
            decode_ms=(time.monotonic() - started) * 1000.0,
        )
        self.frame += 1
        self.send(StepFrame(self.epoch, self.frame, tokens, self.aborted + finished, statuses, stats))
        self.aborted = []
        if kind == "crash_after":
            os.kill(os.getpid(), signal.SIGKILL)

    def choose_rows(self) -> list[Sequence]:
        rows = list(self.sequences.values())
        alone = [row for row in rows if row.alone]
        return alone[:1] or rows[: self.max_running]

    def before_tokens(self, kind: str) -> None:
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(3600)
        if kind == "garbage":
            self.sock.sendall(b"\x03\x00\x00\x00\xc1\xc1\xc1")
        if kind == "huge":
            self.sock.sendall(b"\xff\xff\xff\xff")
        if kind == "error":
            self.send(EngineError(self.epoch, "lost the device", False))
        if kind == "stale":
            bad = TokenEvent(SequenceId(1), 999, 1)
            self.send(StepFrame(EngineEpoch(self.epoch - 1), 1, [bad], [], [], StepStats()))

    def decode(self, rows: list[Sequence]) -> tuple[list[TokenEvent], list[FinishEvent], list[StatusEvent], int]:
        tokens: list[TokenEvent] = []
        finished: list[FinishEvent] = []
        statuses: list[StatusEvent] = []
        prefilled = 0
        for row in rows:
            if not row.started:
                row.started = True
                statuses.append(StatusEvent(row.id, SequenceStatus.RUNNING))
                prefilled += len(row.request.prompt_ids)
            index = len(row.output)
            row.output.append(next_token(row.request.prompt_ids, row.output, row.request.seed))
            logprobs = TokenLogprobs(-float(index)) if row.request.params.logprobs is not None else None
            tokens.append(TokenEvent(row.id, index, row.output[-1], logprobs))
            row.alone = False
            reason = finish_reason_of(row.request, row.output, frozenset({EOG}))
            if reason is not None:
                del self.sequences[row.id]
                finished.append(self.finish(row, reason))
        return tokens, finished, statuses, prefilled

    def finish(self, sequence: Sequence, reason: FinishReason) -> FinishEvent:
        n = len(sequence.request.prompt_ids)
        usage = SequenceUsage(prompt_tokens=n, cached_tokens=1, computed_prompt_tokens=n - 1)
        return FinishEvent(sequence.id, len(sequence.output), reason, usage)

    def send(self, event: Event) -> None:
        self.sock.sendall(encode_frame(event))

    def note(self, line: str) -> None:
        if "notes" in self.plan:
            with Path(self.plan["notes"]).open("a") as notes:
                notes.write(line + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ScriptedEngine(json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))).run()
