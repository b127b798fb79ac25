"""What else the demo's script may choose. The command line, the script and the matrix have the same names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Variant:
    overlap: bool = False  # communication hidden behind computation, in many buckets
    bf16: bool = False  # parameters, with main parameters and gradients in fp32
    fp16: bool = False  # the same, with a loss scale that adapts
    sequence_parallel: bool = False  # where tp > 1
    dropout: float = 0.0
    virtual_pp: int = 1  # model chunks a rank; above 1 the pipeline is interleaved
    unclipped: bool = False  # gradients of whatever norm
    sgd: bool = False  # with momentum, in the place of Adam
    spike: int = -1  # iteration in which one micro-batch's loss is SPIKE times itself; -1: none is
    experts: int = 0  # in each layer, two of which take each token; 0: layers have none

    def arguments(self) -> list[str]:
        """Of the script's command line."""
        words: list[str] = []
        for name, value in vars(self).items():
            option = f"--{name.replace('_', '-')}"
            if value is True:
                words.append(option)
            elif value is not False:
                words += [option, str(value)]
        return words

    @staticmethod
    def of(options: Any) -> Variant:
        """From parsed arguments, or whatever else has attributes of these names."""
        return Variant(**{field.name: getattr(options, field.name) for field in fields(Variant)})


PLAIN = Variant()
