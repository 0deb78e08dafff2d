"""The server at which Horovod's ranks exchange their addresses: keys and values over HTTP, served by rank 0.

Horovod's launcher has one of its own, in the process that starts the ranks. Ours is where the ranks are, so that any
launcher will do: fork, script, torchrun, srun, mpirun.
"""

from __future__ import annotations

import threading
from typing import final


@final
class RendezvousServer:
    """Serves on a port that the system chooses, from construction on until `close`. `host`: "" is every interface."""

    def __init__(self, host: str) -> None:
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        self._server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="horovod-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
