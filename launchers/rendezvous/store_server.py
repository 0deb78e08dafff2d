"""The supervisor's side of the rendezvous: the store of the ranks, served on node 0.

# Note [Who serves the store]
The supervisor of node 0, not a rank: the store exists before the first rank connects and until the last one has ended,
so no rank waits for another to open it, and none loses it because another ended earlier. The socket listens before any
rank is started, on a port chosen by the system, so that launches never conflict over a port; connections wait in its
backlog. The thread that serves it starts after the ranks, because a process with a second thread cannot be forked
safely.
"""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from fabric.launchers.launcher import Topology
from fabric.launchers.process.network import require_loopback

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

CONNECT_SECONDS = 2.0
"""How long to wait for the machine of node 0 before it is taken for lost."""
EXIT_BARRIER_SECONDS = 300
"""How long node 0 serves the store for nodes that have not ended yet. torchrun's exit barrier is as long."""
FAILED_SECONDS = 5
"""The same after a failure, which the other nodes learn within a second."""
FIRST_FAILURE = "fabric/first_failure"


class MeetingPoint:
    """First a listening socket, then a store. A world of one process has neither."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        if topology.size > 1:
            require_loopback()
        self._socket = self._listen() if topology.size > 1 and topology.node_rank == 0 else None
        self._store: TCPStore | None = None
        self.port = self._socket.getsockname()[1] if self._socket else topology.main_port

    def open(self) -> None:
        """Start serving. Called once all ranks of this node have been started."""
        if self._socket is None:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(
            "127.0.0.1", self.port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach()
        )

    def end_waits(self) -> None:
        """Stop serving, so that ranks that wait in the store for one that has died raise."""
        self._store = None  # its destructor ends the thread

    def close(self, *, failed: bool) -> None:
        """Stop serving; with several nodes, once all have ended."""
        if self._topology.num_nodes > 1:
            self._await_nodes(failed)
        self.abandon()
        self.end_waits()

    def abandon(self) -> None:
        """In a forked rank: close its copy of the socket."""
        if self._socket is not None:
            self._socket.close()

    def _listen(self) -> socket.socket:
        topology = self._topology
        if topology.num_nodes == 1:
            return socket.create_server((topology.main_address, topology.main_port), backlog=4096)
        dual = socket.has_dualstack_ipv6()
        try:
            return socket.create_server(
                ("", topology.main_port),
                family=socket.AF_INET6 if dual else socket.AF_INET,
                dualstack_ipv6=dual,
                backlog=4096,
            )
        except OSError as error:
            raise RuntimeError(
                f"Node 0 cannot serve the rendezvous on port {topology.main_port}: {error.strerror}. "
                "Pass another `main_port`, the same on every node."
            ) from error

    def first_failure(self, own: str = "", wait_seconds: float = 0.0) -> str:
        """The first failure that a node has published, in words. If no node has, publish `own`; without it, wait.

        Empty: no node has published a failure.
        """
        from torch.distributed import DistError

        store = self._connected()
        try:
            if store is None or not (own or wait_seconds or store.check([FIRST_FAILURE])):
                return ""
            if not own:
                store.wait([FIRST_FAILURE], timedelta(seconds=wait_seconds or CONNECT_SECONDS))
            return store.compare_set(FIRST_FAILURE, "", own).decode()
        except DistError:
            return ""

    def _connected(self) -> "TCPStore | None":
        """The store, as seen from this node; None if node 0 does not serve it."""
        from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

        at = self._topology.main_address, self.port
        if self._store is None:
            try:
                socket.create_connection(at, CONNECT_SECONDS).close()  # torch retries for seconds, and prints stacks
                self._store = TCPStore(*at, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
            except (DistError, OSError):
                return None
        return self._store

    def _await_nodes(self, failed: bool) -> None:
        """Report that this node has ended; on node 0, wait for the others, so that none loses the store."""
        from torch.distributed import DistError

        store = self._connected()
        try:
            if store is None:
                return
            if store.add("fabric/nodes_ended", 1) == self._topology.num_nodes:
                store.set("fabric/all_ended", "")
            if self._topology.node_rank == 0:
                seconds = FAILED_SECONDS if failed else EXIT_BARRIER_SECONDS
                store.wait(["fabric/all_ended"], timedelta(seconds=seconds))
        except DistError:
            return  # node 0 has ended already, or a node never did: there is nothing to wait for
