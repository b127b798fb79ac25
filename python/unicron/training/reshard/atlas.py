"""The pieces of a rank's state: what of which global tensor lies where in its arena.

The source of truth is megatron-core's own: the model's sharded_state_dict gives every parameter as ShardedTensors (one,
or several where a factory divides it), and what belongs to a parameter (main copy, moments) has its geometry. Of a
distributed optimizer a rank holds a range of the flattened local parameter; it becomes the boxes of that range.
No collective is made. Nothing of a layout is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from unicron.training.optimizer_state import inner_optimizers, optimizer_parts
from unicron.training.reshard.boxes import Box, Piece, boxes_of_range, row_strides
from unicron.training.undoable_step import is_sharded

Where = Callable[[torch.Tensor], int]  # a tensor's byte in the arena


class NotDescribed(ValueError):
    """State of which megatron-core does not say what part of what global tensor it is."""


class _Part(NamedTuple):
    """One ShardedTensor of a parameter: a global box, and its first element and strides in the flat parameter."""

    key: str
    shape: tuple[int, ...]
    box: Box
    prepended: int  # axes that the local tensor lacks
    first: int
    strides: tuple[int, ...]  # of the local tensor
    is_padded: bool
    copy: int  # Piece.copy

    @property
    def is_dense(self) -> bool:
        return self.strides == row_strides(self.box.extent[self.prepended :])


class _Owned(NamedTuple):
    """A range of a flat model parameter, whose optimizer state is this inner parameter's."""

    model_param: torch.Tensor
    start: int
    end: int
    inner_param: torch.Tensor
    state: dict[str, Any]


def atlas_of(model: Any, optimizer: Any, where: Where) -> tuple[Piece, ...]:
    """model: chunks (training.chunks.Chunks). Raises NotDescribed."""
    parts = _parts_by_param(model)
    pieces = [
        piece
        for param in model.parameters()
        for piece in _pieces("param", param.data, parts[id(param)], 0, param.numel(), where)
    ]
    for owned in _owned(optimizer):
        known = parts[id(owned.model_param)]
        span = (owned.start, owned.end)
        if not _is_view(owned.inner_param, owned.model_param):
            pieces += _pieces("main", owned.inner_param.data, known, *span, where)
        for name, value in sorted(owned.state.items()):
            if torch.is_tensor(value) and value.numel() == owned.end - owned.start and value.dim():
                pieces += _pieces(name, value, known, *span, where)
            elif torch.is_tensor(value) and value.numel() == 1:
                # One of the whole optimizer: equal for every parameter, and copies must agree.
                box = Box((0,), (1,))
                pieces.append(Piece(f"scalar/{name}", _dtype(value), (1,), box, where(value), (1,)))
            elif torch.is_tensor(value):
                raise NotDescribed(f"optimizer state {name} of shape {tuple(value.shape)}: not like its parameter")
    return tuple(pieces)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_view(inner: torch.Tensor, param: torch.Tensor) -> bool:
    begin, size = param.data.data_ptr(), param.numel() * param.element_size()
    return inner is param or begin <= inner.data.data_ptr() < begin + size


# ------------------------------------------------------------ parameters


def _parts_by_param(model: Any) -> dict[int, list[_Part]]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    parts: dict[int, list[_Part]] = {}
    for chunk in model.chunks:
        bare = _bare(chunk)
        state = bare.sharded_state_dict(prefix="")
        apply_factories(state)
        tensors = [value for value in _leaves(state) if isinstance(value, ShardedTensor)]
        for name, param in bare.named_parameters():
            mine = [t for t in tensors if t.data is not None and _is_view(t.data, param)]
            parts[id(param)] = [_part(param, tensor) for tensor in mine]
            if sum(part.box.volume for part in parts[id(param)]) != param.numel():
                raise NotDescribed(f"{name}: sharded_state_dict() of its module does not describe it")
    return parts


def _bare(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _part(param: torch.Tensor, tensor: Any) -> _Part:
    if tensor.flattened_range is not None:
        raise NotDescribed(f"{tensor.key}: a flattened range of a parameter")
    first = (tensor.data.data_ptr() - param.data.data_ptr()) // param.element_size()
    extent = (*(1 for _ in range(tensor.prepend_axis_num)), *tensor.local_shape)
    box = Box(tuple(map(int, tensor.global_offset)), tuple(map(int, extent)))
    return _Part(
        tensor.key, tuple(map(int, tensor.global_shape)), box, tensor.prepend_axis_num, first,
        tuple(tensor.data.stride()), bool(tensor.allow_shape_mismatch), _copy_of(tensor.replica_id),
    )  # fmt: skip


def _copy_of(replica_id: Any) -> int:
    """megatron-core says which of all copies this is: (of stages, of tensor-parallel ranks, of replicas)."""
    inside = replica_id[:-1] if isinstance(replica_id, tuple) else ()
    return sum(int(number) << 16 * place for place, number in enumerate(reversed(inside)))


def _pieces(kind: str, tensor: torch.Tensor, parts: list[_Part], start: int, end: int, where: Where) -> Iterator[Piece]:
    """tensor holds start .. end of a flat parameter that has these parts."""
    base, item, dtype = where(tensor), tensor.element_size(), _dtype(tensor)
    for part in parts:
        if part.is_dense:
            yield from _of_range(kind, dtype, part, (start, end), (base, item))
        elif (start, end) == (0, tensor.numel()) and tensor.dim() == len(part.strides):
            strides = (*(0 for _ in range(part.prepended)), *part.strides)
            place = base + item * part.first
            yield Piece(f"{kind}/{part.key}", dtype, part.shape, part.box, place, strides, part.is_padded, part.copy)
        else:
            raise NotDescribed(f"{part.key}: a part of a parameter that is not dense, divided over replicas")


def _of_range(kind: str, dtype: str, part: _Part, span: tuple[int, int], memory: tuple[int, int]) -> Iterator[Piece]:
    """The boxes of what of the range start .. end falls into a dense part. memory: its first byte, bytes an element."""
    start, end = span
    base, item = memory
    low, high = max(start, part.first), min(end, part.first + part.box.volume)
    place = base + item * (low - start)
    for local in boxes_of_range(part.box.extent, low - part.first, high - part.first):
        offset = tuple(map(sum, zip(part.box.offset, local.offset, strict=True)))
        box = Box(offset, local.extent)
        strides = row_strides(local.extent)
        yield Piece(f"{kind}/{part.key}", dtype, part.shape, box, place, strides, part.is_padded, part.copy)
        place += item * local.volume


# ------------------------------------------------------------ optimizers


def _owned(optimizer: Any) -> Iterator[_Owned]:
    for part in optimizer_parts(optimizer):
        pairs = _sharded_pairs(part) if is_sharded(part) else _plain_pairs(part)
        for inner in inner_optimizers(part):
            for group in inner.param_groups:
                for param in group["params"]:
                    if id(param) not in pairs:
                        raise NotDescribed("a parameter of the optimizer that belongs to none of the model")
                    model_param, start, end = pairs[id(param)]
                    yield _Owned(model_param, start, end, param, inner.state[param])


def _plain_pairs(optimizer: Any) -> dict[int, tuple[torch.Tensor, int, int]]:
    """inner parameter -> (model parameter, all of it)."""
    pairs = {}
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            pairs.update({id(param): (param, 0, param.numel()) for param in group["params"]})
    models, mains = getattr(optimizer, "float16_groups", []), getattr(optimizer, "fp32_from_float16_groups", [])
    for model_group, main_group in zip(models, mains, strict=True):
        for param, main in zip(model_group, main_group, strict=True):
            pairs[id(main)] = (param, 0, param.numel())
    return pairs


def _sharded_pairs(optimizer: Any) -> dict[int, tuple[torch.Tensor, int, int]]:
    pairs = {}
    for models, shards in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for model_group, shard_group in zip(models, shards, strict=True):
            for param, shard in zip(model_group, shard_group, strict=True):
                span = optimizer._get_model_param_range_map(param)["param"]
                pairs[id(shard)] = (param, span.start, span.end)
    return pairs
