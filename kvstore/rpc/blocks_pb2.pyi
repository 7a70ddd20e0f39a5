from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOT_SENT: _ClassVar[PutStatus]
    PRESENT: _ClassVar[PutStatus]
    STORED: _ClassVar[PutStatus]
    NO_ROOM: _ClassVar[PutStatus]
    NO_PARENT: _ClassVar[PutStatus]
    DROPPED: _ClassVar[PutStatus]
    REFUSED: _ClassVar[PutStatus]
    WAITING: _ClassVar[PutStatus]
NOT_SENT: PutStatus
PRESENT: PutStatus
STORED: PutStatus
NO_ROOM: PutStatus
NO_PARENT: PutStatus
DROPPED: PutStatus
REFUSED: PutStatus
WAITING: PutStatus

class Chunk(_message.Message):
    __slots__ = ("header", "block", "offset", "last", "xxh3", "missing", "reason", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    XXH3_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    block: int
    offset: int
    last: bool
    xxh3: int
    missing: bool
    reason: str
    data: bytes
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., block: _Optional[int] = ..., offset: _Optional[int] = ..., last: bool = ..., xxh3: _Optional[int] = ..., missing: bool = ..., reason: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("namespace", "fingerprints", "first_block")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    fingerprints: bytes
    first_block: int
    def __init__(self, namespace: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., first_block: _Optional[int] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("namespace", "parent", "fingerprints", "declare")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    DECLARE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    parent: bytes
    fingerprints: bytes
    declare: Declaration
    def __init__(self, namespace: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., declare: _Optional[_Union[Declaration, _Mapping]] = ...) -> None: ...

class Declaration(_message.Message):
    __slots__ = ("kind", "layout", "window_tokens", "label")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    kind: str
    layout: Layout
    window_tokens: int
    label: str
    def __init__(self, kind: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., window_tokens: _Optional[int] = ..., label: _Optional[str] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("block_tokens", "layers", "layer_bytes", "ranks")
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    block_tokens: int
    layers: int
    layer_bytes: int
    ranks: int
    def __init__(self, block_tokens: _Optional[int] = ..., layers: _Optional[int] = ..., layer_bytes: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("statuses", "reason")
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    reason: str
    def __init__(self, statuses: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("namespaces", "limits")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[Namespace]
    limits: Limits
    def __init__(self, namespaces: _Optional[_Iterable[_Union[Namespace, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("namespace", "kind", "layout", "window_tokens", "label", "block_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    kind: str
    layout: Layout
    window_tokens: int
    label: str
    block_bytes: int
    def __init__(self, namespace: _Optional[bytes] = ..., kind: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., window_tokens: _Optional[int] = ..., label: _Optional[str] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("keys_per_call_max", "pins_per_call_max", "chunk_bytes_max", "message_bytes_max", "streams_max", "idle_seconds_max")
    KEYS_PER_CALL_MAX_FIELD_NUMBER: _ClassVar[int]
    PINS_PER_CALL_MAX_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    STREAMS_MAX_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_MAX_FIELD_NUMBER: _ClassVar[int]
    keys_per_call_max: int
    pins_per_call_max: int
    chunk_bytes_max: int
    message_bytes_max: int
    streams_max: int
    idle_seconds_max: float
    def __init__(self, keys_per_call_max: _Optional[int] = ..., pins_per_call_max: _Optional[int] = ..., chunk_bytes_max: _Optional[int] = ..., message_bytes_max: _Optional[int] = ..., streams_max: _Optional[int] = ..., idle_seconds_max: _Optional[float] = ...) -> None: ...

class ExistsRequest(_message.Message):
    __slots__ = ("namespace", "fingerprints")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    fingerprints: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ...) -> None: ...

class ExistsReply(_message.Message):
    __slots__ = ("prefix_blocks", "tiers")
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    prefix_blocks: int
    tiers: bytes
    def __init__(self, prefix_blocks: _Optional[int] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("namespace", "cursor", "blocks_max")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    cursor: int
    blocks_max: int
    def __init__(self, namespace: _Optional[bytes] = ..., cursor: _Optional[int] = ..., blocks_max: _Optional[int] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("fingerprints", "tiers", "cursor")
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    fingerprints: bytes
    tiers: bytes
    cursor: int
    def __init__(self, fingerprints: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., cursor: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("namespace", "fingerprints", "prompt_tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    fingerprints: bytes
    prompt_tokens: int
    def __init__(self, namespace: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("tokens_by_tier", "predicted_ttft_seconds")
    class TokensByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    TOKENS_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens_by_tier: _containers.ScalarMap[int, int]
    predicted_ttft_seconds: float
    def __init__(self, tokens_by_tier: _Optional[_Mapping[int, int]] = ..., predicted_ttft_seconds: _Optional[float] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("namespace", "fingerprints")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    fingerprints: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("deleted_blocks",)
    DELETED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    deleted_blocks: int
    def __init__(self, deleted_blocks: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace", "fingerprints", "seconds", "hard")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    HARD_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    fingerprints: bytes
    seconds: float
    hard: bool
    def __init__(self, namespace: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., seconds: _Optional[float] = ..., hard: bool = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pinned", "short_reason")
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SHORT_REASON_FIELD_NUMBER: _ClassVar[int]
    pinned: int
    short_reason: str
    def __init__(self, pinned: _Optional[int] = ..., short_reason: _Optional[str] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("namespace", "fingerprints")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    fingerprints: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: int
    def __init__(self, unpinned: _Optional[int] = ...) -> None: ...
