"""The gateway: the block API (proto/kvstore/v1/blocks.proto) in a process of its own.

It is an ordinary client of one daemon: it attaches, finds blocks in the shared directory and copies
them out of the arena, so that bulk bytes never touch the daemon's loop. Several may run beside one
daemon. Every call has a thread; a slow reader blocks its own.

  `process`    listeners, health, drain; `serve(config)`
  `servicer`   the verbs
  `transfer`   blocks to chunks and back
  `streams`    how many there may be, and the end of those on which nothing moves
  `access`     who may do what
"""
