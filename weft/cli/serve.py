"""Command `weft serve`: flags to an engine and a server."""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.arguments import quoted
from weft.cli.engine_flags import ENGINES_LOAD, MODEL, EngineFlags, starting
from weft.console import api_key_of, from_flags, notices, one_line_errors, option, single_valued
from weft.runtime.early import EarlyProcesses, collections_held, early_processes
from weft.runtime.environment import coordinates
from weft.runtime.launch import early_ranks
from weft.serve.options import KEEP_ALIVE, MAX_BODY_BYTES, MAX_WAITING, ServeOptions

if TYPE_CHECKING:
    from weft.models import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags(EngineFlags):
    """Flags of `weft serve`."""

    model: Annotated[str | None, typer.Argument(help=MODEL)] = None
    warm_up: bool = option(
        True, "Capture all CUDA graphs at start, so that no request waits for one", "--warm-up/--no-warm-up"
    )
    warm_up_late: bool = option(
        True,
        "Listen once graphs of small batches are captured; the further ones are captured between steps",
        "--warm-up-late/--no-warm-up-late",
    )
    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0: all of this machine")
    port: int = option(8000, "Port to listen at; 0: a free one")
    api_key: str | None = option(
        None,
        "Requests under /v1 must send it as a bearer token; `ps` shows it to other users [default: WEFT_API_KEY in "
        "the environment]",
    )
    api_key_file: Path | None = option(None, "File that holds the key, in place of --api-key")
    served_model_name: str | None = option(
        None, "Name of the model in requests and answers [default: MODEL as typed, or adder]"
    )
    lora: list[str] | None = option(
        None, "Adapter as peft saves it, which requests name as their model; may be repeated", metavar="NAME=DIR"
    )
    tool_call_parser: str | None = option(
        None, "Parser of tool calls in answers, or none [default: by the chat template]"
    )
    reasoning_parser: str | None = option(
        None, "Parser of reasoning in answers, or none [default: by the chat template]"
    )
    seed: int | None = option(
        None, "Number from which requests without a seed get theirs, in their order [default: random seeds]"
    )
    max_body_bytes: int = option(MAX_BODY_BYTES, "Most bytes of a request's body")
    max_waiting: int = option(MAX_WAITING, "Most requests that wait beyond a full batch; further ones get status 503")
    early_ranks: bool = option(
        True,
        "Start processes of ranks first, so that they load torch while the server's process does",
        "--early-ranks/--no-early-ranks",
    )
    restart: bool = option(False, "After the first error of a rank start all ranks again, and go on serving")
    keep_alive: int = option(
        KEEP_ALIVE, "Seconds that a connection without a request stays open", "--keep-alive", "--timeout-keep-alive"
    )
    traceback: bool = option(False, "Show where an error came from")


def serve(flags: ServeFlags) -> None:
    """Serve a model over HTTP, with OpenAI's API, /health and /metrics (Prometheus)."""
    with one_line_errors(flags.traceback):
        from weft.serve import check_packages

        check_packages()
        flags.check_names()
        if flags.served_model_name is not None and not flags.served_model_name.strip():
            raise ValueError(
                f"--served-model-name {flags.served_model_name!r} names nothing; pass some text, or leave it out"
            )
        # torchrun has started the ranks.
        wanted = flags.early_ranks and coordinates() is None
        count = early_ranks(flags.world_size, flags.device) if wanted else 0
        with early_processes(count, ENGINES_LOAD, first_gemm=True) as early:
            _serve(flags, early)


def _serve(flags: ServeFlags, early: EarlyProcesses | None) -> None:
    """Start the engine and serve it; `early`: processes for its ranks."""
    with collections_held():
        from weft.engine import AsyncLLM, EngineConfig
    from weft.serve.address import bound, url

    options = ServeOptions(
        model_name=flags.served_model_name or flags.model or "adder",
        api_key=api_key_of(flags.api_key, flags.api_key_file),
        **{
            one.name: getattr(flags, one.name)
            for one in fields(ServeOptions)
            if one.name not in ("model_name", "api_key")
        },
    )
    config, model = flags.engine_config(), _model(flags)
    if flags.lora:
        config = EngineConfig.of(config, {"lora": _adapters(flags.lora)})
    # While this process waits for its ranks.
    loading = threading.Thread(target=importlib.import_module, args=("weft.serve.server",), daemon=True)
    with bound(flags.host, flags.port) as at:
        loading.start()
        with starting(True) as progress:
            llm = AsyncLLM(
                model,
                flags.world_size,
                device=flags.device,
                heap_bytes=flags.heap_bytes,
                config=config,
                early=early,
                **progress,
            )
        loading.join()
        if llm.device == "sim":
            flags.say_simulated()
        from weft.serve import app, server

        if early is not None:
            early.close()  # fewer ranks than processes run on GPUs
        try:
            plural = "s" if llm.world_size > 1 else ""
            where = f"{llm.world_size} {'virtual rank' if llm.device == 'sim' else 'GPU'}{plural}"
            said = "weft: %s on %s at %s/v1", options.model_name, where, url(at)
            server.serve(app.Service(llm, options), at, lambda: notices.info(*said))
        finally:
            llm.close()


command = single_valued(from_flags(ServeFlags, serve))


def _adapters(words: list[str]) -> dict[str, str]:
    """Directories of adapters by name. ValueError for other words, and for a name that is given twice."""
    adapters: dict[str, str] = {}
    for word in words:
        name, _, directory = word.partition("=")
        if not name or not directory or name in adapters:
            twice = "names an adapter a second time" if name in adapters else "is not NAME=DIR"
            raise ValueError(f"--lora {quoted(word)} {twice}; pass a name, an equals sign and a directory")
        adapters[name] = directory
    return adapters


def _model(flags: ServeFlags) -> str | DecoderConfig | None:
    from weft.models import DecoderConfig

    if not flags.dummy_weights:
        return flags.model
    if flags.model is None:
        raise ValueError("--dummy-weights takes a name as MODEL, such as qwen3-32b")
    return DecoderConfig.named(flags.model)
