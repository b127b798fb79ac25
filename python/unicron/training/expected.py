"""What `session.expect` gives to its block: long work of the script's own, which may end early."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Expected:
    """finished: the block ran to its end, and what its collectives gave is good. False after the block: a rank failed
    meanwhile and a collective of the block broke, so the block was left in its middle; training goes on, and heals.
    """

    what: str
    finished: bool = False
    left_out: str = ""  # why no operation with others may begin in the block; refused by name where groups are gloo's
