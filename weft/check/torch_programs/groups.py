"""Process groups of a torch program and their collectives, which run on the main stream."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft.check.torch_programs.streams import main_stream

if TYPE_CHECKING:
    from weft.check.torch_programs.ranks import Ranks

_Op = dist.ReduceOp
# A group as functions of torch.distributed take it: None for all ranks.
Named = dist.ProcessGroup | str | None


class Group(dist.ProcessGroup):
    """Stand-in for ``torch.distributed.ProcessGroup``, one object for each member."""

    def __init__(self, name: str, members: list[int], rank: int) -> None:
        super().__init__(members.index(rank), len(members))
        self.members, self.place, self._name = members, members.index(rank), name

    @property
    def group_name(self) -> str:
        return self._name

    group_desc = group_name

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return len(self.members)

    def name(self) -> str:
        return "nccl"


class Done:
    """Handle of an asynchronous collective, which has ended."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> None:
        return None


class Groups:
    """Functions of ``torch.distributed``, for the calling rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._machine = ranks, ranks.machine

    # --- groups ------------------------------------------------------------------------------------------------------

    def init(self, *_: object, **__: object) -> None:
        here = self._ranks.here
        if here.world is not None:
            raise ValueError("trying to initialize the default process group twice!")
        here.world = Group("0", list(range(self._machine.world_size)), here.rank)

    def is_initialized(self) -> bool:
        return self._ranks.here.world is not None

    def destroy(self, group: Named = None) -> None:
        if group is None or group is self._ranks.here.world:
            self._ranks.here.world = None

    @property
    def WORLD(self) -> Group | None:  # noqa: N802  (torch's name, of dist.group)
        return self._ranks.here.world

    NON_GROUP_MEMBER = dist.GroupMember.NON_GROUP_MEMBER

    def of(self, group: Named) -> Group:
        """Group of an argument: a group, its name, or None for all ranks."""
        here = self._ranks.here
        if isinstance(group, Group):
            return group
        if isinstance(group, str) and group != "0":
            return here.kept["group", group]
        if here.world is None:
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group."
            )
        return here.world

    def new_group(self, ranks: Sequence[int] | None = None, *_: object, **__: object) -> Any:
        here = self._ranks.here
        name = str(here.number("new_group"))
        members = list(range(self._machine.world_size)) if ranks is None else sorted(ranks)
        if here.rank not in members:
            return self.NON_GROUP_MEMBER
        here.kept["group", name] = group = Group(name, members, here.rank)
        return group

    def rank(self, group: Named = None) -> int:
        return self.of(group).place

    def size(self, group: Named = None) -> int:
        return len(self.of(group).members)

    def members(self, group: Named = None) -> list[int]:
        return list(self.of(group).members)

    def global_rank(self, group: Named, rank: int) -> int:
        return self.of(group).members[rank]

    # --- collectives -------------------------------------------------------------------------------------------------

    def meet(self, what: str, group: Named, item: object = None) -> list[Any]:
        """Items of all members, whose main streams meet."""
        group, items = self.of(group), []
        if self._ranks.here.stream is not None:
            raise self._ranks.refuse(f"torch.distributed.{what} on a side stream", "call it on the main stream")
        name = f"{what} of group {group.group_name} (call {self._ranks.here.number(f'calls {group.group_name}')})"
        main_stream(self._ranks).issue(
            what, lambda: items.extend(self._ranks.meet(name, group.members, item)), []
        )  # fmt: skip
        return items

    def barrier(self, group: Named = None, async_op: bool = False, **_: object) -> Done:
        self.meet("barrier", group)
        self._machine.observer.host_waited(self._machine.rank)
        return Done()

    def all_reduce(
        self, tensor: torch.Tensor, op: object = _Op.SUM, group: Named = None, async_op: bool = False
    ) -> Done:
        tensor.copy_(_reduced(self.meet("all_reduce", group, tensor.detach().clone()), op))
        return Done()

    def reduce(self, tensor: torch.Tensor, dst: int, op: object = _Op.SUM, group: Named = None, **_: object) -> Done:
        result = _reduced(self.meet("reduce", group, tensor.detach().clone()), op)
        if self._ranks.here.rank == dst:
            tensor.copy_(result)
        return Done()

    def all_gather(self, tensors: list, tensor: torch.Tensor, group: Named = None, async_op: bool = False) -> Done:
        for to, part in zip(tensors, self.meet("all_gather", group, tensor.detach().clone()), strict=True):
            to.copy_(part)
        return Done()

    def all_gather_into_tensor(
        self, output: torch.Tensor, input: torch.Tensor, group: Named = None, **_: object
    ) -> Done:
        parts = self.meet("all_gather_into_tensor", group, input.detach().clone())
        output.copy_(torch.cat([part.reshape(-1) for part in parts]).view(output.shape))
        return Done()

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: object = _Op.SUM, group: Named = None, **_: object
    ) -> Done:
        total = _reduced(self.meet("reduce_scatter_tensor", group, input.detach().clone()), op)
        group = self.of(group)
        output.copy_(total.reshape(-1).chunk(len(group.members))[group.place].view(output.shape))
        return Done()

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, *_: object, group: Named = None, **__: object
    ) -> Done:
        parts = self.meet("all_to_all_single", group, input.detach().clone())
        group = self.of(group)
        own = [part.chunk(len(group.members))[group.place] for part in parts]
        output.copy_(torch.cat(own).view(output.shape))
        return Done()

    def broadcast(self, tensor: torch.Tensor, src: int = 0, group: Named = None, *_: object, **__: object) -> Done:
        parts = self.meet("broadcast", group, tensor.detach().clone())
        tensor.copy_(parts[self.of(group).members.index(src)])
        return Done()

    # Objects go from one virtual rank to another as bytes, so that the receiver has copies, of classes of modules that it has
    # imported. What is unpickled was pickled by a rank of this process a moment before; nothing comes from outside.

    def all_gather_object(self, objects: list, obj: object, group: Named = None) -> None:
        objects[:] = map(pickle.loads, self.meet("all_gather_object", group, pickle.dumps(obj)))

    def broadcast_object_list(self, objects: list, src: int = 0, group: Named = None, **_: object) -> None:
        is_source = self._ranks.here.rank == src
        sent = self.meet("broadcast_object_list", group, pickle.dumps(list(objects)) if is_source else b"")
        if not is_source:
            objects[:] = pickle.loads(sent[self.of(group).members.index(src)])

    # --- names in torch ----------------------------------------------------------------------------------------------

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Functions by their names in ``torch.distributed``."""
        same = (
            "is_initialized", "new_group", "barrier", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor",
            "reduce_scatter_tensor", "all_to_all_single", "broadcast", "all_gather_object", "broadcast_object_list",
        )  # fmt: skip
        return {name: getattr(self, name) for name in same} | {
            "init_process_group": self.init, "destroy_process_group": self.destroy, "get_rank": self.rank,
            "get_world_size": self.size, "get_process_group_ranks": self.members, "get_global_rank": self.global_rank,
            "get_backend": lambda *_: "nccl", "is_available": lambda: True, "is_nccl_available": lambda: True,
        }  # fmt: skip


def _reduced(parts: list[torch.Tensor], op: object) -> torch.Tensor:
    """Reduction in the order of ranks, in fp32 for narrower floats."""
    wide = [part.float() if part.is_floating_point() and part.dtype != torch.float64 else part for part in parts]
    total = wide[0]
    for part in wide[1:]:
        if op in (_Op.SUM, _Op.AVG):
            total = total + part
        elif op == _Op.MAX:
            total = torch.maximum(total, part)
        elif op == _Op.MIN:
            total = torch.minimum(total, part)
        else:
            raise NotImplementedError(f"reduction {op}")
    total = total / len(parts) if op == _Op.AVG else total
    return total.to(parts[0].dtype)
