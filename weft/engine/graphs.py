"""CUDA graphs of passes, the decode step that they launch, and steps in flight over stages.

In flight: a group of batch slots a stage, and no wait for a step's end.

    groups a, b of steps 1, 2, …       turn t of stage s: group (t - s) mod P, of P stages
    stage 0 | a1 | b1 | a2 | b2 | a3
    stage 1      | a1 | b1 | a2 | b2   after its turn the last stage sends the group's tokens to all stages

A group's tokens come to stage s after its turn with the group P - 1 - s later: to stage 0 just before the group's next turn.
So P - 1 - s groups of a step are under way to it once its turns are launched. They come in the turns of the next step, if that
continues this one, or else by ``Flight.settle``.

order  after the turns t of all stages: tokens from the last stage, then hidden states, higher stages first. It is the order of
       weft.engine.pipeline's pieces, so no two ranks wait for each other
slots  slot i is in group i mod P: groups of a batch differ by one sequence at most
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from weft.engine.params import Kind
from weft.engine.pipeline import Pass, Pipeline
from weft.engine.sampling import WIDTH, Choice
from weft.engine.slots import Adjustments, Slots, rows_of
from weft.parallel.step import PagedCache
from weft.runtime.graphs import recording
from weft.runtime.logs import logger_of
from weft.runtime.team.team import Team

logger = logger_of(__name__)

# Kinds of sampling that are captured at start. The second serves all but greedy requests: it has a few more kernels than they
# need, and two further graphs of each size would take twice the time and memory.
WARM_KINDS = (Kind.GREEDY, Kind.TRUNCATED)
# In place of a kind: graph of a decode step's forward pass alone.
FORWARD = None
# Size of a pass, such as a bucket, a shape of prompts or a turn, and its kind of sampling.
Key = tuple[Hashable, Kind | None]


class Graphs:
    """CUDA graphs of a rank by key. They run one after the other, so they share memory.

    capture_seconds  that all captures have taken
    warm             all sizes have been captured at start, for WARM_KINDS

    Iteration gives the keys.
    """

    def __init__(self, team: Team) -> None:
        self.team, self.capture_seconds, self.warm = team, 0.0, False
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool = None

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def __iter__(self) -> Iterator[Key]:
        return iter(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    def kind_for(self, size: Hashable, kind: Kind) -> Kind:
        """Kind that was captured at start for `size` and that serves `kind`, which stays if there is none."""
        warm = WARM_KINDS if self.warm else ()
        return next((captured for captured in warm if kind in captured and (size, captured) in self), kind)

    def replay(self, key: Key) -> None:
        """Launch the graph of `key`, which has been captured."""
        self._graphs[key].replay()

    def run(self, key: Key, run: Callable[[], Any]) -> None:
        """Replay the graph of `key`, captured from `run` if there is none."""
        if key not in self:
            self.capture(key, run)
        self.replay(key)

    def capture(self, key: Key, run: Callable[[], Any]) -> None:
        """Capture the launches of `run`, after two eager runs. Collective; waits for the GPU."""
        self.capture_all({key: run}, run)

    def capture_all(self, runs: Mapping[Key, Callable[[], Any]], eager: Callable[[], Any]) -> None:
        """Capture a graph for each of `runs`, after two eager runs of `eager`, which includes them all."""
        begin = time.perf_counter()
        self._prepare(eager)
        for key, run in runs.items():
            self._record(key, run)
        self.team.barrier()
        seconds = time.perf_counter() - begin
        self.capture_seconds += seconds
        logger.debug("captured the CUDA graph of %s in %.2f s", next(iter(runs)), seconds)

    def drop(self, size: Hashable) -> None:
        """Free the graphs of a size, of all kinds; the GPU has finished them."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != size}

    def clear(self) -> None:
        """Free all graphs and their memory."""
        self._graphs.clear()
        self._pool = None

    def _prepare(self, run: Callable[[], Any]) -> None:
        """Run eager steps before a capture, which allows no compilation and no allocation of workspaces."""
        side = torch.cuda.Stream(self.team.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        self.team.synchronize()
        self.team.barrier()

    def _record(self, key: Key, run: Callable[[], Any]) -> None:
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._pool):
            run()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph


class DecodeGraph:
    """Decode step of batch slots: tokens[slot] at positions[slot] → next tokens[slot], in place.

    slots        positions, page tables and sampling parameters
    tokens       [max_batch] int64, the newest of each slot
    logprobs     [max_batch, WIDTH] fp32: rows of weft.engine.sampling, of slots that ask for them
    cache        keys and values of this stage; None: not allocated yet
    adjustments  None until a request asks for changes of logits

    Collective. It reads and writes tensors at fixed addresses only. Slots are given as a slice from 0, or with a step.
    """

    def __init__(self, pipeline: Pipeline, slots: Slots, page_size: int) -> None:
        self.pipeline, self.slots, self.page_size = pipeline, slots, page_size
        max_batch, device = len(slots.positions), pipeline.team.device
        self.tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(max_batch, WIDTH, dtype=torch.float32, device=device)
        self.cache: PagedCache | None = None
        self.adjustments: Adjustments | None = None
        self._kept: dict[int, torch.Tensor] = {}  # logits by number of slots

    def run(self, batch: int, kind: Kind, between: Callable[[], None] | None = None) -> None:
        """Decode slots 0 .. batch - 1; `between`: called between the forward pass and the choice of tokens."""
        logits = self.forward(batch)
        if between is not None:
            between()
        self.choose(slice(batch), kind, logits)

    def forward(self, batch: int) -> torch.Tensor | None:
        """This rank's logits after the slots' tokens, where Pipeline.run returns them."""
        passes = [self._pass(slice(begin, end)) for begin, end in self.pipeline.cuts(batch)]
        return self.pipeline.run(passes, self.cache)

    def forward_and_keep(self, batch: int) -> None:
        """Forward pass whose logits `choose_kept` reads: a step with grammars has a graph for each of both."""
        if (logits := self.forward(batch)) is not None:
            if batch not in self._kept:
                self._kept[batch] = torch.empty_like(logits)
            self._kept[batch].copy_(logits)

    def choose_kept(self, batch: int, kind: Kind) -> None:
        """Choose tokens by the logits of `forward_and_keep`."""
        self.choose(slice(batch), kind, self._kept.get(batch))

    def compute(self, slots: slice) -> torch.Tensor | None:
        """Result of this stage's layers for these slots alone, as of Pipeline.compute."""
        return self.pipeline.compute(self._pass(slots), self.cache)

    def _pass(self, slots: slice) -> Pass:
        tokens, positions, table = (rows_of(x, slots) for x in (self.tokens, self.slots.positions, self.slots.table))
        step = self.pipeline.model.decode_step(positions, table, self.page_size)
        if self.pipeline.model.adapters:
            step = replace(step, adapters=rows_of(self.slots.adapter, slots))
        return Pass(tokens, step)

    def choose(self, slots: slice, kind: Kind, logits: torch.Tensor | None) -> None:
        """Choose the slots' next tokens, by logits on the last stage, and advance their positions."""
        choice = Choice.of(
            self.slots,
            self.next_positions(slots),
            lambda x: rows_of(x, slots),
            adjustments=self.adjustments,
            rows=slots,
        )
        tokens, logprobs = self.pipeline.choose(logits, choice, kind)
        self.put(slots, tokens, logprobs)
        if Kind.ADJUSTED in kind and self.pipeline.is_last:
            self.note(choice.rows, tokens, choice.position)

    def note(self, rows: slice | torch.Tensor, tokens: torch.Tensor, position: torch.Tensor) -> None:
        """Note chosen tokens among the changes of logits, as ``Adjustments.note``."""
        self.adjustments.note(rows, tokens, position, fused=self.pipeline.model.runs_kernels)

    def next_positions(self, slots: slice) -> torch.Tensor:
        """Positions of the tokens that these slots get; -1 stays."""
        positions = self.slots.positions[slots]
        positions.add_(positions >= 0)
        return rows_of(self.slots.positions, slots)

    def put(self, slots: slice, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        """Set the slots' newest tokens, and their rows of log-probabilities if there are some."""
        self.tokens[slots].copy_(tokens)
        if logprobs is not None:
            self.logprobs[slots].copy_(logprobs)

    @contextmanager
    def on_empty_slots(self) -> Iterator[None]:
        """Decode steps within write no cache, and leave `tokens` and positions as they are."""
        kept = self.tokens.clone(), self.slots.positions.clone()
        self.slots.positions.fill_(-1)
        yield
        self.tokens.copy_(kept[0])
        self.slots.positions.copy_(kept[1])


def without_autograd(device: torch.device) -> AbstractContextManager:
    """Inference mode, to save host time; not on virtual ranks, which share a thread."""
    return torch.inference_mode() if device.type == "cuda" else nullcontext()


# Bytes of memory that an H200 reads in the 20 us until a rail's piece has begun.
CROSSING_BYTES = 80 << 20
# When a prompt arrives, steps in flight are drained, which costs P - 1 turns, mostly to read weights. If attention reads at
# least this fraction of the weights' bytes, about eight steps between two prompts earn that back.
FEWEST_OF_WEIGHTS = 1 / 8


class Turn(NamedTuple):
    """Turn of a stage in a decode step: its layers for a group, then arrival of another group's tokens.

    batch     slots of the step
    group     group that passes the stage's layers
    arriving  group whose tokens come from the last stage; None: none, in a step that follows none, and on the last stage
    """

    batch: int
    group: int
    arriving: int | None


def slots_of(group: int, batch: int, stages: int) -> slice:
    """Slots of a group, of the first `batch` ones."""
    return slice(group, batch, stages)


def turns_of(stage: int, stages: int, batch: int, *, continued: bool) -> list[Turn]:
    """Turns of a decode step on a stage; `continued`: tokens of the step before are under way to it."""
    late, turns = stages - 1 - stage, []
    for group in range(stages):
        arriving = group - late
        comes = late > 0 and (arriving >= 0 or continued)
        turns.append(Turn(batch, group, arriving % stages if comes else None))
    return turns


def pays(stages: int, read_bytes: int, weight_bytes: int) -> bool:
    """True if a decode step takes less time in groups than as one pass, by the bytes a stage reads.

    read_bytes  keys and values of all sequences. Weights are read once a pass, or once a group: P turns either way

    As one pass a step takes P turns of w + r, weights and reads; in groups P of w + r / P and 2 (P - 1) crossings.
    """
    return read_bytes >= max(2 * (stages - 1) * CROSSING_BYTES, weight_bytes * FEWEST_OF_WEIGHTS)


class Flight:
    """Decode steps of a stage that go through the stages in groups. Collective.

    The last step is in flight until the next one continues it, or `settle`.
    """

    def __init__(self, graph: DecodeGraph, graphs: Graphs) -> None:
        """`graph`: with a cache; `graphs`: for the captured turns."""
        self.graph, self.pipeline, self.graphs = graph, graph.pipeline, graphs
        self._flying: tuple[int, Kind] | None = None  # slots and kind of the decode step in flight
        if self.pipeline.stages > 1:
            # Of the largest stage: equal on all ranks, which decide alike.
            self._weight_bytes = max(
                self.pipeline.team.exchange(sum(x.nbytes for x in self.pipeline.model.parameters()))
            )
            layers = -(-self.pipeline.model.config.num_hidden_layers // self.pipeline.stages)
            self._entry_bytes = graph.cache.data[0, :, 0].nbytes * layers

    @property
    def in_flight(self) -> bool:
        """True if tokens of the last decode step are under way to some stages."""
        return self._flying is not None

    def takes(self, batch: int, kind: Kind, entries: int) -> bool:
        """True if a decode step goes through the stages in groups.

        entries  of page tables that it reads
        """
        stages = self.pipeline.stages
        if stages == 1 or batch < stages or Kind.GUIDED in kind:
            return False
        if batch >= stages * self.pipeline.microbatch_tokens:
            return True
        return pays(stages, entries * self._entry_bytes, self._weight_bytes)

    def run(self, batch: int, kind: Kind, arrived: Callable[[], None] | None = None, *, cuda_graph: bool) -> None:
        """Launch a decode step in groups; it continues one in flight of the same slots and kind.

        arrived     called once `graph.tokens` has all tokens of a step in flight before, and none of this one
        cuda_graph  True: the turns are replayed, and captured if they are not yet
        """
        if self._flying != (batch, kind):
            self.settle(arrived)
            if cuda_graph:
                self._capture_turns(batch, kind)
        continued, late = self.in_flight, self.pipeline.stages - 1 - self.pipeline.rail.index
        self._flying = None  # after an error between turns it is unknown what is under way
        for turn in self._turns(batch, continued):
            if continued and arrived is not None and turn.group == late:
                arrived()
            if cuda_graph:
                self.graphs.replay((turn, kind))
            else:
                self._turn(turn, kind)
        self._flying = batch, kind

    def settle(self, arrived: Callable[[], None] | None = None) -> None:
        """End the decode step in flight, if there is one: then its tokens are on all stages.

        `arrived` as of `run`.
        """
        if self._flying is None:
            return
        [batch, kind], self._flying = self._flying, None
        with without_autograd(self.pipeline.team.device):
            self._receive_rest(batch, kind)
        if arrived is not None:
            arrived()

    def _turns(self, batch: int, continued: bool) -> list[Turn]:
        return turns_of(self.pipeline.rail.index, self.pipeline.stages, batch, continued=continued)

    def _turn(self, turn: Turn, kind: Kind) -> None:
        pipeline = self.pipeline
        slots = slots_of(turn.group, turn.batch, pipeline.stages)
        result = self.graph.compute(slots)
        if pipeline.is_last:
            self.graph.choose(slots, kind, result)
        else:
            self.graph.next_positions(slots)
            if turn.arriving is not None:
                self._receive(turn.arriving, turn.batch, kind)
            pipeline.send(result)
        pipeline.rail.join()

    def _receive(self, group: int, batch: int, kind: Kind) -> None:
        """Receive the tokens of a group from the last stage."""
        slots = slots_of(group, batch, self.pipeline.stages)
        self.graph.put(slots, *self.pipeline.chosen(len(self.graph.tokens[slots]), kind))

    def _receive_rest(self, batch: int, kind: Kind) -> None:
        """Receive the tokens of the groups that come after the last turn of a step."""
        for group in range(self.pipeline.rail.index + 1, self.pipeline.stages):
            self._receive(group, batch, kind)

    def _capture_turns(self, batch: int, kind: Kind) -> None:
        """Capture the graphs of a step's turns, unless there are some. Waits for the GPU."""
        turns = self._turns(batch, False) + self._turns(batch, True)
        if (turns[0], kind) in self.graphs:
            return

        def steps() -> None:
            for turn in turns:
                self._turn(turn, kind)
            self._receive_rest(batch, kind)

        with self.graph.on_empty_slots():
            self.graphs.capture_all({(turn, kind): partial(self._turn, turn, kind) for turn in turns}, steps)
