"""What both ends of the block API tell gRPC about their connection.

Primitive: `BULK_OPTIONS`. Chunks travel in few frames, and are read in few calls: without, a
stream of 1 MiB messages loses about a fifth of its speed.
"""

from __future__ import annotations

from kvstore.rpc.chunks import CHUNK_BYTES, MESSAGE_BYTES_MAX

BULK_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_frame_size", CHUNK_BYTES),
    # A stream's window: what an end that does not read may be sent, and keeps in memory.
    ("grpc.http2.lookahead_bytes", MESSAGE_BYTES_MAX),
    ("grpc.experimental.tcp_min_read_chunk_size", CHUNK_BYTES // 4),
    ("grpc.experimental.tcp_read_chunk_size", CHUNK_BYTES),
    ("grpc.experimental.tcp_max_read_chunk_size", MESSAGE_BYTES_MAX),
)
