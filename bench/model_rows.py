"""Published Megatron throughput as the performance model reads it: which rows count, and what each says.

The rules were written before anything was fitted, and look at no throughput. A row counts if it is
- of a dense model (no experts), in bf16 or fp16, with Megatron's parallelism (tensor, pipeline, data; no context
  parallelism, no fully sharded data parallelism);
- complete: shape with vocabulary, GPU count and layout, batch. A micro-batch or virtual stages that the source does not
  state are the schedule's freedom: the model takes its best;
- consistent: tp * pp * dp = GPUs, and no field is the collector's guess;
- not a repetition: the same row of the same source counts once.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from unicron.performance.machine import Machine, machine_of
from unicron.performance.shape import ModelShape, hardware_flop, sample_flop

NARROW = re.compile(r"\b(FP8|MXFP8|NVFP4|FP4|INT8)\b", re.IGNORECASE)
SHARDED = re.compile(r"ZeRO-3|fsdp=(?!0\b)\d+", re.IGNORECASE)
EXPERTS = re.compile(r"\bep=\d|mixtral|\bMoE\b|_a\d+b", re.IGNORECASE)
GUESSED = re.compile(r"is a guess", re.IGNORECASE)
REQUIRED = ("layers", "hidden", "heads", "seq", "vocab", "num_gpus", "tp", "pp", "dp", "global_batch", "tflops_per_gpu")

# What the columns leave out: (ffn, query groups, gated, tied) of families that are not GPT.
FAMILIES = {
    "LLAMA2-7B": (11008, 32, True, False),
    "LLAMA2-13B": (13824, 40, True, False),
    "LLAMA2-70B": (28672, 8, True, False),
    "LLAMA3-8B": (14336, 8, True, False),
    "LLAMA3-70B": (28672, 8, True, False),
    "LLAMA3.1-405B": (53248, 8, True, False),
}


@dataclass(frozen=True)
class Published:
    """One row. vpp and micro_batch are 0 where the source does not state them; recompute is -1 where it may choose."""

    source: str
    gpu: str  # key of GPU_TYPES
    shape: ModelShape
    machine: Machine
    generation: str
    gpus: int
    tp: int
    pp: int
    dp: int
    vpp: int
    micro_batch: int
    global_batch: int
    recompute: int
    flops: float  # model FLOP/s per GPU
    memory_bytes: float  # 0: not stated
    line: int

    @property
    def family(self) -> str:
        """A100, H100: what errors are told by."""
        return self.gpu.split("-")[0]


def read(path: Path) -> tuple[list[Published], dict[str, int]]:
    """The rows that count, and how many were left out for which reason."""
    rows: list[Published] = []
    excluded: dict[str, int] = {}
    seen: set[tuple[str, ...]] = set()
    with path.open(newline="") as file:
        for line, fields in enumerate(csv.DictReader(file), 2):
            reason = exclusion(fields)
            content = tuple(fields.values())
            if not reason and content in seen:
                reason = "repeated"
            seen.add(content)
            if reason:
                excluded[reason] = excluded.get(reason, 0) + 1
            else:
                rows.append(published(fields, line))
    return rows, excluded


def exclusion(fields: dict[str, str]) -> str:
    """Why a row does not count; "" if it does."""
    text = f"{fields['model']} {fields['notes']}"
    if NARROW.search(text):
        return "not bf16 or fp16"
    if EXPERTS.search(text):
        return "not dense"
    if SHARDED.search(text):
        return "fully sharded"
    if any(not fields[name].strip() for name in REQUIRED):
        return "incomplete"
    if GUESSED.search(text):
        return "guessed"
    tp, pp, dp = (int(fields[name]) for name in ("tp", "pp", "dp"))
    if tp * pp * dp != int(fields["num_gpus"]):
        return "inconsistent"
    return "" if gpu_of(fields["gpu"]) else "unknown GPU"


def gpu_of(text: str) -> str:
    """The key of GPU_TYPES that a published name means; "" if none."""
    sizes = {"V100": "32GB", "A100": "80GB", "A800": "80GB", "H100": "80GB", "H800": "80GB", "H200": "141GB"}
    sizes |= {"B200": "180GB", "GB200": "186GB", "GB300": "279GB"}
    found = re.search(r"\b(GB[23]00|[VABH][1-8]00)(?:-(\d+GB))?", text)
    if not found or found[1] not in sizes:
        return ""
    known = {"V100": ("16GB", "32GB"), "A100": ("40GB", "80GB")}.get(found[1], ())
    return f"{found[1]}-{found[2] if found[2] in known else sizes[found[1]]}"


def machine_named(text: str, gpu: str) -> Machine:
    """The node that a published GPU column describes, else the vendor's own system."""
    per_node = re.search(r"(\d+)(?: GPU)?/node", text)
    adapters = re.search(r"(?:(\d+)x[^;)]*?)?(\d+) ?Gb(?:/s)?\b", text)
    network = 0.0
    if adapters:
        network = int(adapters[1] or 1) * int(adapters[2]) * 1e9 / 8
    elif per_node and "Jean Zay" in text:
        network = 50e9  # four 100 Gb adapters a node
    return machine_of(
        gpu,
        gpus_per_node=int(per_node[1]) if per_node else 0,
        network_bytes_per_s=network,
        network_onload=bool(re.search(r"\bOPA\b|Omni-?Path|Jean Zay", text)),
    )


def generation_of(source: str, notes: str) -> str:
    """The software generation, from what the source says of its code and its date."""
    if "DeepSpeed" in notes or "bigscience" in source:
        return "megatron-deepspeed"
    year = 2024
    found = re.search(r"arXiv:(\d\d)\d\d\.|\((20\d\d)-|; (20\d\d)-|\((2\d)\.\d\d", source)
    if found:
        year = int(next(group for group in found.groups() if group)[-2:]) + 2000
    if re.search(r"no interleaving", notes):
        return "megatron-2020"
    return {2019: "megatron-2020", 2020: "megatron-2020", 2021: "megatron-2021", 2022: "megatron-2022"}.get(
        year, "core-2023" if year == 2023 else "core-2024"
    )


def recompute_of(notes: str) -> int:
    if re.search(r"selective", notes):
        return 1
    if re.search(r"HW-FLOPs|recompute assumed|checkpoint-activations", notes):
        return 2
    return 0 if "factor 3" in notes else -1


def samples_per_s(fields: dict[str, str], shape: ModelShape) -> float:
    """Of all GPUs: from the stated time of an iteration, else tokens, else FLOP/s as the source counts them."""
    notes = fields["notes"]
    gpus, batch = int(fields["num_gpus"]), int(fields["global_batch"])
    if found := re.search(r"(?:sec/it|s/it)=(\d+\.\d+)|iteration time (\d+\.\d+) ?s", notes):
        return batch / float(found[1] or found[2])
    if found := re.search(r"([\d.]+) ms/iteration", notes):
        return batch / (float(found[1]) / 1e3)
    if found := re.search(r"tokens/s/GPU=(\d+)", notes):
        return int(found[1]) * gpus / shape.seq
    rate = float(fields["tflops_per_gpu"]) * 1e12 * gpus
    if "factor 8*P*T" in notes:  # FLOP of a token: 8 a parameter, whatever the formulas of shape.py say
        return rate / (8e9 * float(fields["params_b"]) * shape.seq)
    return rate / (hardware_flop(shape) if recompute_of(notes) == 2 else sample_flop(shape))


def published(fields: dict[str, str], line: int) -> Published:
    number = {
        name: int(fields[name] or 0) for name in ("num_gpus", "tp", "pp", "dp", "vpp", "micro_batch", "global_batch")
    }
    ffn, groups, gated, tied = FAMILIES.get(fields["model"].replace("_", "-"), (0, 0, False, True))
    layers, hidden, heads, seq, vocab = (int(fields[name]) for name in ("layers", "hidden", "heads", "seq", "vocab"))
    shape = ModelShape(layers, hidden, heads, seq, vocab, ffn, groups, gated, tied)
    gpu = gpu_of(fields["gpu"])
    memory = re.search(r"(?:mem=|; )(\d+)GB", fields["notes"])
    return Published(
        source=fields["source"],
        gpu=gpu,
        shape=shape,
        machine=machine_named(fields["gpu"], gpu),
        generation=generation_of(fields["source"], fields["notes"]),
        gpus=number["num_gpus"],
        tp=number["tp"],
        pp=number["pp"],
        dp=number["dp"],
        vpp=1 if number["pp"] == 1 else number["vpp"],
        micro_batch=number["micro_batch"],
        global_batch=number["global_batch"],
        recompute=recompute_of(fields["notes"]),
        flops=samples_per_s(fields, shape) * sample_flop(shape) / number["num_gpus"],
        memory_bytes=float(memory[1]) * (1 << 30) if memory else 0.0,
        line=line,
    )
