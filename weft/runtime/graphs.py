"""Capture of CUDA graphs without the cleaning of ``torch.cuda.graph``, which takes milliseconds."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from weft.runtime.streams import on_stream


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, *pool: Any) -> Iterator[None]:
    """Scope that records the work of ``stream``, which is current there, into ``graph``.

    pool  memory of tensors that are allocated meanwhile, as ``torch.cuda.graph_pool_handle()``; by default the graph has one
    """
    collected = gc.isenabled()
    gc.disable()  # its frees are not allowed during a capture
    try:
        with on_stream(stream):
            # Other threads (NCCL's watchdog) keep calling the driver.
            graph.capture_begin(*pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collected:
            gc.enable()
