"""Is this node's hardware fit? Checks as plug-ins with three answers: ok, bad, unknown.

A check that cannot look (no such device, no right, no answer in time) says unknown and why; that is no evidence, and
nothing is refused for it. Only `bad` takes a node out of use, and only after it was seen several times in a row where
one look may be wrong. They run in a process of their own, each with a time limit, because a driver may hang.

`check.py` what a check is · `supervise.py` runs them · one file for each kind of hardware.
"""
