"""Messages of a conversation."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ssd.errors import FieldError, UnsupportedError
from ssd.rpc.codec import MAX_TOOL_CALLS
from ssd.types import ChatTurn, ToolCall

_ROLES = ("developer", "system", "user", "assistant", "tool")


class _Open(BaseModel):
    """An object that may have fields of other servers, such as ``refusal``."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class CalledFunction(_Open):
    """The function of a call in the history."""

    name: str
    arguments: str | dict[str, Any] = ""


class PastCall(_Open):
    """A call of a tool in the history."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def call(self) -> ToolCall:
        """Return the call; one without arguments has an empty object."""
        arguments = self.function.arguments or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(self.id, self.function.name, arguments)


PastCalls = Annotated[list[PastCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)]


class Message(_Open):
    """A message of a conversation."""

    # Checked after the features that other roles need.
    role: str = Field(json_schema_extra={"enum": list(_ROLES)})
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_calls: PastCalls | None = None
    tool_call_id: str | None = None

    def turn(self, place: str) -> ChatTurn:
        """Return the message as a turn.

        Args:
            place: path of the message, for errors.

        Raises:
            FieldError: the role or the content is not valid.
            UnsupportedError: the message needs functions, images or audio.
        """
        if self.role == "function" or (self.model_extra or {}).get("function_call"):
            raise UnsupportedError(
                place, "functions are not supported; send tool_calls and messages of the role tool"
            )
        if (self.model_extra or {}).get("audio") is not None:
            raise UnsupportedError(f"{place}.audio", "is not supported; send text")
        if self.role not in _ROLES:
            allowed = ", ".join(_ROLES)
            raise FieldError(f"{place}.role", f"is {self.role[:32]!r}, must be one of {allowed}")
        calls = tuple(tool_call.call() for tool_call in self.tool_calls or ())
        if self.role != "assistant" and calls:
            raise FieldError(f"{place}.tool_calls", "only messages of the assistant have them")
        role = "system" if self.role == "developer" else self.role
        text = self._text(f"{place}.content")
        return ChatTurn(role, text, calls, self.tool_call_id or "" if role == "tool" else "")

    def _text(self, place: str) -> str:
        match self.content:
            case None:
                if self.role != "assistant":
                    raise FieldError(place, "is missing; it must be a text")
                return ""
            case str() as text:
                return text
            case parts:
                return "".join(_part_text(part, f"{place}[{i}]") for i, part in enumerate(parts))


def _part_text(part: Mapping[str, Any], place: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise UnsupportedError(
            place, f"parts of type {str(kind)[:32]!r} are not supported; send text"
        )
    if not isinstance(text, str):
        raise FieldError(f"{place}.text", "is not a text")
    return text
