from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_ORDER: _ClassVar[LoadOrder]
    LAYER_ORDER: _ClassVar[LoadOrder]
    BACK_ORDER: _ClassVar[LoadOrder]
BLOCK_ORDER: LoadOrder
LAYER_ORDER: LoadOrder
BACK_ORDER: LoadOrder

class AttachRequest(_message.Message):
    __slots__ = ("hello", "unmapped", "device", "pressure")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    UNMAPPED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    unmapped: Unmapped
    device: Device
    pressure: Pressure
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., unmapped: _Optional[_Union[Unmapped, _Mapping]] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., pressure: _Optional[_Union[Pressure, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "engine", "pid", "lock_file")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LOCK_FILE_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    engine: str
    pid: int
    lock_file: str
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., engine: _Optional[str] = ..., pid: _Optional[int] = ..., lock_file: _Optional[str] = ...) -> None: ...

class Unmapped(_message.Message):
    __slots__ = ("slab",)
    SLAB_FIELD_NUMBER: _ClassVar[int]
    slab: int
    def __init__(self, slab: _Optional[int] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("maps_slabs",)
    MAPS_SLABS_FIELD_NUMBER: _ClassVar[int]
    maps_slabs: bool
    def __init__(self, maps_slabs: bool = ...) -> None: ...

class Pressure(_message.Message):
    __slots__ = ("device_bytes",)
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    device_bytes: int
    def __init__(self, device_bytes: _Optional[int] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("welcome", "unmap", "draining", "slabs")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    UNMAP_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    unmap: UnmapSlab
    draining: Draining
    slabs: Slabs
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., unmap: _Optional[_Union[UnmapSlab, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., slabs: _Optional[_Union[Slabs, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "client", "boot_id", "arena_dir", "region_bytes", "regions", "read_lease_seconds", "write_lease_seconds", "lease_blocks_max", "version", "gpu_directory_at", "gpu_slab_bytes")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_DIR_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    READ_LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GPU_DIRECTORY_AT_FIELD_NUMBER: _ClassVar[int]
    GPU_SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    client: int
    boot_id: int
    arena_dir: str
    region_bytes: int
    regions: int
    read_lease_seconds: float
    write_lease_seconds: float
    lease_blocks_max: int
    version: str
    gpu_directory_at: int
    gpu_slab_bytes: int
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., client: _Optional[int] = ..., boot_id: _Optional[int] = ..., arena_dir: _Optional[str] = ..., region_bytes: _Optional[int] = ..., regions: _Optional[int] = ..., read_lease_seconds: _Optional[float] = ..., write_lease_seconds: _Optional[float] = ..., lease_blocks_max: _Optional[int] = ..., version: _Optional[str] = ..., gpu_directory_at: _Optional[int] = ..., gpu_slab_bytes: _Optional[int] = ...) -> None: ...

class UnmapSlab(_message.Message):
    __slots__ = ("slab",)
    SLAB_FIELD_NUMBER: _ClassVar[int]
    slab: int
    def __init__(self, slab: _Optional[int] = ...) -> None: ...

class Slabs(_message.Message):
    __slots__ = ("slabs",)
    SLABS_FIELD_NUMBER: _ClassVar[int]
    slabs: _containers.RepeatedCompositeFieldContainer[Slab]
    def __init__(self, slabs: _Optional[_Iterable[_Union[Slab, _Mapping]]] = ...) -> None: ...

class Slab(_message.Message):
    __slots__ = ("slab", "handle")
    SLAB_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    slab: int
    handle: bytes
    def __init__(self, slab: _Optional[int] = ..., handle: _Optional[bytes] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

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

class DeclareRequest(_message.Message):
    __slots__ = ("client", "namespace", "kind", "layout", "window_tokens", "label", "model")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    client: int
    namespace: bytes
    kind: str
    layout: Layout
    window_tokens: int
    label: str
    model: ModelSize
    def __init__(self, client: _Optional[int] = ..., namespace: _Optional[bytes] = ..., kind: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., window_tokens: _Optional[int] = ..., label: _Optional[str] = ..., model: _Optional[_Union[ModelSize, _Mapping]] = ...) -> None: ...

class ModelSize(_message.Message):
    __slots__ = ("parameters", "layers", "hidden")
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    parameters: float
    layers: int
    hidden: int
    def __init__(self, parameters: _Optional[float] = ..., layers: _Optional[int] = ..., hidden: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class NamespaceReply(_message.Message):
    __slots__ = ("namespace", "index", "kind", "layout", "window_tokens", "label", "clear_count", "slot_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    CLEAR_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    index: int
    kind: str
    layout: Layout
    window_tokens: int
    label: str
    clear_count: int
    slot_bytes: int
    def __init__(self, namespace: _Optional[bytes] = ..., index: _Optional[int] = ..., kind: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., window_tokens: _Optional[int] = ..., label: _Optional[str] = ..., clear_count: _Optional[int] = ..., slot_bytes: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("namespace", "fingerprints", "hints")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    fingerprints: bytes
    hints: _containers.RepeatedCompositeFieldContainer[Hint]
    def __init__(self, namespace: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., hints: _Optional[_Iterable[_Union[Hint, _Mapping]]] = ...) -> None: ...

class Hint(_message.Message):
    __slots__ = ("hint_class", "start_tokens", "end_tokens")
    HINT_CLASS_FIELD_NUMBER: _ClassVar[int]
    START_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hint_class: int
    start_tokens: int
    end_tokens: int
    def __init__(self, hint_class: _Optional[int] = ..., start_tokens: _Optional[int] = ..., end_tokens: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("client", "groups", "prompt_tokens", "deadline_ms", "want_lease", "begin_load", "plan")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    WANT_LEASE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_LOAD_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    client: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    prompt_tokens: int
    deadline_ms: int
    want_lease: bool
    begin_load: bool
    plan: Ability
    def __init__(self, client: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., want_lease: bool = ..., begin_load: bool = ..., plan: _Optional[_Union[Ability, _Mapping]] = ...) -> None: ...

class Ability(_message.Message):
    __slots__ = ("prompt_tokens", "held_blocks", "stages", "unit_blocks")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    UNIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    held_blocks: int
    stages: int
    unit_blocks: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., held_blocks: _Optional[int] = ..., stages: _Optional[int] = ..., unit_blocks: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("first", "last", "from_back", "in_layers", "ttft_seconds", "recompute_seconds", "begin_seconds", "load_seconds", "saved_seconds", "seconds_per_call", "seconds_per_token", "seconds_per_token_position")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FROM_BACK_FIELD_NUMBER: _ClassVar[int]
    IN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_CALL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_TOKEN_POSITION_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    from_back: bool
    in_layers: bool
    ttft_seconds: float
    recompute_seconds: float
    begin_seconds: float
    load_seconds: float
    saved_seconds: float
    seconds_per_call: float
    seconds_per_token: float
    seconds_per_token_position: float
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., from_back: bool = ..., in_layers: bool = ..., ttft_seconds: _Optional[float] = ..., recompute_seconds: _Optional[float] = ..., begin_seconds: _Optional[float] = ..., load_seconds: _Optional[float] = ..., saved_seconds: _Optional[float] = ..., seconds_per_call: _Optional[float] = ..., seconds_per_token: _Optional[float] = ..., seconds_per_token_position: _Optional[float] = ...) -> None: ...

class GroupMatch(_message.Message):
    __slots__ = ("blocks", "first", "offsets", "generations", "tiers")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    first: int
    offsets: bytes
    generations: bytes
    tiers: bytes
    def __init__(self, blocks: _Optional[int] = ..., first: _Optional[int] = ..., offsets: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("boundary_tokens", "lease", "lease_seconds", "groups", "short_reason", "boot_id", "plan")
    BOUNDARY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SHORT_REASON_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    boundary_tokens: int
    lease: int
    lease_seconds: float
    groups: _containers.RepeatedCompositeFieldContainer[GroupMatch]
    short_reason: str
    boot_id: int
    plan: Plan
    def __init__(self, boundary_tokens: _Optional[int] = ..., lease: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., groups: _Optional[_Iterable[_Union[GroupMatch, _Mapping]]] = ..., short_reason: _Optional[str] = ..., boot_id: _Optional[int] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("client", "lease", "order", "deadline_ms", "staging", "first_block")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    client: int
    lease: int
    order: LoadOrder
    deadline_ms: int
    staging: bool
    first_block: int
    def __init__(self, client: _Optional[int] = ..., lease: _Optional[int] = ..., order: _Optional[_Union[LoadOrder, str]] = ..., deadline_ms: _Optional[int] = ..., staging: bool = ..., first_block: _Optional[int] = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("grants", "short_reason", "ready", "failed", "done")
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    SHORT_REASON_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    grants: _containers.RepeatedCompositeFieldContainer[GroupMatch]
    short_reason: str
    ready: bytes
    failed: bytes
    done: bool
    def __init__(self, grants: _Optional[_Iterable[_Union[GroupMatch, _Mapping]]] = ..., short_reason: _Optional[str] = ..., ready: _Optional[bytes] = ..., failed: _Optional[bytes] = ..., done: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("client", "leases")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    client: int
    leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, client: _Optional[int] = ..., leases: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("client", "lease", "reservation")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    client: int
    lease: int
    reservation: int
    def __init__(self, client: _Optional[int] = ..., lease: _Optional[int] = ..., reservation: _Optional[int] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("client", "used", "missed_blocks", "prefills", "copies", "missed_tokens")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    MISSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    MISSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    client: int
    used: _containers.RepeatedCompositeFieldContainer[Group]
    missed_blocks: int
    prefills: _containers.RepeatedCompositeFieldContainer[PrefillTime]
    copies: _containers.RepeatedCompositeFieldContainer[CopyTime]
    missed_tokens: int
    def __init__(self, client: _Optional[int] = ..., used: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., missed_blocks: _Optional[int] = ..., prefills: _Optional[_Iterable[_Union[PrefillTime, _Mapping]]] = ..., copies: _Optional[_Iterable[_Union[CopyTime, _Mapping]]] = ..., missed_tokens: _Optional[int] = ...) -> None: ...

class PrefillTime(_message.Message):
    __slots__ = ("namespace", "start_tokens", "end_tokens", "seconds")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    START_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    start_tokens: int
    end_tokens: int
    seconds: float
    def __init__(self, namespace: _Optional[bytes] = ..., start_tokens: _Optional[int] = ..., end_tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class CopyTime(_message.Message):
    __slots__ = ("bytes", "seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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

class PrefetchRequest(_message.Message):
    __slots__ = ("client", "groups")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    client: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    def __init__(self, client: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    def __init__(self, accepted: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("client", "namespace", "fingerprints", "seconds", "hard", "tenant")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    HARD_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    client: int
    namespace: bytes
    fingerprints: bytes
    seconds: float
    hard: bool
    tenant: str
    def __init__(self, client: _Optional[int] = ..., namespace: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., seconds: _Optional[float] = ..., hard: bool = ..., tenant: _Optional[str] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pinned", "short_reason")
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SHORT_REASON_FIELD_NUMBER: _ClassVar[int]
    pinned: int
    short_reason: str
    def __init__(self, pinned: _Optional[int] = ..., short_reason: _Optional[str] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("client", "namespace", "fingerprints", "tenant")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    client: int
    namespace: bytes
    fingerprints: bytes
    tenant: str
    def __init__(self, client: _Optional[int] = ..., namespace: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: int
    def __init__(self, unpinned: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("client", "namespace", "parent", "fingerprints", "count", "reservation")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    client: int
    namespace: bytes
    parent: bytes
    fingerprints: bytes
    count: int
    reservation: int
    def __init__(self, client: _Optional[int] = ..., namespace: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., count: _Optional[int] = ..., reservation: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation", "lease_seconds", "statuses", "offsets")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    lease_seconds: float
    statuses: bytes
    offsets: bytes
    def __init__(self, reservation: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., statuses: _Optional[bytes] = ..., offsets: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("client", "reservation", "rank", "all_ranks", "parent", "fingerprints", "offsets", "end", "hint_classes")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALL_RANKS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    HINT_CLASSES_FIELD_NUMBER: _ClassVar[int]
    client: int
    reservation: int
    rank: int
    all_ranks: bool
    parent: bytes
    fingerprints: bytes
    offsets: bytes
    end: bool
    hint_classes: bytes
    def __init__(self, client: _Optional[int] = ..., reservation: _Optional[int] = ..., rank: _Optional[int] = ..., all_ranks: bool = ..., parent: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., end: bool = ..., hint_classes: _Optional[bytes] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("statuses", "accepted")
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    accepted: bytes
    def __init__(self, statuses: _Optional[bytes] = ..., accepted: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("client", "reservation")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    client: int
    reservation: int
    def __init__(self, client: _Optional[int] = ..., reservation: _Optional[int] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("freed",)
    FREED_FIELD_NUMBER: _ClassVar[int]
    freed: int
    def __init__(self, freed: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("namespace", "fingerprints", "deadline_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    fingerprints: bytes
    deadline_ms: int
    def __init__(self, namespace: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("durable", "pending_blocks")
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    PENDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    durable: bytes
    pending_blocks: int
    def __init__(self, durable: _Optional[bytes] = ..., pending_blocks: _Optional[int] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("namespace", "fingerprint")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    fingerprint: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("deleted_blocks",)
    DELETED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    deleted_blocks: int
    def __init__(self, deleted_blocks: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace", "all")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    all: bool
    def __init__(self, namespace: _Optional[bytes] = ..., all: bool = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: int
    def __init__(self, namespaces: _Optional[int] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("payloads", "fix")
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    payloads: bool
    fix: bool
    def __init__(self, payloads: bool = ..., fix: bool = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("checked_blocks", "total_blocks", "findings", "done")
    CHECKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    checked_blocks: int
    total_blocks: int
    findings: _containers.RepeatedScalarFieldContainer[str]
    done: bool
    def __init__(self, checked_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., findings: _Optional[_Iterable[str]] = ..., done: bool = ...) -> None: ...

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
    __slots__ = ("tokens_by_tier", "predicted_ttft_seconds", "recompute_seconds")
    class TokensByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    TOKENS_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens_by_tier: _containers.ScalarMap[int, int]
    predicted_ttft_seconds: float
    recompute_seconds: float
    def __init__(self, tokens_by_tier: _Optional[_Mapping[int, int]] = ..., predicted_ttft_seconds: _Optional[float] = ..., recompute_seconds: _Optional[float] = ...) -> None: ...

class ResizeRequest(_message.Message):
    __slots__ = ("host_bytes", "gpu_bytes")
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    host_bytes: int
    gpu_bytes: int
    def __init__(self, host_bytes: _Optional[int] = ..., gpu_bytes: _Optional[int] = ...) -> None: ...

class ResizeReply(_message.Message):
    __slots__ = ("host_bytes", "host_bytes_used", "gpu_bytes", "gpu_bytes_used")
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    host_bytes: int
    host_bytes_used: int
    gpu_bytes: int
    gpu_bytes_used: int
    def __init__(self, host_bytes: _Optional[int] = ..., host_bytes_used: _Optional[int] = ..., gpu_bytes: _Optional[int] = ..., gpu_bytes_used: _Optional[int] = ...) -> None: ...
