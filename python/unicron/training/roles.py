"""The one signal from a session to the runner of the script."""

from __future__ import annotations


class RoleChanged(BaseException):
    """An understudy was built for another role than it now gets: the runner runs the script again.

    A BaseException, so that `except Exception` in a script does not swallow it.
    """
