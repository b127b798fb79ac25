"""Functions compiled at their first call. The one place that imports numba.

numba imports in half a second and compiles for several; the machine code is kept on disk between processes. Importing
unicron.performance itself does not import it, so a process that never computes a throughput never waits for it.

What is kept holds the functions that it calls, too, of other files. numba looks at the age of the caller's file alone
(its manual says so), so in a checkout that was updated the old model would go on inside of a search that did not
change. Here it counts as old when any file of this package is another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


STAMP = _digest()


def compiled(function: Function) -> Function:
    """The function as machine code. Arguments are numbers, arrays, and named tuples of numbers."""
    found = numba.njit(cache=True, error_model="numpy")(function)
    file = getattr(found._cache, "_cache_file", None)
    if file is None or not hasattr(file, "_source_stamp"):  # a numba that keeps it otherwise: nothing is kept then
        return cast(Function, numba.njit(error_model="numpy")(function))
    file._source_stamp = (file._source_stamp, STAMP)
    return cast(Function, found)
