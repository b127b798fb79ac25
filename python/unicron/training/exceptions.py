"""What an exception says, for those who are not in this process: type, place and a text of bounded size.

An exception that was carried here from another process (torch's data loader workers, torch.multiprocessing) is told
as what it was there: its own type, and the place where it was raised, not where it was passed on.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

from unicron.messages import cut

# torch/_utils.py, ExceptionWrapper.reraise; torch/multiprocessing/spawn.py, ProcessRaisedException
_CARRIED = re.compile(r"Caught (?P<type>[\w.]+) in .+?\.\nOriginal (?P<stack>Traceback .*)", re.DOTALL)
_SPAWNED = re.compile(r"-- Process \d+ terminated with the following error:\n(?P<stack>Traceback .*)", re.DOTALL)
_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_LAST_LINE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?::|$)", re.MULTILINE)


#: What helps against messages of Megatron's that a new script meets (docs/TRAINING.md, first table).
_ADVICE = (
    (
        "data parallel group is not initialized",
        "say get_megatron_optimizer(..., use_gloo_process_groups=False): groups are unicron's here",
    ),
    (
        "model-parallel-rng is not added",
        "call tensor_parallel.model_parallel_cuda_manual_seed(SEED) before the model is built, also on CPUs",
    ),
)


@dataclass(frozen=True)
class Described:
    type: str
    text: str
    where: str  # file:line of the innermost frame


def advise(error: BaseException) -> None:
    """Adds to the error what helps, where that is known: it is printed and told with it."""
    said = str(error)
    for part, advice in _ADVICE:
        if part in said and advice not in getattr(error, "__notes__", ()):
            error.add_note(advice)


def describe(error: BaseException) -> Described:
    advise(error)
    text = cut("".join(traceback.format_exception(error)))
    message = str(error)
    carried = _CARRIED.search(message) or _SPAWNED.search(message)
    if carried is not None:
        stack = carried["stack"]
        kind = carried.groupdict().get("type") or _last_type(stack)
        return Described((kind or type(error).__name__).rpartition(".")[2], text, _place(stack))
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        where = f"{frame.f_code.co_filename}:{line}"
    return Described(type(error).__name__, text, where)


def warm_up() -> None:
    """Reads the source lines of the frames we are in: the first traceback would otherwise wait for the disk."""
    traceback.format_stack()


def _place(stack: str) -> str:
    frames = _FRAME.findall(stack)
    return ":".join(frames[-1]) if frames else ""


def _last_type(stack: str) -> str:
    found = _LAST_LINE.findall(stack)
    return str(found[-1]) if found else ""
