"""The gateway as a process, in front of a real target, with the official OpenAI client."""

import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.gateway import gateway_of
from tests.pairs import target_of
from tests.pki import Authority, put
from tests.processes import completed, running
from tests.texts import read

from ssd import demo
from ssd.rpc.credentials import TlsFiles
from ssd.text.chat_template import load_template, render_chat
from ssd.types import ChatTurn, SamplingParams

PROMPT = "def fib(n):"
LIMIT = 24


async def test_texts_are_those_of_the_target_and_sigterm_finishes_streams() -> None:
    async with (
        target_of("demo://target") as (process, direct),
        gateway_of(process, "--drain-seconds", "20") as (front, client),
    ):
        sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=LIMIT)
        wanted = (await read(direct, PROMPT, sampling)).text
        same: Any = {"model": "target", "temperature": 0.8, "seed": 5, "max_tokens": LIMIT}
        whole = await client.completions.create(prompt=PROMPT, **same)
        assert whole.choices[0].text == wanted
        assert whole.usage.completion_tokens == LIMIT

        turns = (ChatTurn("system", "Short."), ChatTurn("user", "Add two numbers."))
        template = load_template(demo.folder("demo://target"))
        messages: Any = [{"role": each.role, "content": each.content} for each in turns]
        chat = await client.chat.completions.create(messages=messages, **same)
        rendered = await client.completions.create(prompt=render_chat(template, turns), **same)
        assert chat.choices[0].message.content == rendered.choices[0].text

        several = await client.chat.completions.create(
            messages=messages, n=2, logprobs=True, top_logprobs=3, top_p=0.9, **same
        )
        assert len({choice.message.content for choice in several.choices}) == 2
        for choice in several.choices:
            positions = choice.logprobs.content
            assert len(positions) == LIMIT
            assert all(len(each.top_logprobs) == 3 for each in positions)
            spelled = b"".join(bytes(each.bytes) for each in positions)
            assert spelled.decode() == choice.message.content

        await answers_have_their_structure(client, messages, same)

        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        counted = await client.chat.completions.create(
            messages=messages,
            stream=True,
            stream_options=options,
            extra_body={"chat_template_kwargs": {"unknown": [1]}},
            **same,
        )
        counts = [part.usage async for part in counted]
        assert {each.prompt_tokens for each in counts} == {chat.usage.prompt_tokens}
        assert counts[0].completion_tokens == 0
        assert counts[-2].completion_tokens == counts[-1].completion_tokens == LIMIT

        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="target", prompt=PROMPT, max_tokens=5000)
        assert caught.value.code == "context_length_exceeded"

        stream = await client.completions.create(stream=True, prompt=PROMPT, **same)
        parts = aiter(stream)
        text = (await anext(parts)).choices[0].text
        front.signal(signal.SIGTERM)
        async for part in parts:
            text += part.choices[0].text
        assert text == wanted
        assert await front.wait() == 0


async def answers_have_their_structure(client: AsyncOpenAI, messages: Any, same: Any) -> None:
    # Characters that mean something in an expression.
    chosen = await client.completions.create(
        prompt=PROMPT, **same, extra_body={"guided_choice": ["a (b) - c\n", "#&~ \t<d>"]}
    )
    assert chosen.choices[0].text in ("a (b) - c\n", "#&~ \t<d>")

    shape = {"enum": ["short", "long"]}
    wanted_format: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": shape}}
    structured = await client.chat.completions.create(
        messages=messages, response_format=wanted_format, **same
    )
    assert structured.choices[0].finish_reason == "stop"
    assert json.loads(structured.choices[0].message.content) in ("short", "long")

    broken: Any = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(messages=messages, response_format=broken, **same)
    assert caught.value.param == "response_format"


@pytest.mark.slow
async def test_a_gateway_proves_its_identity_to_targets_and_says_why_one_refuses_it(
    tmp_path: Path,
) -> None:
    authority, token, other = Authority(), "first-token-of-clients", "second-token-of-clients"
    server = authority.files(tmp_path / "target", "127.0.0.1")
    own = authority.files(tmp_path / "gateway", "gateway.demo")
    foreign = Authority("another").files(tmp_path / "foreign", "gateway.demo")
    accepted, presented = put(tmp_path / "accepted", token), put(tmp_path / "presented", token)
    wrong = put(tmp_path / "wrong", other)
    of_target = (
        *("--tls-certificate", server.certificate, "--tls-key", server.key),
        *("--tls-client-ca", server.ca, "--caller-names", "gateway.demo", "--token-file", accepted),
    )

    def identity(files: TlsFiles, token_file: str, ca: str = own.ca) -> tuple[str, ...]:
        pair = ("--target-certificate", files.certificate, "--target-key", files.key)
        return (*pair, "--target-ca", ca, "--target-token-file", token_file, "--port", "0")

    async with AsyncExitStack() as stack:
        process, _ = await stack.enter_async_context(target_of("demo://target", *of_target))
        for flags, reason in {
            identity(foreign, presented): "perhaps the port needs TLS or a client certificate",
            identity(own, presented, foreign.ca): "the server's certificate is not accepted",
            identity(own, wrong): "the token is not one of the role client",
        }.items():
            refused = running("ssd_gateway", "--targets", process.grpc_address, *flags)
            front = await stack.enter_async_context(refused)
            assert reason in str((await front.until("target_not_ready")).fields["reason"])
            status, text = await front.probe("/readyz")
            assert (status, text.strip()) == (503, "no target is ready, targets: 1")

        flags = identity(own, presented)
        serving = running("ssd_gateway", "--targets", process.grpc_address, *flags)
        front = await stack.enter_async_context(serving)
        await front.until("ready")
        _, page = await front.probe("/metrics")
        assert 'ssd_tls_certificate_expiry_timestamp_seconds{role="client"}' in page
        base = f"http://{front.http_address}/v1"
        client = AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
        await stack.enter_async_context(client)
        request: Any = {"model": "target", "prompt": PROMPT, "max_tokens": 4}
        assert (await client.completions.create(**request)).usage.completion_tokens == 4
        put(Path(accepted), other)
        with pytest.raises(openai.InternalServerError, match="refuses the credentials"):
            await client.completions.create(**request)
        put(Path(presented), other)
        await front.until("target_ready")
        assert (await client.completions.create(**request)).usage.completion_tokens == 4


async def test_print_config_checks_the_settings() -> None:
    shown = completed("ssd_gateway", "--print-config", "--max-requests", "7")
    assert json.loads(shown.stdout)["max_requests"] == 7
    refused = completed("ssd_gateway", "--api-keys-file", "/nonexistent/keys")
    assert refused.code == 78
    assert "api_keys_file" in refused.stderr
