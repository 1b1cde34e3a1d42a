"""Messages of every type with any content, and bytes that are almost a message."""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import settings
from hypothesis import strategies as st

DEPTH = 3
"""Maximum nesting of messages."""
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    # Fields of enumerations hold any number.
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def scaled(num_examples: int) -> settings:
    """Settings of a test with this number of examples; 100 times as many in the long profile."""
    default = settings.default
    assert default is not None
    return settings(max_examples=max(1, num_examples * default.max_examples // 100))


def messages(kind: type[Message], depth: int = DEPTH) -> st.SearchStrategy[Any]:
    """Messages of one type: each field is absent, usual or extreme."""
    return _contents(kind.DESCRIPTOR, depth).map(lambda fields: kind(**fields))


def almost(message: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Bytes of a message with a part replaced, or any bytes."""

    def damaged(payload: bytes, place: int, length: int, instead: bytes) -> bytes:
        start = place % (len(payload) + 1)
        return payload[:start] + instead + payload[start + length :]

    return st.binary(max_size=200) | st.builds(
        damaged,
        message.map(lambda each: each.SerializeToString()),
        st.integers(0, 10_000),
        st.integers(0, 8),
        st.binary(max_size=8),
    )


def _contents(descriptor: Any, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    choices: dict[str, st.SearchStrategy[Any]] = {}
    for field in descriptor.fields:
        value = _values(field, depth)
        if value is not None:
            choices[field.name] = value

    def one_of_each_oneof(fields: dict[str, Any]) -> dict[str, Any]:
        taken = set[str]()
        kept = {}
        for name, value in fields.items():
            group = descriptor.fields_by_name[name].containing_oneof
            if group is not None and group.name in taken:
                continue
            taken |= {group.name} if group is not None else set()
            kept[name] = value
        return kept

    return st.fixed_dictionaries({}, optional=choices).map(one_of_each_oneof)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any] | None:
    """Values of a field; None for a message that is nested too deeply."""
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = (_single(entry.fields_by_name[name], depth) for name in ("key", "value"))
        assert key is not None
        assert value is not None
        return st.dictionaries(key, value, max_size=20)
    single = _single(field, depth)
    if single is None:
        return None
    return st.lists(single, max_size=20) if field.is_repeated else single


_WORDS = st.sampled_from(["", "grpc", "user", "ngram", "uniform", "gloo", "x" * 300])
_OTHERS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(0, 2, width=32) | st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(0, 2) | st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: _WORDS
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
}


def _single(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any] | None:
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return st.integers(0, 20) | st.sampled_from([low, high, high // 2]) | st.integers(low, high)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=200)
    if field.cpp_type in _OTHERS:
        return _OTHERS[field.cpp_type]
    assert field.message_type is not None
    return _contents(field.message_type, depth - 1) if depth else None
