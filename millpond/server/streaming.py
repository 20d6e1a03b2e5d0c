"""Answers that the engine produces: one interruptible task a request, as SSE or one JSON body. Knows ASGI and deltas.

A request has one terminal event. Its task ends by completion, by its client leaving (then nobody is told), or by
Exchange.end (then the client is told why). Whatever the way, the engine's streams are cancelled on the way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millpond.async_llm import Finish, OutputDelta, OutputStream, RequestStream
from millpond.errors import MillpondError, NotReady
from millpond.server.adapters.plan import GenerationPlan
from millpond.server.adapters.reply import ChunkEncoder, CollectedOutput, Dialect, ReplyHead
from millpond.server.adapters.sse import DONE, PING, encode_json
from millpond.server.adapters.usage import PromptFinishes
from millpond.server.context import ServerContext
from millpond.server.errors import (
    WireError,
    error_event,
    error_of_finish,
    error_response,
    finish_error,
    internal_error,
    wire_error,
)
from millpond.server.exchanges import Exchange
from millpond.server.protocol import DIRECT_BODY, DirectBody
from millpond.types import FinishReason

_MERGE_BUFFER = 64
"""Deltas waiting between the engine's streams and the socket, when a request has several prompts."""
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_log = logging.getLogger("millpond.server")


class EventStreamWriter:
    """Writes SSE bytes, and a comment whenever nothing was written for `ping_interval` seconds.

    The response starts with the first byte, so that what fails before it still gets its own HTTP status. With `direct`
    a part may go out at once, while the client reads.
    """

    def __init__(self, send: Send, ping_interval: float, direct: DirectBody | None = None) -> None:
        self._send = send
        self._direct = direct
        self._interval = ping_interval
        self._loop = asyncio.get_running_loop()
        self._last_write = self._loop.time()
        self._sending = False
        self._timer = self._loop.call_later(ping_interval, self._tick)
        self._ping: asyncio.Task[None] | None = None
        self.started = False

    async def write(self, data: bytes) -> None:
        """Waits while the client does not read."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_SSE_HEADERS)})
        self._sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending = False
        self._last_write = self._loop.time()

    @property
    def can_write_now(self) -> bool:
        return self._direct is not None and self.started and not self._sending and self._direct.is_open

    def write_now(self, data: bytes) -> None:
        """As `write`, without waiting; only while `can_write_now`."""
        assert self._direct is not None
        self._direct.write(data)
        self._last_write = self._loop.time()

    async def close(self, last: bytes) -> None:
        self.stop()
        await self.write(last)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def stop(self) -> None:
        """No more pings. Safe to call more than once."""
        self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    def _tick(self) -> None:
        idle = self._loop.time() - self._last_write
        if idle < self._interval:
            self._timer = self._loop.call_later(self._interval - idle, self._tick)
            return
        if not self._sending:
            self._ping = self._loop.create_task(self.write(PING))
        self._timer = self._loop.call_later(self._interval, self._tick)


class _Failed(Exception):
    """An output ended with an error; ends the whole request. Never leaves this module."""

    def __init__(self, error: WireError) -> None:
        super().__init__(error.message)
        self.error = error


class _Chunks:
    """Deltas of one request as events: an output is opened before its first, and ended after its last."""

    def __init__(self, encoder: ChunkEncoder) -> None:
        self.encoder = encoder
        self.finishes: dict[int, Finish] = {}
        self._opened: set[int] = set()

    def events(self, delta: OutputDelta) -> bytes:
        """Of a delta whose finish, if it has one, is no failure."""
        index, finish = delta.index, delta.finish
        data = self.encoder.delta(delta)
        if index not in self._opened:
            data = self._open(index) + data
        if finish is not None:
            self.finishes[index] = finish
            data += self.encoder.finish(index, finish)
        return data

    def failed(self, delta: OutputDelta) -> bytes:
        """What a delta brought whose output failed."""
        data = self.encoder.delta(delta)
        return self._open(delta.index) + data if data and delta.index not in self._opened else data

    def _open(self, index: int) -> bytes:
        self._opened.add(index)
        return self.encoder.opening(index)


class _Shortcut:
    """From the event loop's call straight to the socket, while nothing has to wait; the request's task sleeps on.

    What it cannot do is left to the task: the first event, ends and failures, a client that does not read.
    """

    def __init__(self, stream: RequestStream, chunks: _Chunks, writer: EventStreamWriter) -> None:
        self._stream = stream
        self._chunks = chunks
        self._writer = writer

    def __call__(self) -> None:
        try:
            self._pass_on()
        except Exception as error:
            self._stream.fail(error)

    def _pass_on(self) -> None:
        writer = self._writer
        if writer.can_write_now:
            ready = self._stream.collect()
            while ready and ready[0].finish is None:
                data = self._chunks.events(ready.popleft())
                if data:
                    writer.write_now(data)
            if not ready:
                return
        self._stream.wake()


class GenerationResponse(Response):
    """Submits a plan when called, and answers in its dialect."""

    def __init__(self, context: ServerContext, plan: GenerationPlan, dialect: Dialect, head: ReplyHead) -> None:
        super().__init__()
        self._context = context
        self._plan = plan
        self._dialect = dialect
        self._head = head
        self._writer: EventStreamWriter | None = None
        self._direct: DirectBody | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct = scope.get("extensions", {}).get(DIRECT_BODY)
        exchanges = self._context.exchanges
        exchange = Exchange()
        work = exchange.start(self._answer(exchange, scope, receive, send))
        exchanges.add(exchange)
        watcher = asyncio.ensure_future(client_left(receive))
        try:
            await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exchanges.discard(exchange)
            watcher.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._generate(exchange, send)
            return
        except asyncio.CancelledError:
            failure = finish_error(exchange.cause) if exchange.cause else None
            if failure is None:
                raise
            current = asyncio.current_task()
            if current is not None:
                current.uncancel()
        except _Failed as failed:
            failure = failed.error
        except MillpondError as error:
            failure = wire_error(error)
            if failure.status == 500:
                _log.error("request %s failed", self._head.id, exc_info=error, extra={"request_id": self._head.id})
        except Exception:
            _log.exception("request %s failed", self._head.id, extra={"request_id": self._head.id})
            failure = internal_error()
        await self._fail(failure, scope, receive, send)

    async def _fail(self, failure: WireError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._writer is not None and self._writer.started:
            await self._writer.close(error_event(failure))
        else:
            await error_response(failure)(scope, receive, send)

    async def _generate(self, exchange: Exchange, send: Send) -> None:
        if self._context.exchanges.draining:
            raise NotReady("the server is shutting down", retry_after=1)
        async with contextlib.AsyncExitStack() as cleanup:
            streams: list[OutputStream] = []
            for prompt, options in zip(self._plan.prompts, self._plan.options, strict=True):
                stream = await self._context.engine.submit(prompt, self._plan.params, options)
                cleanup.callback(_cancel, stream, exchange)
                streams.append(stream)
            # The engine may have become ready only while the request was being accepted.
            self._head = replace(self._head, fingerprint=self._context.fingerprint())
            if self._plan.stream:
                self._writer = EventStreamWriter(send, self._context.ping_interval, self._direct)
                cleanup.callback(self._writer.stop)
                await self._stream(self._writer, streams)
            else:
                await self._collect(send, streams)

    async def _stream(self, writer: EventStreamWriter, streams: Sequence[OutputStream]) -> None:
        chunks = _Chunks(self._dialect.chunk_encoder(self._head))
        with _diverted(streams, chunks, writer):
            pending = await self._write_all(writer, streams, chunks)
        prompts = self._prompt_finishes(streams, chunks.finishes)
        if self._plan.include_usage:
            pending += chunks.encoder.usage(prompts)
        await writer.close(pending + DONE)

    async def _write_all(self, writer: EventStreamWriter, streams: Sequence[OutputStream], chunks: _Chunks) -> bytes:
        """Returns the last events: they leave with what follows them. Raises _Failed."""
        pending = b""
        async with contextlib.aclosing(merged(streams, self._plan.options[0].n)) as deltas:
            async for delta in deltas:
                failure = None if delta.finish is None else error_of_finish(delta.finish)
                pending = chunks.events(delta) if failure is None else chunks.failed(delta)
                if pending and len(chunks.finishes) < self._plan.n_outputs:
                    await writer.write(pending)
                    pending = b""
                if failure is not None:
                    raise _Failed(failure)
        return pending

    async def _collect(self, send: Send, streams: Sequence[OutputStream]) -> None:
        outputs = [CollectedOutput() for _ in range(self._plan.n_outputs)]
        async with contextlib.aclosing(merged(streams, self._plan.options[0].n)) as deltas:
            async for delta in deltas:
                if delta.finish is not None:
                    _raise_if_failed(delta.finish)
                outputs[delta.index].take(delta)
        finishes = {index: output.finish for index, output in enumerate(outputs) if output.finish is not None}
        prompts = self._prompt_finishes(streams, finishes)
        body = encode_json(self._dialect.full(self._head, outputs, prompts))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _prompt_finishes(self, streams: Sequence[OutputStream], finishes: dict[int, Finish]) -> list[PromptFinishes]:
        """Raises _Failed when the engine forgot an output: a truncated answer must not pass for a whole one."""
        if len(finishes) != self._plan.n_outputs:
            _log.error("request %s: %d of %d outputs ended", self._head.id, len(finishes), self._plan.n_outputs)
            raise _Failed(internal_error())
        n = self._plan.options[0].n
        return [
            PromptFinishes(stream.prompt_tokens, [finishes[place * n + index] for index in range(n)])
            for place, stream in enumerate(streams)
        ]


@contextlib.contextmanager
def _diverted(streams: Sequence[OutputStream], chunks: _Chunks, writer: EventStreamWriter) -> Generator[None]:
    """Streams of several prompts are merged by tasks, and other engines' only iterate: they stay as they are."""
    only = streams[0] if len(streams) == 1 else None
    if not isinstance(only, RequestStream):
        yield
        return
    only.divert(_Shortcut(only, chunks, writer))
    try:
        yield
    finally:
        only.divert(None)


def _cancel(stream: OutputStream, exchange: Exchange) -> None:
    stream.cancel(exchange.cause or FinishReason.CANCELLED)


def _raise_if_failed(finish: Finish) -> None:
    failure = error_of_finish(finish)
    if failure is not None:
        raise _Failed(failure)


async def client_left(receive: Receive) -> None:
    """Returns when the client closed or reset its connection (a request's body is read by then)."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(streams: Sequence[OutputStream], n: int) -> AsyncGenerator[OutputDelta, None]:
    """Deltas of several streams as they come, output i of stream p numbered p * n + i."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield delta
        return
    queue: asyncio.Queue[OutputDelta | BaseException | None] = asyncio.Queue(_MERGE_BUFFER)
    pumps = [asyncio.ensure_future(_pump(stream, place * n, queue)) for place, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(stream: OutputStream, offset: int, queue: asyncio.Queue[OutputDelta | BaseException | None]) -> None:
    try:
        async for delta in stream:
            await queue.put(replace(delta, index=delta.index + offset))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
