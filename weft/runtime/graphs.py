"""Captures of CUDA graphs, during which no garbage is collected.

A graph that is freed during a capture ends it, and graphs of an earlier engine may be garbage in cycles.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from weft.runtime.streams import on_stream


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Scope in which Python collects no garbage in cycles."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Scope of ``torch.cuda.graph``, which waits for the GPU and frees unused memory first."""
    # thread_local: CUDA calls of NCCL's watchdog thread must not invalidate the capture.
    with without_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, *pool: Any) -> Iterator[None]:
    """Scope that records the work of ``stream``, which is current there, into ``graph``.

    Unlike ``recording`` it does not wait, which takes milliseconds.

    pool  memory of tensors that are allocated meanwhile, as ``torch.cuda.graph_pool_handle()``; by default the graph has one
    """
    with without_collection(), on_stream(stream):
        # Other threads (NCCL's watchdog) keep calling the driver.
        graph.capture_begin(*pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
