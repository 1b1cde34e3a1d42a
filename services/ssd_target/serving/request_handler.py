"""Validates requests, submits them to the step thread and returns their text. Asyncio loop.

Checks here depend on the model. Checks that do not are in ``ssd.rpc.codec``.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Iterator

from ssd.engine.kv_cache.block_pool import Key
from ssd.engine.target_runner import TargetRunner
from ssd.errors import ContextLengthError, FieldError, NotReadyError, RankError
from ssd.ports import Clock, Tokenizer
from ssd.rpc.bounds import ANY_MODEL, PromptBounds, check_text, check_token_ids, in_parts
from ssd.rpc.codec import Conversation, GenerateCall, Prompt, prompt_field
from ssd.tasks import merged
from ssd.text.chat_template import ChatTemplate, render_chat, tool_format
from ssd.text.grammar import Grammar, GrammarSource
from ssd.text.stop import TextWriter
from ssd.types import FinishReason, GenerationChunk, Mode, SamplingParams, TokenId
from ssd_target.decoding.inbox import Inbox
from ssd_target.decoding.scheduler import prompt_keys, queue_full
from ssd_target.decoding.sequence import Sequence, SequenceRecord, StopDetector
from ssd_target.serving.grammars import Grammars
from ssd_target.serving.request_trace import RequestTrace
from ssd_target.serving.streams import TokenStream, Wakeups, add_texts
from ssd_target.serving.tokenization import LONG, Tokenization
from ssd_target.settings import TargetSettings

DEFAULT_MAX_TOKENS = 256
"""New tokens of a request without ``max_tokens``. A chat has no such limit: its template makes the
model end its answer."""
SEED_BITS = 53
"""Bits of a drawn seed. Numbers of so many bits are exact in JSON, so a seed can be copied."""
CAUSE_SECONDS = 4.0
"""Maximum time that a request whose target has lost a rank waits for the name of the rank."""


class RequestHandler:
    """Accepts requests between ``open`` and ``close``. Asyncio loop."""

    def __init__(
        self,
        settings: TargetSettings,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        inbox: Inbox,
        wakeups: Wakeups,
        clock: Clock,
    ) -> None:
        self.tokenizer = tokenizer
        self.tokenization = Tokenization(tokenizer)
        self._grammars = Grammars(tokenizer)
        self.runner: TargetRunner | None = None
        self.bounds = ANY_MODEL
        """Bounds of prompts: of any model, or of this model once it is loaded."""
        self.auto_mode = Mode.AUTO
        """Mode of requests that arrive in mode AUTO."""
        self._num_entering = 0
        """Continuations of requests that are being prepared."""
        self._settings = settings
        self._chat_template = chat_template
        self.tool_format = tool_format(chat_template)
        """Format of tool calls; empty if it is not known."""
        if settings.tool_format != "auto":
            self.tool_format = settings.tool_format.replace("none", "")
        self._inbox = inbox
        self._clock = clock
        self._wakeups = wakeups
        self._is_draining = False
        self._sequence_ids = itertools.count(1)
        self._streams: set[tuple[TokenStream, ...]] = set()
        """Streams of each running or waiting request, one for each continuation."""
        self._failure: Exception | None = None
        self._failed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, runner: TargetRunner) -> None:
        """Accept requests from now on."""
        self.bounds = PromptBounds.of_model(
            runner.engine.max_model_len, self.tokenizer.longest_token_bytes
        )
        self.runner = runner

    def close(self) -> None:
        """Refuse requests from now on; running ones continue."""
        self._is_draining = True

    def fail(self, failure: Exception) -> None:
        """End all requests and refuse new ones: the target ends because of ``failure``."""
        if self._failure is None:
            self._failure = failure
            self._failed.set()
            for stream in itertools.chain.from_iterable(self._streams):
                stream.end(_ends_because_of(failure))

    @property
    def num_requests(self) -> int:
        """Number of running and waiting requests."""
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for a slot; a request has one for each continuation."""
        return self._num_entering + self._inbox.num_arrivals + self._inbox.num_waiting

    def require_open(self) -> TargetRunner:
        """Return the runner of the model.

        Raises:
            NotReadyError: loading, draining or ending.
        """
        if self._failure is not None:
            raise _ends_because_of(self._failure)
        if self.runner is None:
            raise NotReadyError("the model is loading; try again in a moment")
        if self._is_draining:
            raise NotReadyError("the target is draining and accepts no new requests")
        return self.runner

    @property
    def num_token_ids(self) -> int:
        """Number of token ids that both the tokenizer and the model have."""
        return self.require_open().engine.num_token_ids or self.tokenizer.vocab_size

    def check_mode(self, mode: Mode) -> None:
        """Check that this target can run requests of a mode.

        Raises:
            FieldError: the mode needs a draft model, and this target has none.
        """
        if mode is Mode.SYNCHRONOUS and not self._settings.draft_model:
            raise FieldError(
                "mode",
                "SYNCHRONOUS needs a draft on the target's own device, which this target does not "
                "have (setting draft_model); use another mode",
            )

    def set_auto_mode(self, mode: Mode) -> None:
        """Set the mode of requests that arrive in mode AUTO; raises as ``check_mode``."""
        self.check_mode(mode)
        self.auto_mode = mode

    async def wait_until_idle(self) -> None:
        """Wait until no request is left."""
        await self._idle.wait()

    async def generate(
        self, call: GenerateCall, request_id: str, trace: RequestTrace
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Run one request and yield its chunks, which contain text.

        ``trace`` observes sequences and chunks. Closing the iterator early cancels the request and
        frees its resources.

        Raises:
            RequestError: the request does not fit the model.
            OverloadedError: the queue is full.
            NotReadyError: loading, draining or ending; the message has the cause.
        """
        max_model_len = self.require_open().engine.max_model_len
        arrived_at = self._clock.now()
        with self._entering(call.sampling.n):
            prompt_ids, text = await self._prompt(call)
            max_tokens = max_new_tokens(call, len(prompt_ids), max_model_len)
            keys = await self._check_prompt(call.prompt, prompt_ids)
            self._check(call.sampling, max_tokens)
            continuations = await self._continuations(
                call, prompt_ids, len(prompt_ids) + max_tokens, arrived_at, request_id, trace
            )
            for sequence, _ in continuations:
                sequence.keys = keys
                self._inbox.submit(sequence)
                trace.sequences.append(sequence)
        readers = [
            self._read(sequence, stream, trace, text if call.sampling.echo else None)
            for sequence, stream in continuations
        ]
        with self._running(tuple(stream for _, stream in continuations)):
            try:
                async with contextlib.aclosing(merged(readers)) as chunks:
                    async for _, chunk in chunks:
                        if not call.report_rounds:
                            chunk.rounds = ()
                        add_texts(chunk, self.tokenizer)
                        yield chunk
            finally:
                for sequence, stream in continuations:
                    stream.is_abandoned = True
                    self._inbox.cancel(sequence.sequence_id)

    async def _continuations(
        self,
        call: GenerateCall,
        prompt_ids: tuple[TokenId, ...],
        max_len: int,
        arrived_at: float,
        request_id: str,
        trace: RequestTrace,
    ) -> list[tuple[Sequence, TokenStream]]:
        """Return the continuations of a request; the inbox does not have them yet."""
        sampling = call.sampling
        seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed
        mode = self._mode(call.mode)
        interval = call.message_interval_ms / 1000
        continuations: list[tuple[Sequence, TokenStream]] = []
        for choice in range(sampling.n):
            stream = TokenStream(self._wakeups, self._settings.stream_buffer_tokens, interval)
            grammar = await self._grammar(sampling)
            detectors: list[StopDetector] = []
            if sampling.stop:
                detectors.append(TextWriter(self.tokenizer, sampling.stop, prompt_ids))
            if grammar is not None:
                # Last: a token that ends the text otherwise need not be parsed.
                detectors.append(grammar)
            sequence = Sequence(
                sequence_id=next(self._sequence_ids),
                prompt_ids=prompt_ids,
                sampling=sampling,
                seed=seed,
                max_len=max_len,
                sink=stream,
                request_id=request_id,
                choice=choice,
                mode=mode,
                priority=call.priority,
                report_rounds=call.report_rounds or trace.is_recording,
                eos_token_ids=self.tokenizer.eos_token_ids,
                stop_detectors=tuple(detectors),
                grammar=grammar,
                record=SequenceRecord(arrived_at=arrived_at),
            )
            continuations.append((sequence, stream))
        return continuations

    @contextlib.contextmanager
    def _entering(self, num_continuations: int) -> Iterator[None]:
        """Inside, a request is prepared and submitted; raises as ``_check_room``.

        So the inbox has no more arrivals than ``max_queue + max_num_seqs``.
        """
        self._check_room(num_continuations)
        self._num_entering += num_continuations
        try:
            yield
        finally:
            self._num_entering -= num_continuations

    @contextlib.contextmanager
    def _running(self, streams: tuple[TokenStream, ...]) -> Iterator[None]:
        """Inside, a request runs or waits."""
        self._streams.add(streams)
        self._idle.clear()
        try:
            yield
        finally:
            self._streams.discard(streams)
            if not self._streams:
                self._idle.set()

    async def _grammar(self, sampling: SamplingParams) -> Grammar | None:
        """Return the grammar of one continuation, if the request has one."""
        if sampling.json_schema:
            return await self._grammars.grammar(GrammarSource("json_schema", sampling.json_schema))
        if sampling.regex:
            return await self._grammars.grammar(GrammarSource("regex", sampling.regex))
        return None

    async def _read(
        self, sequence: Sequence, stream: TokenStream, trace: RequestTrace, echo: str | None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of one continuation, after the text of the prompt in ``echo``.

        The text of the prompt waits for the first token: a refused request sends nothing.
        """
        writer = TextWriter(self.tokenizer, sequence.sampling.stop, sequence.prompt_ids)
        seed, num_prompt = sequence.seed, sequence.num_prompt
        ending_ids = sequence.ending_ids
        if sequence.grammar is not None:
            # With ``ignore_eos``, end-of-text tokens still end a structure.
            ending_ids |= sequence.eos_token_ids
        is_first, is_last = True, False
        while not is_last:
            try:
                chunk = await stream.take()
            except RankError as error:
                raise await self._end_of_target(error) from None
            chunk.choice = sequence.choice
            trace.observe(chunk)
            # The token that ends the text is not part of it.
            chunk.text = writer.push([each for each in chunk.token_ids if each not in ending_ids])
            is_last = chunk.finish_reason is not None
            if is_last:
                chunk.text += writer.finish()
                if writer.is_complete and chunk.finish_reason is FinishReason.LENGTH:
                    # The text ends inside a character, and its U+FFFD completes the stop string.
                    chunk.finish_reason = FinishReason.STOP
            if is_first and echo is not None:
                yield GenerationChunk(
                    token_ids=sequence.prompt_ids,
                    text=echo,
                    choice=sequence.choice,
                    seed=seed,
                    prompt_tokens=num_prompt,
                )
            elif is_first:
                chunk.seed, chunk.prompt_tokens = seed, num_prompt
            is_first = False
            yield chunk

    async def _end_of_target(self, error: RankError) -> NotReadyError:
        """Return the error of a request whose step thread has lost a rank.

        The step thread does not know which rank it was; ``fail`` is called when this is known.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CAUSE_SECONDS):
                await self._failed.wait()
        return _ends_because_of(self._failure or error)

    async def _prompt(self, call: GenerateCall) -> tuple[tuple[TokenId, ...], str]:
        """Return the prompt as token ids, and as text with ``echo`` or if it is one.

        Raises:
            FieldError: it is empty, or its template or its size does not allow it.
        """
        prompt = call.prompt
        is_chat = isinstance(prompt, Conversation)
        if isinstance(prompt, Conversation):
            prompt = render_chat(
                self._chat_template,
                prompt.turns,
                prompt.tools,
                prompt.template_arguments,
                max_characters=ANY_MODEL.text_bytes,
            )
            check_text("chat", prompt, bounds=self.bounds)
        if isinstance(prompt, str):
            # The template writes what a conversation begins with.
            ids = await self.tokenization.encode_prompt(prompt, has_prefix=is_chat)
            text = prompt
        else:
            ids, text = prompt, ""
        if not ids:
            raise FieldError("input", "the prompt is empty; it must have at least 1 token")
        if call.sampling.echo and not text:
            text = await self.tokenization.decode_prompt(ids)
        return ids, text

    async def _check_prompt(self, prompt: Prompt, prompt_ids: tuple[TokenId, ...]) -> list[Key]:
        """Check the token ids of a prompt and return the keys of a long one.

        The scheduler would compute them between two rounds: 10 to 20 ms for 128,000 tokens. Called
        after the length check: ids of a prompt that is too long are not checked.

        Raises:
            FieldError: the model does not have an id.
        """
        num_token_ids = self.num_token_ids
        block_size = self.require_open().engine.block_size
        has_keys = len(prompt_ids) >= LONG and self._settings.prefix_cache

        def check() -> list[Key]:
            check_prompt_ids(prompt, prompt_ids, num_token_ids)
            return prompt_keys(prompt_ids, block_size) if has_keys else []

        return await self.tokenization.run(len(prompt_ids), check)

    def _check(self, sampling: SamplingParams, max_tokens: int) -> None:
        """Check the token ids of sampling parameters, and the numbers that depend on the length.

        Raises:
            FieldError: the model or the tokenizer does not have an id, or a number is too large.
        """
        stops, biased = sampling.stop_token_ids, [token_id for token_id, _ in sampling.logit_bias]
        check_token_ids("sampling.stop_token_ids", stops, self.tokenizer.vocab_size)
        check_token_ids("sampling.logit_bias", biased, self.num_token_ids, is_keyed=True)
        if sampling.min_tokens > max_tokens:
            raise FieldError(
                "sampling.min_tokens",
                f"is {sampling.min_tokens}, must be in 0..{max_tokens} (max_tokens)",
            )

    def _mode(self, requested: Mode) -> Mode:
        """Return the mode in which a request runs; raises as ``check_mode``."""
        mode = self.auto_mode if requested is Mode.AUTO else requested
        self.check_mode(mode)
        settings = self._settings
        has_only_own_draft = settings.draft_model and not settings.drafts
        return Mode.SYNCHRONOUS if mode is Mode.AUTO and has_only_own_draft else mode

    def _check_room(self, num_continuations: int) -> None:
        """Refuse a request while the queue is full, before its text is tokenized.

        The scheduler decides; its counts are some milliseconds old here. While nothing waits, a
        slot may have become free. Preempted sequences wait, but not in the queue.

        Raises:
            FieldError: more continuations than run and wait together would never have room.
            OverloadedError: the queue is full.
        """
        settings = self._settings
        most = settings.max_queue + settings.max_num_seqs
        if num_continuations > most:
            raise FieldError("sampling.n", f"is {num_continuations}, must be in 1..{most} here")
        inbox = self._inbox
        room = settings.max_queue + (-inbox.num_new if inbox.num_waiting else settings.max_num_seqs)
        if self._num_entering + inbox.num_arrivals + num_continuations > room:
            raise queue_full(settings.max_queue)


def _ends_because_of(failure: Exception) -> NotReadyError:
    return NotReadyError(f"the target ends: {failure}")


def check_prompt_ids(prompt: Prompt, prompt_ids: tuple[TokenId, ...], num_token_ids: int) -> None:
    """Refuse a prompt with ids that the model does not have. Any thread.

    Raises:
        FieldError: names the first one, or the highest one of a text.
    """
    if not isinstance(prompt, str | Conversation):
        check_token_ids("token_ids.ids", prompt_ids, num_token_ids)
    elif (highest := max(map(max, in_parts(prompt_ids)))) >= num_token_ids:
        raise FieldError(
            "input",
            f"the text contains token id {highest}, which the tokenizer has and the model "
            f"does not have; the model's ids are 0..{num_token_ids - 1}",
        )


def max_new_tokens(call: GenerateCall, num_prompt: int, max_model_len: int) -> int:
    """Return the maximum number of new tokens of a request.

    Without ``max_tokens``, a chat has what fits, and another text at most ``DEFAULT_MAX_TOKENS``.

    Raises:
        ContextLengthError: prompt and new tokens together exceed the model's length.
    """
    room = max_model_len - num_prompt
    limit = call.sampling.max_tokens
    if limit is None:
        is_chat = isinstance(call.prompt, Conversation)
        limit = max(1, room if is_chat else min(DEFAULT_MAX_TOKENS, room))
    if limit > room:
        raise ContextLengthError(num_prompt, limit, max_model_len, prompt_field(call.prompt))
    return limit
