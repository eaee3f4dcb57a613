"""``weft.simulate``: the same main and kernels for W virtual ranks in one process, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.arguments import (
    check_args,
    check_bool,
    check_callable,
    check_choice,
    check_heap_bytes,
    check_instance,
    check_number,
    check_optional,
    check_seed,
    check_virtual_ranks,
    is_integer,
    positive,
    quoted,
)
from weft.errors import KernelRefused, SimulatorMissing
from weft.runtime.capabilities import DEFAULT_GPU, GPUS, LINKS, NVLINK
from weft.runtime.launching import forget_launches_on
from weft.runtime.mains import check_main, check_takes, checked_result
from weft.runtime.team.shape import check_node_size
from weft.runtime.team.team import init_main
from weft.runtime.triton_interpret import refuse_triton_interpret
from weft.runtime.virtual_rank import enter_virtual_rank


def simulate(
    main: Callable[..., Any],
    world_size: int = 4,
    *,
    seed: int = 0,
    like: str = DEFAULT_GPU,
    sms: int | None = None,
    slow: Mapping[int, float] | None = None,
    heap_bytes: int | None = None,
    node_size: int | None = None,
    link: str = NVLINK,
    args: Sequence[Any] = (),
    compile: bool = False,
    on_event: Callable[[tuple[int, str, str, str]], None] | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> list[Any]:
    """Run ``main(team, *args)`` on ``world_size`` virtual ranks; their results in rank order.

    seed        of the scheduler: the same seed gives the same run, event for event
    like        the GPU that ranks plan as: "h200", "h100", "b200" or "a100". Ops choose what they choose there, by the same
                tables and rules
    sms         programs of a rank that can be resident at once; further ones start when one ends. None: as many as ``like``
                holds, of 255 registers a thread
    slow        rank -> factor by which the scheduler picks it less often than other ranks
    heap_bytes  as in ``weft.init``
    node_size   ranks of each node: ranks of different nodes do not reach each other's memory; None: one node
    link        kind of the links within a node: "nvlink", or "pcie", on which a peer's memory has no atomics
    compile     afterwards take each launched kernel to Triton IR for sm_90, and raise KernelRefused if Triton refuses one: the
                simulator runs more of Python than Triton compiles
    args        further arguments of ``main``
    on_event    called with (step, task, kind, detail) for every access, launch and wait
    prepare     called with the machine before it runs (``weft.check`` installs its observer and strategy there)

    Raises the first error of a rank and stops the other ranks; Deadlock as soon as no task can go on; InvalidAccess for a
    kernel's access outside its tensors. Kernels of the main stream are synchronous to their rank's host code; the copy engine
    is not.
    """
    refuse_triton_interpret()
    check_callable("main", main, "main(team, *args)")
    check_main(main)
    world_size, seed = check_virtual_ranks("world_size", world_size), check_seed(seed)
    check_choice("like", like, tuple(GPUS))
    sms = check_optional(positive, "sms", sms)
    heap_bytes, args = check_heap_bytes(heap_bytes), check_args(args)
    check_takes(main, args)
    node_size = check_node_size(node_size, world_size)
    check_choice("link", link, LINKS)
    check_bool("compile", compile)
    check_optional(check_callable, "on_event", on_event, "on_event((step, task, kind, detail))")
    check_optional(check_callable, "prepare", prepare, "prepare(machine)")
    _check_slow(slow, world_size)
    try:
        from weft.simulator.front_end import FrontEnd
        from weft.simulator.machine.machine import Machine
    except ImportError as error:
        raise SimulatorMissing(str(error.name)) from error
    from weft.runtime.platforms.virtual import Cluster  # needs the simulator

    forget_launches_on("cpu")
    machine = Machine(world_size, seed, sms or GPUS[like].sms, slow, on_event, shares_sms=sms is None)
    cluster = Cluster(machine, node_size, link, like)

    def host(rank: int) -> Any:
        enter_virtual_rank(cluster, rank)
        with machine.observer.host(rank):
            return checked_result(main, main(init_main(heap_bytes=heap_bytes), *args))

    if compile:
        machine.front_end = FrontEnd()
    if prepare is not None:
        prepare(machine)
    results = machine.run([lambda rank=rank: host(rank) for rank in range(world_size)])
    if compile and (refusals := machine.front_end.refusals()):
        raise KernelRefused([(one.kernel, one.message, one.file, one.line) for one in refusals])
    return results


def _check_slow(slow: Any, world_size: int) -> None:
    if slow is None:
        return
    check_instance("slow", slow, Mapping, "a dictionary from rank to the factor by which it is slower")
    for rank, factor in slow.items():
        if not is_integer(rank) or not 0 <= rank < world_size:
            raise ValueError(f"slow has {quoted(rank)}, which is not a rank in 0 .. {world_size - 1}")
        check_number(f"slow[{rank}]", factor, 0, float("inf"), "a number of times, 0 or more")
