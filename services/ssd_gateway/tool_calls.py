"""Calls of tools in the text of a model, as it arrives. Pure.

Two formats, with the names of vLLM's parsers: ``hermes`` (Qwen3) writes
``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` between texts, ``llama3_json`` writes
``{"name": …, "parameters": {…}}`` from the first character, several divided by semicolons. Text
that is not a call is content. The arguments are those that the model wrote, character by character.
A tag ends an object, also if a brace is missing: a call whose arguments are complete is reported.

The result does not depend on how the text is divided into parts. White space before, between and
after calls is dropped if there is nothing else, and so is a semicolon after the last one.
"""

import contextlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeGuard

_MARK = re.compile(r'["\\{}\[\]<]')
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""A call up to its arguments, in the order in which models write it."""
MAX_HEAD = 1024
"""Characters of a call in which its arguments must begin. Others are reported at their end."""
_ARGUMENTS = ("arguments", "parameters")
_DECODER = json.JSONDecoder()
_SEPARATOR = re.compile(r"(?:^\{|\s*,)\s*")
_COLON = re.compile(r"\s*:\s*")


@dataclass(slots=True)
class CallPart:
    """New characters of a call."""

    index: int
    name: str = ""
    """Set in the first part of a call."""
    arguments: str = ""


@dataclass(slots=True)
class Parts:
    """What new text adds to a message."""

    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def add(self, part: CallPart) -> None:
        """Add to a call."""
        if not part.name and self.calls and self.calls[-1].index == part.index:
            self.calls[-1].arguments += part.arguments
        else:
            self.calls.append(replace(part))

    def extend(self, later: "Parts") -> None:
        """Add what came after this."""
        self.content += later.content
        for part in later.calls:
            self.add(part)

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.content or self.calls)


class TextReader:
    """All text is content."""

    @property
    def num_calls(self) -> int:
        """Number of calls with which the message ends."""
        return 0

    def push(self, text: str) -> Parts:
        """Return what new text adds."""
        return Parts(text)

    def finish(self) -> Parts:
        """Return what was held back, at the end of the text."""
        return Parts()


class NamedReader(TextReader):
    """All text is the arguments of one call: a grammar selects it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> Parts:
        """Return what new text adds."""
        parts = Parts(calls=[CallPart(0, self._name, text)])
        self._name = ""
        return parts


class CallReader(TextReader, ABC):
    """Finds objects that are calls in a text."""

    def __init__(self, *, is_whole: bool, max_calls: int | None = None) -> None:
        """Prepare.

        Args:
            is_whole: report a call when its arguments are complete, valid or not; one whose
                arguments never are, is content.
            max_calls: further calls are dropped.
        """
        self._is_whole = is_whole
        self._max_calls = max_calls
        self._rest = ""
        """Text outside of an object that is not yet decided."""
        self._object: _Object | None = None
        self._opening = ""
        """Text before the object that belongs to it."""
        self._num_seen = 0
        self._blank = ""
        """White space that is content only if other content follows."""
        self._is_blank = True

    @property
    def num_calls(self) -> int:
        """Number of calls that were reported."""
        return self._num_seen if self._max_calls is None else min(self._num_seen, self._max_calls)

    def push(self, text: str) -> Parts:
        """Return what new text adds."""
        parts = Parts()
        self._rest += text
        while self._read_object(parts) if self._object else self._seek(parts):
            pass
        return parts

    def finish(self) -> Parts:
        """Return what was held back, at the end of the text."""
        parts = Parts()
        if self._object is not None and not self._object.is_reported:
            self._write(parts, self._opening + self._object.text)
        self._write(parts, self._rest)
        self._rest = ""
        if not self._num_seen:
            parts.content += self._blank
        return parts

    @abstractmethod
    def _seek(self, parts: Parts) -> bool:
        """Write content of ``_rest`` up to the next object; return whether to go on."""

    def _begin(self, opening: str, rest: str) -> None:
        """Begin an object, the first character of ``rest``."""
        self._opening, self._rest = opening, rest
        self._object = _Object(is_whole=self._is_whole)

    def _read_object(self, parts: Parts) -> bool:
        assert self._object is not None
        current = self._object
        was_reported = current.is_reported
        self._rest, name, arguments = current.push(self._rest)
        if current.is_reported:
            self._num_seen += not was_reported
            self._blank, self._is_blank = "", True
            index = self._num_seen - 1
            if (name or arguments) and index < self.num_calls:
                parts.add(CallPart(index, name, arguments))
        if not current.is_complete:
            return False
        if not current.is_reported:
            self._write(parts, self._opening + current.text)
        self._object = None
        self._end_object(is_call=current.is_reported)
        return True

    def _end_object(self, *, is_call: bool) -> None:
        """Prepare for what follows an object."""

    def _write(self, parts: Parts, text: str) -> None:
        """Write content; white space waits for other content."""
        self._is_blank = self._is_blank and not text.strip()
        if self._is_blank:
            self._blank += text
        else:
            parts.content += self._blank + text
            self._blank = ""


class HermesReader(CallReader):
    """Calls between ``<tool_call>`` and ``</tool_call>``."""

    _begin_tag, _end_tag = "<tool_call>", "</tool_call>"
    _has_ended_object = False

    def _seek(self, parts: Parts) -> bool:
        if self._has_ended_object:
            rest = self._rest.lstrip()
            if self._end_tag.startswith(rest) and rest != self._end_tag:
                return False
            self._has_ended_object = False
            if rest.startswith(self._end_tag):
                self._rest = rest.removeprefix(self._end_tag)
        before, tag, after = self._rest.partition(self._begin_tag)
        if not tag:
            num_held = _overlap(self._rest, self._begin_tag)
            end = len(self._rest) - num_held
            self._write(parts, self._rest[:end])
            self._rest = self._rest[end:]
            return False
        self._write(parts, before)
        rest = after.lstrip()
        self._rest = tag + after
        if not rest:
            return False
        if rest[0] == "{":
            self._begin(tag + after[: len(after) - len(rest)], rest)
        else:
            self._write(parts, tag)
            self._rest = after
        return True

    def _end_object(self, *, is_call: bool) -> None:
        self._has_ended_object = is_call


class LlamaReader(CallReader):
    """Calls from the first character, divided by semicolons."""

    _tag, _separator = "<|python_tag|>", ";"
    _has_calls = False
    _is_content = False

    def _seek(self, parts: Parts) -> bool:
        if self._is_content:
            self._write(parts, self._rest)
            self._rest = ""
            return False
        rest = self._rest.lstrip()
        before = self._separator if self._has_calls else self._tag
        if before.startswith(rest):
            return False
        is_divided = rest.startswith(before) or not self._has_calls
        rest = rest.removeprefix(before).lstrip()
        if not rest:
            return False
        if rest[0] == "{" and is_divided:
            self._begin(self._rest[: len(self._rest) - len(rest)], rest)
        else:
            self._is_content = True
        return True

    def finish(self) -> Parts:
        """Return what was held back, at the end of the text; not a separator that ends it."""
        if self._has_calls and self._rest.strip() == self._separator:
            self._rest = ""
        return super().finish()

    def _end_object(self, *, is_call: bool) -> None:
        self._has_calls = True
        self._is_content = not is_call


class ListReader(CallReader):
    """A JSON list of calls, which a grammar selects."""

    _between = "[], \n"
    _is_content = False

    def _seek(self, parts: Parts) -> bool:
        rest = self._rest.lstrip(self._between)
        if not rest and not self._is_content:
            return False
        before, self._rest = self._rest.removesuffix(rest), ""
        if rest.startswith("{") and not self._is_content:
            self._begin(before, rest)
            return True
        # No list, which a target without a grammar can write.
        self._is_content = True
        self._write(parts, before + rest)
        return False

    def finish(self) -> Parts:
        """Return what was held back, at the end of the text; not the end of a list of calls."""
        if self._num_seen and not self._rest.lstrip(self._between):
            self._rest = ""
        return super().finish()


class _Object:
    """One object of a text that should be JSON, which may be a call."""

    def __init__(self, *, is_whole: bool) -> None:
        self._text = io.StringIO()
        self._start = ""
        """The first characters; matching all again for each part would take quadratic time."""
        self.is_complete = False
        self.is_reported = False
        """Whether it is a call and its name was returned."""
        self._is_whole = is_whole
        self._depth = 0
        """Number of open brackets."""
        self._is_in_text = False
        self._is_escaped = False
        self._name = ""
        """Name of a call whose members are in the usual order, once its arguments begin."""
        self._new = ""
        """Its arguments that were not returned yet."""
        self._has_closed = False
        """Whether the first object or list in the object, the arguments of a call, is complete."""

    @property
    def text(self) -> str:
        """The object as far as it has arrived."""
        return self._text.getvalue()

    def push(self, text: str) -> tuple[str, str, str]:
        """Return the text after the object, and the name and the arguments of the call so far.

        A name or arguments are returned once.
        """
        rest, start, closed_at = "", 0, 0 if self._has_closed else len(text)
        for end, depth in self._ends(text):
            if depth == 1 and not self._has_closed:
                self._has_closed, closed_at = True, end
            if depth == 0:
                self.is_complete = True
                text, rest = text[:end], text[end:]
                break
        self._text.write(text)
        if not self._name:
            head = self._find_head(text)
            name = _parsed(head[1]) if head else None
            if not head or not _is_name(name):
                return rest, *(self._whole_call() if self.is_complete else ("", ""))
            # No bracket closes in the head, so the arguments begin in this text.
            self._name, start = name, head.end() - len(self.text) + len(text)
        self._new += text[start:closed_at]
        if self._is_whole and not self._has_closed:
            return rest, "", ""
        name = "" if self.is_reported else self._name
        arguments, self._new = self._new, ""
        self.is_reported = True
        return rest, name, arguments

    def _ends(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the place after each bracket that closes, with the number of open brackets.

        A tag, which is not JSON, ends all brackets.
        """
        place = 0
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            match = _MARK.search(text, place)
            if match is None:
                return
            place = match.end()
            mark = match[0]
            if self._is_in_text:
                self._is_escaped = mark == "\\"
                self._is_in_text = mark != '"'
            elif mark == '"':
                self._is_in_text = True
            elif mark == "<":
                yield match.start(), 0
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                yield place, self._depth

    def _find_head(self, text: str) -> re.Match[str] | None:
        """Return the beginning of a call after new text."""
        room = MAX_HEAD - len(self._start)
        if not room:
            return None
        self._start += text[:room]
        return _HEAD.match(self._start)

    def _whole_call(self) -> tuple[str, str]:
        """Return name and arguments of an object that has ended; empty if it is not a call."""
        members = _members(self.text)
        name = _parsed(members.get("name", ""))
        objects = (members.get(key, "") for key in members if key in _ARGUMENTS)
        arguments = next((text for text in objects if text.startswith("{")), "")
        if not _is_name(name) or not arguments:
            return "", ""
        self.is_reported = True
        return name, arguments


def _members(text: str) -> dict[str, str]:
    """Return the values of a JSON object by name, as they are written.

    Of several with one name the first counts. What follows a malformed one is left out.
    """
    members: dict[str, str] = {}
    place = 0
    with contextlib.suppress(ValueError, RecursionError):
        while separator := _SEPARATOR.match(text, place):
            name, end = _DECODER.raw_decode(text, separator.end())
            colon = _COLON.match(text, end)
            if colon is None or not isinstance(name, str):
                break
            _, place = _DECODER.raw_decode(text, colon.end())
            members.setdefault(name, text[colon.end() : place])
    return members


def _is_name(value: object) -> TypeGuard[str]:
    """Whether a value can be sent as a name: an escape in JSON can be half of a character."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parsed(text: str) -> object:
    """Return the value of a JSON text; None if it is malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of a text with which a tag begins."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
