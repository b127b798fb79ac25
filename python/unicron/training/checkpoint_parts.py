"""One rank's part of a checkpoint, and how a rank puts the parts of all together, without a
collective.

megatron-core plans a save and finishes it with collectives in the training groups, and starts
processes to write. Here every rank plans for itself (the plans of torch_dist need no agreement once
replicas are left out), writes its data file from a thread, and then a *part*: which pieces of which
tensors lie where in that file. Rank 0 of the save waits for the parts of all and writes what makes
it a checkpoint: `common.pt`, `.metadata`, `metadata.json`. Files and formats are megatron-core's
torch_dist: any megatron-core loads them. Reading makes no collective either: each rank reads the
pieces it needs.

Parts are MessagePack, not the pickles that torch.distributed.checkpoint would exchange; they are
gone when the checkpoint is complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import WriteResult

PART_BYTES_MAX = 256 << 20


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One contiguous piece of a tensor (or one object), and where it lies in its rank's file."""

    name: str
    kind: int  # WriteItemType
    index: int | None
    offset: tuple[int, ...] | None  # of the piece in the whole tensor; None for an object
    sizes: tuple[int, ...]  # of the piece
    global_sizes: tuple[int, ...]
    dtype: str  # "float32"; "" for an object
    path: str
    file_offset: int
    file_bytes: int
    nbytes: int


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: int
    pieces: tuple[Piece, ...]


class Snapshot:
    """What one rank has to write, cloned at an iteration boundary: later steps do not reach it.

    The only expensive step is the clone of the tensors this rank is the main replica of; at dp > 1
    most ranks clone nothing."""

    def __init__(self, sharded_state_dict: dict[str, Any], rank: int) -> None:
        self.rank = rank
        sharded, self.common = save_preprocess(sharded_state_dict, validate_access_integrity=False)
        self.common = _detached(self.common)
        for shard in nested_values(sharded):
            if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
                shard.data = shard.data.detach().clone()
        by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded, True)
        self._state = torch_dist.mcore_to_pyt_state_dict(by_key, False)

    def write(self, folder: Path) -> None:
        """Data file, then the part that describes it. Runs in the background thread."""
        folder.mkdir(parents=True, exist_ok=True)
        planner = torch_dist.MCoreSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(self._state, is_coordinator=self.rank == 0)
        writer = FileSystemWriter(folder, thread_count=1)
        writer.set_up_storage_writer(self.rank == 0)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plan = planner.finish_plan(_with_prefix(plan, self.rank))
        results = writer.write_data(plan, planner).wait() if plan.items else []
        part = Part(rank=self.rank, pieces=_pieces(plan.items, results))
        _write_durably(part_path(folder, self.rank), msgspec.msgpack.encode(part))
        self._state = {}


class LoneReader(torch_dist.TorchDistLoadShardedStrategy):
    """megatron-core's reader, except that a rank plans its reads alone.

    megatron-core gathers all plans at rank 0 of the default group, only to send them back
    unchanged.
    A rank that restores in the middle of a recovery must not wait for others here."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *_more: Any, **_options: Any) -> Any:
        shards = [s for s in nested_values(sharded_state_dict) if isinstance(s, ShardedTensor)]
        by_key, flat, renamed = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = torch_dist.mcore_to_pyt_state_dict(by_key, True)
        planner = torch_dist.MCoreLoadPlanner(
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
            shapes_validation_sharded_tensors=[s for s in shards if not s.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={s.key: s for s in shards if s.allow_shape_mismatch},
        )
        _load_state_dict(state, FileSystemReader(checkpoint_dir), no_dist=True, planner=planner)
        values = {key: torch_dist._unwrap_pyt_sharded_tensor(v) for key, v in state.items()}
        loaded = torch_dist._replace_sharded_keys_with_state_dict_keys(values, flat, renamed)
        torch_dist._restore_dict_types(loaded, sharded_state_dict)
        return loaded


def _detached(value: Any) -> Any:
    """A copy of nested plain data in which no tensor shares memory with the live state."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_detached(item) for item in value)
    return value


def _with_prefix(plan: SavePlan, rank: int) -> SavePlan:
    return SavePlan(items=plan.items, storage_data=_StoragePrefix(f"__{rank}_"))


def part_path(folder: Path, rank: int) -> Path:
    return folder / f"part_{rank}.msgpack"


def num_parts(folder: Path, num_ranks: int) -> int:
    return sum(part_path(folder, rank).exists() for rank in range(num_ranks))


def has_all_parts(folder: Path, num_ranks: int) -> bool:
    return all(part_path(folder, rank).exists() for rank in range(num_ranks))  # looked at all the time: up to a gap


def finish(folder: Path, num_ranks: int, common: dict[str, Any]) -> None:
    """All parts are there: write what makes the folder a checkpoint. metadata.json comes last."""
    parts = [_read_part(part_path(folder, rank)) for rank in range(num_ranks)]
    plans = [SavePlan(items=[_item(piece) for piece in part.pieces]) for part in parts]
    results = [[_result(piece) for piece in part.pieces] for part in parts]
    torch.save(common, folder / "common.pt")
    planner = torch_dist.MCoreSavePlanner(flatten_state_dict=False)
    _, metadata = planner.create_global_plan(plans)
    writer = FileSystemWriter(folder, thread_count=1)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, results)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    for rank in range(num_ranks):
        part_path(folder, rank).unlink()
    for name in ("common.pt", "metadata.json", ""):
        sync_path(folder / name)


def _read_part(path: Path) -> Part:
    if path.stat().st_size > PART_BYTES_MAX:
        raise ValueError(f"{path} is larger than {PART_BYTES_MAX} bytes")
    return msgspec.msgpack.decode(path.read_bytes(), type=Part)


def _pieces(items: list[WriteItem], results: list[WriteResult]) -> tuple[Piece, ...]:
    written = {result.index: result for result in results}
    return tuple(_piece(item, written[item.index]) for item in items)


def _piece(item: WriteItem, result: WriteResult) -> Piece:
    tensor, index, place = item.tensor_data, item.index, result.storage_data
    return Piece(
        name=index.fqn,
        kind=item.type.value,
        index=index.index,
        offset=None if index.offset is None else tuple(index.offset),
        sizes=tuple(tensor.chunk.sizes) if tensor else (),
        global_sizes=tuple(tensor.size) if tensor else (),
        dtype=str(tensor.properties.dtype).removeprefix("torch.") if tensor else "",
        path=place.relative_path,
        file_offset=place.offset,
        file_bytes=place.length,
        nbytes=result.size_in_bytes,
    )


def _index(piece: Piece) -> MetadataIndex:
    offset = None if piece.offset is None else torch.Size(piece.offset)
    return MetadataIndex(piece.name, offset, piece.index)


def _item(piece: Piece) -> WriteItem:
    if not piece.dtype:
        return WriteItem(index=_index(piece), type=WriteItemType(piece.kind))
    offset = torch.Size(piece.offset or (0,) * len(piece.sizes))
    tensor = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(piece.sizes)),
        properties=TensorProperties(dtype=getattr(torch, piece.dtype)),
        size=torch.Size(piece.global_sizes),
    )
    return WriteItem(index=_index(piece), type=WriteItemType(piece.kind), tensor_data=tensor)


def _result(piece: Piece) -> WriteResult:
    return WriteResult(
        index=_index(piece),
        size_in_bytes=piece.nbytes,
        storage_data=_StorageInfo(piece.path, piece.file_offset, piece.file_bytes),
    )


def _write_durably(path: Path, data: bytes) -> None:
    """Appears whole or not at all, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_path(path.parent)


def write_text_durably(path: Path, text: str) -> None:
    _write_durably(path, text.encode())


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
