"""One batch of sequences on static tensors, decoded a token at a time, on GPUs as one CUDA graph a step."""

from __future__ import annotations

import time

import torch

from weft.engine.sampling import Sampling, sample_top_p
from weft.models.qwen3 import Qwen3ForCausalLM


class Decoder:
    """tokens[batch] at positions[batch] → the next tokens[batch], in place. Collective: all ranks make the same calls.

    `capture`, then `prefill`, then `step` as often as wanted. Nothing in a step depends on the host: the cache, tokens,
    positions, the row of random numbers, temperature and top_p all lie in device memory at fixed addresses.
    """

    def __init__(self, model: Qwen3ForCausalLM, batch: int, max_len: int) -> None:
        self.model, self.batch, self.max_len = model, batch, max_len
        self.team, device = model.team, model.team.device
        self.cache = model.new_cache(batch, max_len)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(max_len, batch, dtype=torch.float32, device=device)
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        self.temperature = torch.ones((), dtype=torch.float32, device=device)
        self.top_p = torch.ones((), dtype=torch.float32, device=device)
        self.greedy = True
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}

    def capture(self, *, greedy: bool) -> float:
        """Captures `step`, greedy or sampled, unless that is done; seconds it took. Overwrites tokens and cache."""
        if greedy in self.graphs:
            return 0.0
        begin = time.perf_counter()
        self.greedy = greedy
        self._rewind()
        # Eager steps first: kernels compile, cuBLAS and the ops take their workspaces, none of which a capture allows.
        side = torch.cuda.Stream(self.team.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._eager_step()
        torch.cuda.current_stream().wait_stream(side)
        self.team.synchronize()
        self.team.barrier()
        graph = torch.cuda.CUDAGraph()
        # thread_local: what NCCL's watchdog thread asks CUDA meanwhile must not invalidate the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._eager_step()
        self.graphs[greedy] = graph
        self.team.barrier()
        return time.perf_counter() - begin

    def prefill(self, prompts: list[list[int]], sampling: Sampling) -> None:
        """Starts new sequences; `tokens` then holds the first generated token of each."""
        device = self.team.device
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        padded = torch.zeros(self.batch, int(lengths.max()), dtype=torch.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        self._rewind()
        self.greedy = sampling.greedy
        if not sampling.greedy:
            self.uniforms[: sampling.max_new_tokens] = sampling.uniforms(
                min(sampling.max_new_tokens, self.max_len), self.batch
            ).to(device)
            self.temperature.fill_(max(sampling.temperature, 1e-20))  # what fp32 tells from 0
            self.top_p.fill_(sampling.top_p)
        lengths = lengths.to(device)
        self._choose(self.model.prefill(padded.to(device), lengths, self.cache))
        self.positions.copy_(lengths)

    def step(self) -> None:
        graph = self.graphs.get(self.greedy)
        if graph is None:
            self._eager_step()
        else:
            graph.replay()

    def _eager_step(self) -> None:
        self._choose(self.model.decode(self.tokens, self.positions, self.cache))
        # A finished sequence runs on beside the others and must not write past its cache.
        self.positions.add_(1).clamp_(max=self.max_len - 1)

    def _choose(self, logits: torch.Tensor) -> None:
        head = self.model.lm_head
        if self.greedy:
            self.tokens.copy_(head.argmax(logits))
            return
        uniform = self.uniforms.index_select(0, self.row)[0]
        self.tokens.copy_(sample_top_p(head.gather(logits), self.temperature, self.top_p, uniform))
        self.row.add_(1).clamp_(max=self.max_len - 1)

    def _rewind(self) -> None:
        for tensor in (self.tokens, self.positions, self.row):
            tensor.zero_()
