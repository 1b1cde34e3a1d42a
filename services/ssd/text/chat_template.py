"""Conversations to prompts, by the chat template of a model."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ssd.errors import FieldError, TokenizerError
from ssd.types import ChatTurn

RENDERING_ERRORS = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors that an expression in a template can raise."""


def load_template(folder: Path) -> str | None:
    """Return the chat template of a model folder, or None.

    Raises:
        TokenizerError: the configuration cannot be read.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"{config}: not a JSON object: {error}") from error
    return template if isinstance(template, str) else None


def render_chat(template: str | None, turns: Sequence[ChatTurn], **tokens: Any) -> str:
    """Return the prompt of a conversation, ready for the assistant's turn.

    Args:
        template: Jinja, run in a sandbox.
        turns: oldest first.
        tokens: special tokens such as ``bos_token``, which templates use.

    Raises:
        FieldError: the model has no template, or it rejects the conversation.
    """
    if template is None:
        raise FieldError("chat", "this model has no chat template; send text or token_ids")
    try:
        return _compiled(template).render(
            messages=[asdict(turn) for turn in turns], add_generation_prompt=True, **tokens
        )
    except RENDERING_ERRORS as error:
        raise FieldError("chat", f"the chat template of the model rejects it: {error}") from error


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    """Compile a template once: compiling takes milliseconds, rendering microseconds."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
