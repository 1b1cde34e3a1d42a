from ssd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LINK_STATE_UNSPECIFIED: _ClassVar[LinkState]
    LINK_STATE_CONNECTING: _ClassVar[LinkState]
    LINK_STATE_ACTIVE: _ClassVar[LinkState]
    LINK_STATE_QUARANTINED: _ClassVar[LinkState]
    LINK_STATE_DRAINING: _ClassVar[LinkState]
    LINK_STATE_LOST: _ClassVar[LinkState]
    LINK_STATE_REFUSED: _ClassVar[LinkState]
LINK_STATE_UNSPECIFIED: LinkState
LINK_STATE_CONNECTING: LinkState
LINK_STATE_ACTIVE: LinkState
LINK_STATE_QUARANTINED: LinkState
LINK_STATE_DRAINING: LinkState
LINK_STATE_LOST: LinkState
LINK_STATE_REFUSED: LinkState

class LinkStatus(_message.Message):
    __slots__ = ("address", "state", "epoch", "sessions", "sustainable_sessions", "hits", "misses", "late", "round_trip_seconds", "channel", "reason", "draft_pod", "draft_node", "transport", "draft_weights", "channel_reason", "channel_round_trip_seconds", "channel_bytes_per_second")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SUSTAINABLE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAFT_POD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NODE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_REASON_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: LinkState
    epoch: int
    sessions: int
    sustainable_sessions: int
    hits: int
    misses: int
    late: int
    round_trip_seconds: float
    channel: str
    reason: str
    draft_pod: str
    draft_node: str
    transport: str
    draft_weights: str
    channel_reason: str
    channel_round_trip_seconds: float
    channel_bytes_per_second: float
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[LinkState, str]] = ..., epoch: _Optional[int] = ..., sessions: _Optional[int] = ..., sustainable_sessions: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., late: _Optional[int] = ..., round_trip_seconds: _Optional[float] = ..., channel: _Optional[str] = ..., reason: _Optional[str] = ..., draft_pod: _Optional[str] = ..., draft_node: _Optional[str] = ..., transport: _Optional[str] = ..., draft_weights: _Optional[str] = ..., channel_reason: _Optional[str] = ..., channel_round_trip_seconds: _Optional[float] = ..., channel_bytes_per_second: _Optional[float] = ...) -> None: ...

class GetPoolStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPoolStatusResponse(_message.Message):
    __slots__ = ("links", "running_sequences", "waiting_sequences", "hit_rate", "eligible_sequences", "speculating", "tokens_per_round", "desired_draft_replicas", "efficiency", "weights_fingerprint", "dtype", "dtype_reason", "speculation_reason", "speculation_speed_up", "max_proposed_tokens")
    LINKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SPECULATING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_ROUND_FIELD_NUMBER: _ClassVar[int]
    DESIRED_DRAFT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    EFFICIENCY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_REASON_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_REASON_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_SPEED_UP_FIELD_NUMBER: _ClassVar[int]
    MAX_PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    running_sequences: int
    waiting_sequences: int
    hit_rate: float
    eligible_sequences: float
    speculating: bool
    tokens_per_round: float
    desired_draft_replicas: float
    efficiency: float
    weights_fingerprint: str
    dtype: str
    dtype_reason: str
    speculation_reason: str
    speculation_speed_up: float
    max_proposed_tokens: int
    def __init__(self, links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., hit_rate: _Optional[float] = ..., eligible_sequences: _Optional[float] = ..., speculating: _Optional[bool] = ..., tokens_per_round: _Optional[float] = ..., desired_draft_replicas: _Optional[float] = ..., efficiency: _Optional[float] = ..., weights_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., dtype_reason: _Optional[str] = ..., speculation_reason: _Optional[str] = ..., speculation_speed_up: _Optional[float] = ..., max_proposed_tokens: _Optional[int] = ...) -> None: ...

class WatchPoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchPoolResponse(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: GetPoolStatusResponse
    def __init__(self, pool: _Optional[_Union[GetPoolStatusResponse, _Mapping]] = ...) -> None: ...

class SetSpeculationRequest(_message.Message):
    __slots__ = ("mode", "fan_out_policy", "backup", "draft_deadline_ms")
    MODE_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_POLICY_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    mode: _types_pb2.Mode
    fan_out_policy: str
    backup: str
    draft_deadline_ms: float
    def __init__(self, mode: _Optional[_Union[_types_pb2.Mode, str]] = ..., fan_out_policy: _Optional[str] = ..., backup: _Optional[str] = ..., draft_deadline_ms: _Optional[float] = ...) -> None: ...

class SetSpeculationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainTargetRequest(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class DrainTargetResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    def __init__(self, requests: _Optional[int] = ...) -> None: ...
