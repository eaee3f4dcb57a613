"""What both copy engines check of a copy, and how they find the peer's end of it."""

from __future__ import annotations

import torch

from weft.arguments import check_instance, check_int
from weft.errors import NotSymmetric
from weft.runtime.platform import Platform


def at_peer(platform: Platform, tensor: torch.Tensor, peer: int) -> torch.Tensor:
    """The symmetric ``tensor`` in ``peer``'s memory. NotSymmetric if it does not lie in this rank's heap."""
    if not isinstance(tensor, torch.Tensor):
        check_instance("tensor", tensor, torch.Tensor, "a tensor")
    if type(peer) is not int:
        peer = check_int("peer", peer)
    if not 0 <= peer < platform.size:
        raise ValueError(f"peer={peer} is not a rank of this team; it has ranks 0 to {platform.size - 1}")
    offset = tensor.data_ptr() - platform.heap.data_ptr()
    if not 0 <= offset < platform.heap.numel():
        raise NotSymmetric(platform.rank, "tensor", tensor.shape)
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} is not contiguous; pass a contiguous slice of it")
    if peer == platform.rank:
        return tensor
    nbytes = tensor.numel() * tensor.element_size()
    return platform.peer_heap(peer)[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape)


def check_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    for name, tensor in (("dst", dst), ("src", src)):
        if not isinstance(tensor, torch.Tensor):
            check_instance(name, tensor, torch.Tensor, "a tensor")
    if dst.dtype != src.dtype or dst.numel() != src.numel():
        raise ValueError(
            f"a copy from {tuple(src.shape)} {src.dtype} to {tuple(dst.shape)} {dst.dtype}: "
            f"dtype and number of elements must agree"
        )
    if not (dst.is_contiguous() and src.is_contiguous()):
        raise ValueError(f"copies are of contiguous tensors; got strides {src.stride()} -> {dst.stride()}")


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, without waiting for what the device is doing."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
