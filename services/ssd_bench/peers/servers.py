"""Servers that run already, over HTTP: SGLang's own API, or that of OpenAI (vLLM, llama.cpp, ...).

What a server accepts is tried at the start, one token each: prompts as ids before text, and answers
with ids before text. SGLang has ids in its ``/generate``, vLLM in ``/v1/completions`` with
``return_token_ids``. The others stop at the end-of-text token if they do not know ``ignore_eos``.
"""

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from ssd.errors import SetupError
from ssd.runtime.threads import in_daemon_thread
from ssd_bench.peers.workers.wire import Batch

REQUEST_SECONDS = 600.0
ERROR_CHARS = 200
EXTRAS: Sequence[Mapping[str, Any]] = (
    {"ignore_eos": True, "return_token_ids": True},
    {"ignore_eos": True},
    {},
)
"""Fields beside those of OpenAI, from the most wanted ones on."""
Decode = Callable[[Sequence[int]], str]
Prompts = list[list[int]] | list[str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine has written for a batch."""

    texts: Sequence[list[int] | str]
    """New tokens of each prompt, or their text if the engine does not report ids."""
    num_tokens: int
    hits: int = 0
    looked_up: int = 0
    """Rounds that needed a table of a draft process: hits, misses and late tables."""

    @classmethod
    def of_ids(cls, ids: Sequence[list[int]], hits: int = 0, looked_up: int = 0) -> "Answer":
        """Return an answer that consists of ids."""
        return cls(ids, sum(map(len, ids)), hits, looked_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a server is asked."""

    is_sglang: bool = False
    has_ids: bool = True
    """Whether prompts are ids."""
    extra: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name in the table of results."""
        api = "SGLang" if self.is_sglang else "OpenAI"
        return f"{api}, prompts are {'ids' if self.has_ids else 'text'}"

    def request(self, prompts: Prompts, batch: Batch, model: str) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request."""
        common = {"temperature": batch["temperature"], **self.extra}
        if self.is_sglang:
            sampling = {**common, "max_new_tokens": batch["max_tokens"]}
            return "/generate", {"input_ids": prompts, "sampling_params": sampling}
        body = {"model": model, "prompt": prompts, "max_tokens": batch["max_tokens"], **common}
        return "/v1/completions", {**body, "seed": batch["seed"]}

    def answer(self, response: Any) -> Answer:
        """Return the texts of a response.

        Raises:
            Errors of ``UNEXPECTED``: the response has another form.
        """
        if self.is_sglang:
            texts = [output.get("output_ids") or output["text"] for output in response]
            num_tokens = sum(output["meta_info"]["completion_tokens"] for output in response)
            return Answer(texts, num_tokens)
        choices = sorted(response["choices"], key=lambda choice: int(choice["index"]))
        texts = [choice.get("token_ids") or choice["text"] for choice in choices]
        return Answer(texts, int(response["usage"]["completion_tokens"]))


DIALECTS = (
    Dialect(is_sglang=True, extra={"ignore_eos": True}),
    *(Dialect(has_ids=ids, extra=extra) for ids, extra in product((True, False), EXTRAS)),
)


_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _RefusedError(Exception):
    """The server does not take this request."""


UNEXPECTED = (_RefusedError, KeyError, TypeError, IndexError, AttributeError, ValueError)
"""A request that is refused, or a response of another form."""


class ServerEngine:
    """A server under measurement: a batch is one request."""

    def __init__(self, url: str, decode: Decode) -> None:
        """Construct.

        Args:
            url: with or without ``/v1`` at its end.
            decode: of the target's tokenizer, for servers that take only text.
        """
        self.version = ""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._decode = decode
        self._model = ""
        self._dialect = DIALECTS[0]

    async def load(self) -> None:
        """Find out what the server accepts.

        Raises:
            SetupError: it cannot be reached, or accepts nothing of all.
        """
        probe: Batch = {"prompts": [[1, 2]], "max_tokens": 1, "temperature": 0.0, "seed": 0}
        reason = ""
        for dialect in DIALECTS:
            try:
                if not dialect.is_sglang and not self._model:
                    models = await self._send("/v1/models", None)
                    self._model = str(models["data"][0]["id"])
                self._dialect = dialect
                await self._complete(probe)
            except UNEXPECTED as error:
                reason = f"{error}"
                continue
            self.version = dialect.name
            return
        raise SetupError(f"{self._url}: takes no completion requests: {reason}")

    async def complete(self, batch: Batch) -> Answer:
        """Return what the server writes.

        Raises:
            SetupError: it fails, or its response has another form than before.
        """
        try:
            return await self._complete(batch)
        except UNEXPECTED as error:
            raise SetupError(f"{self._url}: {error!r}") from error

    async def _complete(self, batch: Batch) -> Answer:
        ids = batch["prompts"]
        prompts = ids if self._dialect.has_ids else [self._decode(prompt) for prompt in ids]
        path, body = self._dialect.request(prompts, batch, self._model)
        answer = self._dialect.answer(await self._send(path, body))
        if len(answer.texts) != len(ids):
            raise _RefusedError(f"{len(answer.texts)} texts for {len(ids)} prompts")
        return answer

    async def _send(self, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                return await in_daemon_thread(partial(_exchange, self._url + path, body))
        except TimeoutError:
            raise SetupError(f"{self._url}: no response in {REQUEST_SECONDS:.0f} s") from None


def _exchange(url: str, body: Mapping[str, Any] | None) -> Any:
    """Send a body, or ask for a page; return the JSON of the response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    try:
        try:
            with _WITHOUT_PROXY.open(request, timeout=REQUEST_SECONDS) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:ERROR_CHARS]
            raise _RefusedError(f"status {error.code}: {text}") from None
        except ValueError as error:
            raise _RefusedError(f"the response is no JSON: {error}") from None
    except (OSError, http.client.HTTPException) as error:
        raise SetupError(f"{url}: {error!r}: is the server running?") from None
