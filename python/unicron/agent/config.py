"""What an agent is, and the bounds of its waits and queues (milliseconds)."""

from __future__ import annotations

import msgspec

from unicron.types import Network


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    incarnation: int
    slots: int
    understudies: int
    store: str  # tcp://host:port at which this agent hosts rendezvous stores
    store_key: str
    clock: str = ""  # whose monotonic clock the times are of
    socket: str = ""  # Unix socket of the workers
    heartbeat_ms: float = 500.0
    # without news, while its beats are known to be heard; then anyhow (progress is no news)
    quiet_ms_max: float = 2_000.0
    fork_ms_max: float = 30_000.0  # from ForkWorker to Forked
    owner_gone_ms: float = 20.0  # between two looks at a dead arena owner
    owner_gone_ms_max: float = 5_000.0  # then the adopter gets a fresh arena
    kill_ms: float = 1_000.0  # between two kills of the same process
    kills_max: int = 5  # then the kernel cannot end it, and the node is to blame
    exit_status_ms_max: float = 5_000.0  # from the mutex to the exit status; then without it
    exit_ms_max: float = 30_000.0  # from Finished to the end of the process
    # budgets of a loop that does not advance
    stall_ms_min: float = 1_500.0  # below this nothing is a stall: a busy machine is no fault
    waits_ms_min: float = 300.0  # who waits for others so long is told when it is asked for (AskWaits)
    start_ms_max: float = 300_000.0  # STARTING: imports, model
    idle_ms_max: float = 120_000.0  # the script's own code between iterations
    idle_suspect_ms: float = 10_000.0  # of it, before evidence is heard
    heal_ms_max: float = 60_000.0
    # a coordinator of an older term is left for so long; then the newer one's journal must have been lost
    term_ms_max: float = 15_000.0
    sample_ms_max: float = 1_000.0  # of a gap between two samples that counts as watched
    pace_kept_max: int = 64  # committed iterations of a worker between two heartbeats
    # queues
    reports_kept_max: int = 256  # what a coordinator that comes back is told again
    workers_max: int = 256
    arenas_max: int = 512
    beat_port: int = 0  # UDP, where others' beats are heard; 0: none
    checks: bool = False  # of its hardware
    control_network: Network | None = None
    state_network: Network | None = None
