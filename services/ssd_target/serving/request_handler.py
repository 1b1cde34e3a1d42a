"""Requests from the door to the step thread and back: check, number, submit, turn into text.

Belongs to the asyncio loop. What is checked here depends on the model; what a message may hold at
all is checked in ``ssd.rpc.codec``.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from ssd.engine.target_runner import TargetRunner
from ssd.errors import ContextLengthError, FieldError, NotReadyError
from ssd.ports import Clock, Tokenizer
from ssd.rpc.bounds import ANY_MODEL, PromptBounds, check_text, check_token_ids
from ssd.rpc.codec import Conversation, GenerateCall, Prompt, prompt_field
from ssd.telemetry import (
    E2E_SECONDS,
    INTER_TOKEN_SECONDS,
    TIME_TO_FIRST_TOKEN_SECONDS,
)
from ssd.text.chat_template import ChatTurn, render_chat
from ssd.types import FinishReason, GenerationChunk, Request, SamplingParams, TokenId
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.scheduler import queue_full
from ssd_target.decoding.sequence import Arrival
from ssd_target.serving.streams import TokenStream, Wakeups
from ssd_target.serving.text_output import StopStringWatch, TextWriter

Result = TypeVar("Result")
_LONG = 1_000
"""Characters or token ids from which they are turned into the other beside the asyncio loop, which
has beats to send. 1,000 characters take 1 ms."""
_NUM_READERS = 2
"""Long texts that are tokenised at a time: each takes a CPU, which the step thread needs, and 100
bytes of memory a token. With one, a prompt of megabytes would hold up all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskSettings:
    """Bounds of what a reader may make us hold."""

    stream_stall_seconds: float
    stream_buffer_tokens: int
    max_queue: int
    max_num_seqs: int


class RequestHandler:
    """Open between ``open`` and ``close``; in between every request is answered."""

    def __init__(
        self,
        settings: DeskSettings,
        tokenizer: Tokenizer,
        chat_template: str | None,
        inbox: Inbox,
        clock: Clock,
    ) -> None:
        self.tokenizer = tokenizer
        self.runner: TargetRunner | None = None
        self.bounds = ANY_MODEL
        """Of prompts; those of the model once it is loaded."""
        self.num_requests = 0
        self._num_entering = 0
        """Requests whose prompt is being tokenised."""
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="reader")
        self._free_readers = asyncio.Semaphore(_NUM_READERS)
        self._settings = settings
        self._chat_template = chat_template
        self._inbox = inbox
        self._clock = clock
        self._wakeups: Wakeups | None = None
        self._eos_token_ids: frozenset[TokenId] = frozenset()
        self._is_draining = False
        self._sequence_ids = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, runner: TargetRunner, wakeups: Wakeups) -> None:
        """Take requests from now on."""
        self._wakeups = wakeups
        self._eos_token_ids = self.tokenizer.eos_token_ids | runner.model.eos_token_ids
        self.bounds = PromptBounds.of_model(
            runner.engine.max_model_len, self.tokenizer.longest_token_bytes
        )
        self.runner = runner

    def close(self) -> None:
        """Take no more requests; those that run go on."""
        self._is_draining = True

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self.runner is not None and not self._is_draining

    def require_open(self) -> TargetRunner:
        """The model.

        Raises:
            NotReadyError: loading or draining.
        """
        if self.runner is None:
            raise NotReadyError("the model is loading; try again in a moment")
        if self._is_draining:
            raise NotReadyError("the target is draining; ask another one")
        return self.runner

    @property
    def num_token_ids(self) -> int:
        """Ids that a prompt may hold: those of the tokenizer that the model has, too."""
        return self.require_open().engine.num_token_ids or self.tokenizer.vocab_size

    async def wait_until_idle(self) -> None:
        """Wait for the last request to end."""
        await self._idle.wait()

    async def generate(
        self, call: GenerateCall, request_id: str
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Run one request; its chunks carry text.

        Leaving the iterator early, for whatever reason, frees all that the request holds.

        Raises:
            RequestError: the request does not fit the model.
            OverloadedError: the queue is full.
            NotReadyError: loading or draining.
        """
        runner = self.require_open()
        assert self._wakeups is not None
        stream = TokenStream(
            self._wakeups,
            self._clock,
            buffer_tokens=self._settings.stream_buffer_tokens,
            stall_seconds=self._settings.stream_stall_seconds,
        )
        arrived_at = self._clock.now()
        self._check_room()
        self._num_entering += 1
        try:
            prompt_ids = await self._prompt_ids(call.prompt)
        finally:
            self._num_entering -= 1
        field = prompt_field(call.prompt)
        limit = room_for(prompt_ids, call.max_tokens, runner.engine.max_model_len, field)
        # Not before: a prompt that is too long is not worth reading through.
        self._check_prompt(call.prompt, prompt_ids)
        request = self._request(call, request_id, prompt_ids, limit)
        arrival = Arrival(
            sequence_id=next(self._sequence_ids),
            request=request,
            limit=limit,
            eos_token_ids=self._eos_token_ids,
            sink=stream,
            stop_watch=self._stop_watch(request.sampling),
            arrived_at=arrived_at,
        )
        self._inbox.submit(arrival)
        self._enter()
        try:
            async for chunk in self._read(arrival, stream):
                yield chunk
        finally:
            stream.abandon()
            self._inbox.cancel(arrival.sequence_id)
            self._leave()

    async def _read(self, arrival: Arrival, stream: TokenStream) -> AsyncIterator[GenerationChunk]:
        sampling = arrival.request.sampling
        writer = TextWriter(self.tokenizer, sampling.stop)
        seed: int | None = sampling.seed
        previous_at: float | None = None
        while True:
            chunk = await stream.take()
            now = self._clock.now()
            if chunk.token_ids:
                if previous_at is None:
                    TIME_TO_FIRST_TOKEN_SECONDS.observe(now - arrival.arrived_at)
                else:
                    INTER_TOKEN_SECONDS.observe((now - previous_at) / len(chunk.token_ids))
                previous_at = now
            text = writer.push(chunk.token_ids)
            if chunk.finish_reason is not None:
                text += writer.finish()
            yield replace(chunk, text=text, seed=seed)
            seed = None
            if chunk.finish_reason is not None:
                if chunk.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
                    E2E_SECONDS.observe(now - arrival.arrived_at)
                return

    def _check_room(self) -> None:
        """Refuse a request that would find the queue full, before its text is read.

        The scheduler decides; what it last published is some milliseconds old. While none wait, a
        slot may have become free.

        Raises:
            OverloadedError: the queue is full.
        """
        settings = self._settings
        waiting = self._inbox.num_waiting
        room = settings.max_queue + (-waiting if waiting else settings.max_num_seqs)
        if self._num_entering + self._inbox.num_arrivals >= room:
            raise queue_full(settings.max_queue)

    async def encode(self, text: str) -> tuple[TokenId, ...]:
        """Token ids of a text, as ``generate`` would see them."""
        return await self._aside(len(text), lambda: tuple(self.tokenizer.encode(text)))

    async def decode(self, token_ids: Sequence[TokenId]) -> str:
        """Text of token ids.

        Raises:
            FieldError: one of them is not of the vocabulary.
        """

        def decode() -> str:
            check_token_ids("token_ids", token_ids, self.tokenizer.vocab_size)
            return self.tokenizer.decode(token_ids)

        return await self._aside(len(token_ids), decode)

    async def _aside(self, size: int, work: Callable[[], Result]) -> Result:
        """Do what takes long for large inputs beside the asyncio loop."""
        if size < _LONG:
            return work()
        # The executor keeps what is cancelled while it waits there, so nothing waits there.
        await self._free_readers.acquire()
        reading = asyncio.get_running_loop().run_in_executor(self._readers, work)
        reading.add_done_callback(lambda _reading: self._free_readers.release())
        return await asyncio.shield(reading)

    async def _prompt_ids(self, prompt: Prompt) -> tuple[TokenId, ...]:
        if isinstance(prompt, Conversation):
            turns = [ChatTurn(turn.role, turn.content) for turn in prompt.turns]
            prompt = render_chat(self._chat_template, turns)
            check_text("chat", prompt, bounds=self.bounds)
        ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise FieldError("input", "the prompt is empty; it must hold 1 token at least")
        return ids

    def _check_prompt(self, prompt: Prompt, prompt_ids: tuple[TokenId, ...]) -> None:
        """Refuse ids for which the model has no embedding.

        Raises:
            FieldError: naming the first one.
        """
        if isinstance(prompt, str | Conversation):
            highest = max(prompt_ids)
            if highest >= self.num_token_ids:
                raise FieldError(
                    "input",
                    f"the text holds token id {highest}, which the tokenizer has and the model "
                    f"has not; the model's ids are 0..{self.num_token_ids - 1}",
                )
        else:
            check_token_ids("token_ids.ids", prompt_ids, self.num_token_ids)

    def _request(
        self, call: GenerateCall, request_id: str, prompt_ids: tuple[TokenId, ...], limit: int
    ) -> Request:
        stops = call.sampling.stop_token_ids
        check_token_ids("sampling.stop_token_ids", stops, self.tokenizer.vocab_size)
        seed = secrets.randbits(64) if call.seed is None else call.seed
        return Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=replace(call.sampling, seed=seed, max_tokens=limit),
            mode=call.mode,
        )

    def _stop_watch(self, sampling: SamplingParams) -> StopStringWatch | None:
        return StopStringWatch(self.tokenizer, sampling.stop) if sampling.stop else None

    def _enter(self) -> None:
        self.num_requests += 1
        self._idle.clear()

    def _leave(self) -> None:
        self.num_requests -= 1
        if self.num_requests == 0:
            self._idle.set()


def room_for(
    prompt_ids: tuple[TokenId, ...], max_tokens: int | None, max_model_len: int, field: str
) -> int:
    """New tokens that a request may have; unset takes 256, or what fits.

    Raises:
        ContextLengthError: prompt and new tokens exceed the model's length.
    """
    room = max_model_len - len(prompt_ids)
    limit = max_tokens
    if limit is None:
        limit = max(1, min(SamplingParams().max_tokens, room))
    if limit > room:
        raise ContextLengthError(len(prompt_ids), limit, max_model_len, field)
    return limit
