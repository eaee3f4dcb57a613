"""Metrics of a server for Prometheus, under vLLM's names with `weft:` in place of `vllm:`."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weft.engine.answers import Load
from weft.engine.snapshots import SnapshotCounts
from weft.engine.speculation.drafting import Speculation

# Bounds in seconds of a wait for a token, and of a whole request; and in tokens.
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 10.0)
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """Metrics of one server. `load` gives the engine's load when they are read."""

    def __init__(self, model_name: str, load: Callable[[], Load]) -> None:
        self._load = load
        self._totals: dict[Counter, int] = {}  # of the engine, by the counter that follows them
        self.registry = CollectorRegistry()

        def made(kind: type, name: str, text: str, **options: object) -> object:
            return kind(f"weft:{name}", text, ["model_name"], registry=self.registry, **options).labels(model_name)

        made(Gauge, "num_requests_running", "Requests in the batch").set_function(lambda: load().running)
        made(Gauge, "num_requests_waiting", "Requests that wait for the batch").set_function(lambda: load().waiting)
        made(Gauge, "kv_cache_usage_perc", "Share of the KV cache in use, in 0 .. 1").set_function(
            lambda: load().cache_usage
        )
        self._preemptions = made(Counter, "num_preemptions", "Requests that left the batch for older ones")
        self._drafts = made(Counter, "spec_decode_num_drafts", "Times that tokens were drafted for a sequence")
        self._draft_tokens = made(Counter, "spec_decode_num_draft_tokens", "Drafted tokens")
        self._accepted = made(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self._accepted_per_pos = Counter(
            "weft:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by place in the draft",
            ["model_name", "position"], registry=self.registry,
        )  # fmt: skip
        self._model_name = model_name
        made(Gauge, "spec_decode_draft_length", "Tokens drafted for a sequence; 0: it does not pay").set_function(
            lambda: (load().speculation or Speculation()).draft_length
        )
        self._snapshot_counters = {
            "saved": made(Counter, "state_snapshots_saved", "Snapshots of states taken for prefix caching"),
            "used": made(Counter, "state_snapshots_used", "Requests that began with a snapshot of states"),
            "dropped": made(Counter, "state_snapshots_dropped", "Snapshots of states that gave way to newer ones"),
        }
        made(Gauge, "state_snapshots_usage_perc", "Share of the places for snapshots in use, in 0 .. 1").set_function(
            lambda: (counts := load().snapshots or SnapshotCounts()).held / max(1, counts.places)
        )
        self.corrupted = made(
            Counter, "corrupted_requests", "Requests that ended since their logits were NaN or infinite"
        )
        self.prompt_tokens = made(Counter, "prompt_tokens", "Tokens of accepted prompts")
        self.generation_tokens = made(Counter, "generation_tokens", "Generated tokens")
        self.first_token = made(
            Histogram, "time_to_first_token_seconds", "From request to first token", buckets=REQUEST_SECONDS
        )
        self.next_token = made(
            Histogram, "inter_token_latency_seconds", "From one token to the next", buckets=TOKEN_SECONDS
        )
        self.per_token = made(
            Histogram, "request_time_per_output_token_seconds", "Mean time per token after the first of a request",
            buckets=TOKEN_SECONDS,
        )  # fmt: skip
        self.whole = made(
            Histogram, "e2e_request_latency_seconds", "From request to last token", buckets=REQUEST_SECONDS
        )
        self.request_prompt = made(Histogram, "request_prompt_tokens", "Tokens of a prompt", buckets=TOKENS)
        self.request_answer = made(Histogram, "request_generation_tokens", "Tokens of an answer", buckets=TOKENS)
        ended = Counter(
            "weft:request_success", "Requests by their end", ["model_name", "finished_reason"], registry=self.registry
        )
        self.ended = {reason: ended.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}

    def text(self) -> bytes:
        load = self._load()
        self._follow(self._preemptions, load.preemptions)
        if (drafts := load.speculation) is not None:
            self._follow(self._drafts, drafts.drafts)
            self._follow(self._draft_tokens, drafts.draft_tokens)
            self._follow(self._accepted, drafts.accepted_tokens)
            for place, count in enumerate(drafts.accepted_per_pos):
                self._follow(self._accepted_per_pos.labels(self._model_name, str(place)), count)
        if load.snapshots is not None:
            for name, counter in self._snapshot_counters.items():
                self._follow(counter, getattr(load.snapshots, name))
        return generate_latest(self.registry)

    def _follow(self, counter: Counter, total: int) -> None:
        """Raise a counter by the growth of a total, which begins again at 0 when the ranks do."""
        before, self._totals[counter] = self._totals.get(counter, 0), total
        counter.inc(total - before if total >= before else total)
