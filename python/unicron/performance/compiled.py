"""Functions compiled at their first call. The one place that imports numba.

numba imports in half a second and compiles for several; the machine code is kept on disk between processes. Importing
unicron.performance itself does not import it, so a process that never computes a throughput never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function as machine code. Arguments are numbers, arrays, and named tuples of numbers."""
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))
