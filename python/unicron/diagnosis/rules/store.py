"""What the key-value store, the rendezvous and gloo say. Nearly all of it is an echo: the store's host, or a peer,
went away or came late, and everybody else says so.
"""

from __future__ import annotations

from unicron.diagnosis.words import Category, Family, Rule, Scope, Strength
from unicron.types import Severity

C10D = "torch/csrc/distributed/c10d/socket.cpp"
STORE = "torch/csrc/distributed/c10d/TCPStore.cpp"
ELASTIC = "torch/distributed/elastic/rendezvous"
GLOO = "gloo/transport/tcp/pair.cc"

RULES = (
    Rule(
        "store.no-ipv6",
        r"(?i)errno: 97\b|address family not supported|hostname of the client socket cannot be retrieved",
        Severity.INFO, Scope.PROCESS, Category.OTHER_NETWORK, Strength.NOISE,
        "a warning: tried IPv6 or a reverse look-up in vain, and goes on without", C10D,
        "[W socket.cpp:401] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address "
        "family ...).",

        is_final=True,
    ),
    Rule(
        "store.unique-id",
        r"retrieving ncclUniqueId from \[(?P<peer>\d{1,7})\]",
        Severity.SEV3, Scope.PROCESS, Category.OTHER_NETWORK, Strength.ECHO,
        "waits for the communicator's number, which that rank has not set: it is late or dead",
        "ProcessGroupNCCL.cpp, broadcastUniqueNCCLID",
        "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by "
        "key '0'",
        is_final=True,
    ),
    Rule(
        "store.key",
        r"Timeout waiting for key|wait timeout after \d+ ?ms|"
        r"store->get\(.{0,80}got error|ncclUniqueId|"
        r"(?i:socket timeout)|(?:store|TCPStore|PrefixStore).{0,60}(?i:time.?out)",
        Severity.SEV3, Scope.PROCESS, Category.OTHER_NETWORK, Strength.ECHO,
        "waits for a key that another rank has not set: that rank is late or dead",
        "ProcessGroupNCCL.cpp, TCPStore.cpp", "wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
    ),
    Rule(
        "store.port-forbidden",
        r"(?i)failed to (?:bind|listen).{0,80}(?:errno: 13|permission denied)",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "a port below 1024 is not ours to take: configuration", C10D,
        "The server socket has failed to bind to [::]:80 (errno: 13 - Permission denied).",
    ),
    Rule(
        "store.address-wrong",
        r"(?i)failed to (?:bind|listen).{0,80}(?:errno: 99|cannot assign)|Cannot assign requested address",
        Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the master's address does not belong to this host: configuration", C10D,
        "The server socket has failed to bind to 10.0.0.9:29500 (errno: 99 - Cannot assign requested address).",
    ),
    Rule(
        "store.port-taken",
        r"(?i)address already in use|EADDRINUSE|failed to (?:bind|listen)|No address added out of total|"
        r"Failed to add port to server",
        Severity.SEV2, Scope.PROCESS, Category.OTHER_SOFTWARE, Strength.CAUSE,
        "the port is taken, often by a process of the last start that has not ended yet", C10D,
        "The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
    ),
    Rule(
        "store.state-address-gone", r"this node has lost \S{1,64}, the address that its agent chose for state",
        Severity.SEV1, Scope.NODE, Category.OTHER_NETWORK, Strength.HARDWARE,
        "the interface that the agent chose for state is gone, or has lost its address",
        "unicron/training/gloo_device.py",
        "StateAddressGone: this node has lost 10.78.0.3, the address that its agent chose for state: bring its "
        "interface back",
    ),
    Rule(
        "store.name-unknown",
        r"(?i)name or service not known|temporary failure in name resolution|could not resolve host|getaddrinfo|"
        r"nodename nor servname|hostname .{0,60}(?:could not|cannot) be (?:resolved|retrieved)|no address associated|"
        r"gai error|UnknownHost",
        Severity.SEV3, Scope.PROCESS, Category.OTHER_NETWORK, Strength.WITNESS,
        "a name could not be resolved: the resolver of this node, or a wrong name", C10D,
        "The IPv4 network addresses of (node-1, 29500) cannot be retrieved (gai error: -2 - Name or service not "
        "known).",
    ),
    Rule(
        "store.client-timeout",
        r"(?i)client socket has (?:timed out|failed to connect)|timed out after \d+s while trying to connect|"
        r"failed to connect to .{0,120}(?:errno|refused|timed? ?out)|socket (?:has )?timed out|DistNetworkError|"
        r"(?:errno: (?:110|111|113)|\[Errno (?:110|111|113)\])|ConnectionRefusedError|connection refused|"
        r"no route to host|"
        r"ConnectionTimeout|connection timed out|network is unreachable|NewConnectionError|ConnectTimeout",
        Severity.SEV3, Scope.PROCESS, Category.CONN_REFUSED_RESET, Strength.ECHO,
        "the store's host does not answer (yet)", C10D,
        "The client socket has timed out after 60s while trying to connect to (10.0.0.1, 29500).",
    ),
    Rule(
        "store.no-heartbeat",
        r"removed from the rendezvous .{0,120}no heartbeat|"
        r"rendezvous .{0,80}detected that (?:the )?node .{0,80}is dead",
        Severity.SEV1, Scope.NODE, Category.LOST_CONNECTION, Strength.DEATH,
        "the rendezvous hears nothing of a node any more", f"{ELASTIC}/dynamic_rendezvous.py",
        "As part of the sync operation the node(s) node-3_812_0 have been removed from the rendezvous 'x' since they "
        "had no heartbeat.",
    ),
    Rule(
        "store.rendezvous-timeout",
        r"RendezvousTimeoutError|RendezvousClosedError|(?i:rendezvous.{0,60}(?:timed out|timeout|closed|failed|"
        r"error))|"
        r"DistStoreError|(?i:Timed out waiting for clients)|(?i:store timeout|waiting for clients)|"
        r"RendezvousGracefulExitError|RendezvousStateError|(?i:etcd.{0,80}(?:error|exception|timed out|refused))",
        Severity.SEV3, Scope.PROCESS, Category.OTHER_NETWORK, Strength.ECHO,
        "not all nodes came to the rendezvous in time", ELASTIC,
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    ),
    Rule(
        "store.leader-lost",
        r"Failed to send RPC to coordination service|coordination_service_agent.{0,200}UNAVAILABLE|"
        r"Additional GRPC error information from remote target (?:unknown_target_for_)?coordination",
        Severity.SEV3, Scope.PROCESS, Category.CONN_REFUSED_RESET, Strength.ECHO,
        "the coordination service, which lives in process 0, does not answer; what may have happened to it is a list",
        "XLA coordination_service_agent.cc, coordination_service_error_util.cc",
        "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted/died/restarted",
        is_final=True,
    ),
    Rule(
        "store.coordinated-end",
        r"Polled an error from coordination service|(?:JAX )?distributed service detected fatal errors",
        Severity.SEV3, Scope.PROCESS, Category.LOST_CONNECTION, Strength.ECHO,
        "this process ends because the coordination service told it of an error, mostly of another task",
        "XLA coordination_service_agent.cc, distributed/client.h",
        "Terminating process because the JAX distributed service detected fatal errors.",
    ),
    Rule(
        "store.host-lost",
        r"(?:recvValue\w*|sendBytes|recvBytes|recvVector|sendValue)\W.{0,40}on SocketImpl\(|"
        r"(?i:connection to the C10d store has failed)",
        Severity.SEV3, Scope.PROCESS, Category.CONN_REFUSED_RESET, Strength.ECHO,
        "the store does not answer any more: it lives in rank 0, or in the agent of its node",
        STORE, "sendBytes failed on SocketImpl(fd=71, addr=[localhost]:46108, remote=[localhost]:35019): Broken pipe",
        is_final=True,
    ),
    Rule(
        "store.connection-lost",
        r"(?i)RendezvousConnectionError|"
        r"(?:recvValue|sendBytes|recvBytes|recvVector|sendValue|TCPStore).{0,80}(?:fail|broken|closed|error|lost)|"
        r"failed to recv, got 0 bytes|connection was likely closed|store (?:server|daemon) .{0,40}(?:shut|"
        r"exited|gone)|"
        r"Connection (?:reset|closed) by peer|broken pipe|BrokenPipeError|ConnectionResetError|"
        r"ConnectionAbortedError|"
        r"connection (?:was )?reset|ECONNRESET|(?-i:EPIPE)|connection aborted|RemoteDisconnected|"
        r"socket (?:was )?closed|"
        r"closed by remote|EOFError|unexpected EOF|ConnectionError\b",
        Severity.SEV3, Scope.PROCESS, Category.CONN_REFUSED_RESET, Strength.ECHO,
        "the other end's process ended, or its connection did", f"{STORE}, {GLOO}",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
        "[10.0.0.4]:1042",
    ),
    Rule(
        "store.gloo",
        r"(?i)gloo(?!.{0,40}connected to \d+ peer ranks).{0,200}(?:timed out|timeout|connect|failed|error|"
        r"ReadError|WriteError|IoException)|"
        r"Timed out waiting \d+ ?ms for (?:recv|send)|"
        r"\[[^\]]{0,80}gloo/transport/\w+/\w+\.cc:\d+\]\s*$",
        Severity.SEV3, Scope.PROCESS, Category.OTHER_NETWORK, Strength.ECHO,
        "gloo waited for a peer in vain", GLOO,
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
        "operation",
    ),
)  # fmt: skip

FAMILY = Family("store-rdzv", RULES)
