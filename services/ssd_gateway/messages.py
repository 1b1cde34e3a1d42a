"""Messages of a conversation."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ssd.errors import FieldError, UnsupportedError
from ssd.types import ChatTurn

_ROLES = ("developer", "system", "user", "assistant")


class Message(BaseModel):
    """A message of a conversation. Fields of roles that are refused may be present."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    # Checked after the features that other roles need.
    role: str = Field(json_schema_extra={"enum": list(_ROLES)})
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    def turn(self, place: str) -> ChatTurn:
        """Return the message as a turn.

        Args:
            place: path of the message, for errors.

        Raises:
            FieldError: the role or the content is not valid.
            UnsupportedError: the message needs tools, images or audio.
        """
        extra = self.model_extra or {}
        if (
            self.role in ("tool", "function")
            or extra.get("tool_calls")
            or extra.get("function_call")
        ):
            raise UnsupportedError(place, "tools are not supported; send text messages")
        if self.role not in _ROLES:
            allowed = ", ".join(_ROLES)
            raise FieldError(f"{place}.role", f"is {self.role[:32]!r}, must be one of {allowed}")
        role = "system" if self.role == "developer" else self.role
        match self.content:
            case None:
                raise FieldError(f"{place}.content", "is missing; it must be a text")
            case str() as text:
                return ChatTurn(role, text)
            case parts:
                texts = [_part_text(part, f"{place}.content[{i}]") for i, part in enumerate(parts)]
                return ChatTurn(role, "".join(texts))


def _part_text(part: Mapping[str, Any], place: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise UnsupportedError(
            place, f"parts of type {str(kind)[:32]!r} are not supported; send text"
        )
    if not isinstance(text, str):
        raise FieldError(f"{place}.text", "is not a text")
    return text
