from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Peer(_message.Message):
    __slots__ = ("pod", "node", "cell", "weights_fingerprint")
    POD_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    pod: str
    node: str
    cell: str
    weights_fingerprint: str
    def __init__(self, pod: _Optional[str] = ..., node: _Optional[str] = ..., cell: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("wire_version", "vocab_size", "tokenizer_fingerprint", "lookahead", "branches", "peer", "epoch", "backends")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    vocab_size: int
    tokenizer_fingerprint: str
    lookahead: int
    branches: int
    peer: Peer
    epoch: int
    backends: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, wire_version: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., lookahead: _Optional[int] = ..., branches: _Optional[int] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ..., epoch: _Optional[int] = ..., backends: _Optional[_Iterable[str]] = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class ChannelState(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("session", "token_ids", "seed", "choice", "temperature", "max_len", "top_k", "min_p")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    session: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    choice: int
    temperature: float
    max_len: int
    top_k: int
    min_p: float
    def __init__(self, session: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., temperature: _Optional[float] = ..., max_len: _Optional[int] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class LinkSettings(_message.Message):
    __slots__ = ("fan_out_policy",)
    FAN_OUT_POLICY_FIELD_NUMBER: _ClassVar[int]
    fan_out_policy: str
    def __init__(self, fan_out_policy: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("nonce", "echo", "batch_seconds")
    class BatchSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    BATCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    echo: int
    batch_seconds: _containers.ScalarMap[int, float]
    def __init__(self, nonce: _Optional[int] = ..., echo: _Optional[int] = ..., batch_seconds: _Optional[_Mapping[int, float]] = ...) -> None: ...

class SpeculateRequest(_message.Message):
    __slots__ = ("hello", "open_session", "close_session", "link_settings", "heartbeat", "commits", "rendezvous", "channel_state")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSION_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    LINK_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_STATE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open_session: OpenSession
    close_session: CloseSession
    link_settings: LinkSettings
    heartbeat: Heartbeat
    commits: bytes
    rendezvous: Rendezvous
    channel_state: ChannelState
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open_session: _Optional[_Union[OpenSession, _Mapping]] = ..., close_session: _Optional[_Union[CloseSession, _Mapping]] = ..., link_settings: _Optional[_Union[LinkSettings, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., commits: _Optional[bytes] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ..., channel_state: _Optional[_Union[ChannelState, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "max_sessions", "lookahead", "branches", "peer", "max_len", "backend", "backend_refusal", "tokenizer_fingerprint")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BACKEND_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    max_sessions: int
    lookahead: int
    branches: int
    peer: Peer
    max_len: int
    backend: str
    backend_refusal: str
    tokenizer_fingerprint: str
    def __init__(self, epoch: _Optional[int] = ..., max_sessions: _Optional[int] = ..., lookahead: _Optional[int] = ..., branches: _Optional[int] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ..., max_len: _Optional[int] = ..., backend: _Optional[str] = ..., backend_refusal: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ...) -> None: ...

class SessionRefused(_message.Message):
    __slots__ = ("session", "reason")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session: int
    reason: str
    def __init__(self, session: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("welcome", "session_refused", "draining", "heartbeat", "tables", "rendezvous", "channel_state")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SESSION_REFUSED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_STATE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    session_refused: SessionRefused
    draining: Draining
    heartbeat: Heartbeat
    tables: bytes
    rendezvous: Rendezvous
    channel_state: ChannelState
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., session_refused: _Optional[_Union[SessionRefused, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., tables: _Optional[bytes] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ..., channel_state: _Optional[_Union[ChannelState, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "sessions", "max_sessions", "links", "draining", "table_seconds", "dtype", "dtype_reason")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TABLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_REASON_FIELD_NUMBER: _ClassVar[int]
    model: str
    sessions: int
    max_sessions: int
    links: int
    draining: bool
    table_seconds: float
    dtype: str
    dtype_reason: str
    def __init__(self, model: _Optional[str] = ..., sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., links: _Optional[int] = ..., draining: _Optional[bool] = ..., table_seconds: _Optional[float] = ..., dtype: _Optional[str] = ..., dtype_reason: _Optional[str] = ...) -> None: ...

class DrainDraftRequest(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class DrainDraftResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    def __init__(self, sessions: _Optional[int] = ...) -> None: ...
