"""Conversations to prompts, by the chat template of a model."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ssd.errors import FieldError, PromptSizeError, TokenizerError
from ssd.text.tokenizer_config import CONFIG, read_config, special_tokens
from ssd.types import ChatTurn

_TESTS_CONTENT = re.compile(
    r"""\bcontent['"]?[\])]*\s*(is\s+(not\s+)?|[=!]=\s*)none\b""", re.IGNORECASE
)
"""Found in templates that test anywhere whether a content is none, such as DeepSeek-R1's. There, a
turn with only calls has the content none."""
_KINDS: dict[type, str] = {list: "list", dict: "object"}
JSON = TypeVar("JSON", list[Any], dict[str, Any])
RENDERING_ERRORS = (
    *(TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError),
)
"""Errors that an expression in a template can raise."""


class _Generation(Extension):
    """Renders ``{% generation %}…{% endgeneration %}``, which marks text for training."""

    tags = {"generation"}  # noqa: RUF012 Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Scope:
        """Return the statements inside. As in a block of Jinja, variables set there end there."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Arguments(dict[str, Any]):
    """Arguments of a call.

    A template can read the object, or add it to a text, which gives JSON (DeepSeek).
    """

    def __add__(self, after: str) -> str:
        return _to_json(self) + after

    def __radd__(self, before: str) -> str:
        return before + _to_json(self)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The template of a model, in Jinja."""

    text: str
    text_with_tools: str = ""
    """Template of requests with tools, if the model has another one for them."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Variables such as ``bos_token``."""


def load_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a model folder, or None.

    A folder has one template, or several with the names ``default`` and ``tool_use``: in a list of
    the configuration, or in files, which come first.

    Raises:
        TokenizerError: the configuration or the template cannot be read or is outside the folder,
            or a template in the list of the configuration is malformed.
    """
    _check_link(folder, folder / CONFIG)
    config = read_config(folder)
    chat_template: object = _read(folder, "chat_template.jinja")
    if chat_template is None:
        chat_template = config.get("chat_template")
    if isinstance(chat_template, list):
        named = _named(chat_template, folder / CONFIG)
    else:
        named = {"default": chat_template} if isinstance(chat_template, str) else {}
    for name in ("default", "tool_use"):
        text = _read(folder, f"additional_chat_templates/{name}.jinja")
        if text is not None:
            named[name] = text
    if "default" not in named:
        return None
    return ChatTemplate(named["default"], named.get("tool_use", ""), special_tokens(config))


def _read(folder: Path, name: str) -> str | None:
    """Return the template in a file of a folder, None if there is no such file."""
    file = folder / name
    _check_link(folder, file)
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else None
    except ValueError as error:
        raise TokenizerError(f"{file}: not UTF-8: {error}") from error


def _check_link(folder: Path, file: Path) -> None:
    """Refuse a file of a model folder that is a link to a file outside the folder.

    A template is text that clients can read, so a model of another author could show them a secret
    of the process. The cache of the hub is accepted, where the files of a snapshot are links to the
    blobs of the same model. Other files of a model may be links to any place: clients cannot read
    them.

    Raises:
        TokenizerError: names the file, and where its link leads.
    """
    home, resolved = folder.resolve(), file.resolve()
    allowed = [home]
    model = home.parent.parent
    if home.parent.name == "snapshots" and model.name.startswith("models--"):
        allowed.append(model / "blobs")
    if not any(map(resolved.is_relative_to, allowed)):
        raise TokenizerError(
            f"{file}: is a link to {resolved}, which is outside the model folder; replace the link "
            "by the file"
        )


def _named(templates: list[Any], path: Path) -> dict[str, str]:
    """Return the templates of a list by name."""
    named: dict[str, str] = {}
    for index, entry in enumerate(templates):
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case {"name": str(name)} if name not in ("default", "tool_use"):
                continue
            case _:
                raise TokenizerError(
                    f"{path}: chat_template[{index}] must be an object with the texts 'name' and "
                    "'template'"
                )
    return named


def tool_format(template: ChatTemplate | None) -> str:
    """Return the format of tool calls that a template asks for; empty if it is not known.

    ``hermes``: objects between the tags ``<tool_call>``. ``llama3_json``: an object with
    ``parameters``, of Llama 3. A template with ``<function=`` asks for XML, which is not known.
    """
    text = template.text_with_tools or template.text if template is not None else ""
    if "tools" not in text or "<function=" in text:
        return ""
    if "<tool_call>" in text:
        return "hermes"
    is_llama = "<|start_header_id|>" in text and '"parameters": ' in text
    return "llama3_json" if is_llama else ""


def render_chat(
    template: ChatTemplate | None,
    turns: Sequence[ChatTurn],
    tools: str = "",
    arguments: str = "",
    *,
    max_characters: int = sys.maxsize,
) -> str:
    """Return the prompt of a conversation, ready for the assistant's turn.

    It begins with the first token of the model, if the model has one in conversations.

    Args:
        template: run in a sandbox.
        turns: oldest first.
        tools: a JSON list, the variable ``tools``; empty for none.
        arguments: a JSON object, other variables such as ``enable_thinking``; empty for none.
        max_characters: the template is stopped when it has written more.

    Raises:
        FieldError: the model has no template, it rejects the conversation, or the prompt is too
            long; or one of the JSON texts is malformed or is not valid Unicode.
    """
    if template is None:
        raise FieldError("chat", "this model has no chat template; send text or token_ids")
    variables = _parsed("chat.template_arguments", arguments, dict) if arguments else {}
    text = template.text_with_tools if tools and template.text_with_tools else template.text
    own: dict[str, Any] = {
        "messages": [],
        "tools": _parsed("chat.tools", tools, list) if tools else None,
        "add_generation_prompt": True,
    }
    if taken := sorted(own.keys() & variables.keys()):
        raise FieldError("chat.template_arguments", f"{taken[0]!r} is set by the server")

    def render(no_content: str | None) -> str:
        own["messages"] = [_message(turn, index, no_content) for index, turn in enumerate(turns)]
        parts = _compiled(text).generate({**template.special_tokens, **variables, **own})
        return _joined(parts, max_characters)

    try:
        if _TESTS_CONTENT.search(text):
            # It can test the content of one turn and need a text in another.
            with suppress(*RENDERING_ERRORS):
                return render(None)
        # Other templates, such as Qwen3's first one, need a text.
        return render("")
    except RENDERING_ERRORS as error:
        raise FieldError("chat", f"the chat template of the model rejects it: {error}") from error


def _joined(parts: Iterable[str], max_characters: int) -> str:
    """Join the output of a template, which can repeat a variable many times."""
    joined, num_characters = [], 0
    for part in parts:
        num_characters += len(part)
        if num_characters > max_characters:
            raise PromptSizeError(
                "chat", f"has over {max_characters} bytes after the chat template of the model"
            )
        joined.append(part)
    return "".join(joined)


def _message(turn: ChatTurn, index: int, no_content: str | None) -> dict[str, Any]:
    """Return a turn in the form of templates; ``no_content`` is the text of one with only calls."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        message["content"] = turn.content or no_content
        place = f"chat.messages[{index}].tool_calls"
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _Arguments(
                        _parsed(f"{place}[{number}].function.arguments", call.arguments, dict)
                    ),
                },
            }
            for number, call in enumerate(turn.tool_calls)
        ]
    return message


def _parsed(field: str, text: str, kind: type[JSON]) -> JSON:
    """Return the value of a JSON text of a type."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            # An escape can be half of a character, which no prompt can contain.
            _to_json(value).encode()
    except UnicodeEncodeError as error:
        raise FieldError(field, "is not valid Unicode") from error
    except (ValueError, RecursionError) as error:
        raise FieldError(field, f"is not valid JSON: {error}") from error
    if not isinstance(value, kind):
        raise FieldError(field, f"is not a JSON {_KINDS[kind]}")
    return value


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    """Compile a template once: compiling takes milliseconds, rendering microseconds."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    """Return the local date or time, as Hugging Face's function does."""
    return datetime.now().astimezone().strftime(form)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: FBT001, FBT002 templates call it
    """Return JSON as Hugging Face's filter does; that of Jinja escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
