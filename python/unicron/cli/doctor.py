"""unicron doctor: is this machine fit, and how fast would a death be seen here."""

from __future__ import annotations

from unicron.cli.common import FAILURE, Json, print_json, print_table


def main(json: Json = False) -> int:
    """Is this machine fit, and how fast would a death be seen here. Exit code 1 when it is not.

    Example: unicron doctor
    """
    from unicron.runtime.doctor import examine

    findings = examine()
    fit = all(f.state != "bad" for f in findings)
    if json:
        print_json({"fit": fit, "findings": [vars(f) for f in findings]})
    else:
        print_table(map(vars, findings), ("state", "name", "value", "meaning"), "")
        print("this machine is fit" if fit else "this machine is not fit: see the lines marked bad")
    return 0 if fit else FAILURE
