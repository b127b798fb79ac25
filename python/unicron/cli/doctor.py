"""unicron doctor: is this machine fit, and how fast would a death be seen here."""

from __future__ import annotations

from unicron.cli.common import FAILURE, Coordinator, Interface, Json, StateInterface, print_json, print_table


def main(
    coordinator: Coordinator = "", interface: Interface = "", state_interface: StateInterface = "", json: Json = False
) -> int:
    """Is this machine fit, and how fast would a death be seen here. Exit code 1 when it is not.

    Example: unicron doctor

    Example: unicron doctor --coordinator 10.0.0.1:7070 --state-interface ib0
    """
    from unicron.runtime.doctor import examine

    findings = examine(coordinator, interface, state_interface)
    fit = all(f.state != "bad" for f in findings)
    if json:
        print_json({"fit": fit, "findings": [vars(f) for f in findings]})
    else:
        print_table(map(vars, findings), ("state", "name", "value", "meaning"), "")
        print("this machine is fit" if fit else "this machine is not fit: see the lines marked bad")
    return 0 if fit else FAILURE
