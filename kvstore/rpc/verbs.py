"""What every verb of the control API has in common: errors, and the names in its request.

Primitives: the decorators `unary`, `change`, `streaming`; `Verbs`, the base of all servicers.
Typed errors become a status with metadata; anything else is our bug and fatal.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from kvstore.config import Config
from kvstore.errors import KVStoreError
from kvstore.rpc import status, wire
from kvstore.service import Service


class Verbs:
    """Over one `Service`; no state of its own."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @property
    def _config(self) -> Config:
        return self.service.config

    def _names(self, data: bytes, field: str, most: int | None = None) -> bytes:
        """`data` itself: 32 bytes a block. Raises InvalidRequest, also for too many."""
        wire.split_fingerprints(data, field, most or self._config.limits.blocks_per_call_max)
        return data


def unary(method: Callable[..., Awaitable[Any]]) -> Any:
    """Turn typed errors into a status; hand anything else to the daemon as fatal."""

    @functools.wraps(method)
    async def wrapped(self: Verbs, request: Any, context: Any) -> Any:
        start = time.perf_counter()
        try:
            self.service.check_admission()
            return await method(self, request, context)
        except KVStoreError as error:
            await status.abort(context, error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.service.fatal(error)
            raise
        finally:
            self.service.latencies.observe(method.__name__, time.perf_counter() - start)

    return wrapped


def change(method: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """`unary` for a verb that changes things in several steps: begun, it ends, although its caller
    gives up or dies. Half of it would stay for ever.
    """

    @functools.wraps(method)
    async def whole(self: Verbs, request: Any, context: Any) -> Any:
        return await self.service.to_the_end(method(self, request, context))

    return unary(whole)


def streaming(method: Callable[..., AsyncIterator[Any]]) -> Any:
    """The same for a method that yields."""

    @functools.wraps(method)
    async def wrapped(self: Verbs, request: Any, context: Any) -> AsyncIterator[Any]:
        start = time.perf_counter()
        try:
            self.service.check_admission()
            async for reply in method(self, request, context):
                yield reply
        except KVStoreError as error:
            await status.abort(context, error)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self.service.fatal(error)
            raise
        finally:
            self.service.latencies.observe(method.__name__, time.perf_counter() - start)

    return wrapped
