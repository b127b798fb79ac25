"""`unicron agent`: the agent and, where none is given, a template of its own as a child process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from unicron.runtime import keys
from unicron.runtime.agent_process import AgentProcess, AgentSettings
from unicron.runtime.files import FileProblem, make_folder
from unicron.runtime.framing import SocketInUse, path_problem, remove_stale
from unicron.runtime.keyring import server_keys
from unicron.runtime.processes import TEMPLATE_MARK

STOP_S_MAX = 10.0

log = logging.getLogger("unicron.agent")


def run_with_template(settings: AgentSettings, imports: str) -> int:
    """The template ends when this process does, however it ends: it reads a pipe's other end."""
    if settings.template:
        return AgentProcess(settings).run()
    directory = Path(settings.run_dir)
    if problem := path_problem(settings.template_path):
        raise FileProblem(f"--run-dir is too long ({problem}): give a shorter one")
    make_folder(directory, "--run-dir")
    _require_usable(settings, directory)
    if imports:
        log.info("imports %s before it says hello: that may take half a minute", imports.replace(",", " and "))
    lifeline_end, lifeline = os.pipe()
    arguments = ["--socket", str(settings.template_path), "--import", imports]
    arguments += ["--lifeline", str(lifeline_end)]
    command = [sys.executable, "-m", "unicron.runtime.template", *arguments]
    template = subprocess.Popen(
        command,
        env={**os.environ, TEMPLATE_MARK: str(settings.template_path)},
        stdin=subprocess.DEVNULL,
        pass_fds=(lifeline_end,),
        start_new_session=True,
    )
    os.close(lifeline_end)
    try:
        return AgentProcess(settings).run()
    finally:
        os.close(lifeline)
        try:
            template.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            template.kill()
            template.wait(STOP_S_MAX)


def _require_usable(settings: AgentSettings, directory: Path) -> None:
    """Before the template's imports: is another agent here, are the keys and the metrics' address usable."""
    try:
        remove_stale(directory / "agent.sock")
    except SocketInUse:
        raise FileProblem(
            f"an agent named {settings.node} runs here already ({directory}): stop it, or give this one another --node"
            " (and --metrics)"
        ) from None
    for role in ("agent", "worker"):
        keys.load(Path(settings.keys) / f"{role}.key")
    server_keys(Path(settings.keys))
    if settings.metrics:
        from unicron.runtime.exposition import require_free

        require_free(settings.metrics)
