"""Horovod's rendezvous server, where ranks exchange their addresses: a key-value store over HTTP, run by rank 0.

Horovod's launcher runs one in the process that starts the ranks. Ours is in rank 0, so that ranks may be started by
any launcher: fork, script, torchrun, srun, mpirun.
"""

from __future__ import annotations

import threading
from typing import final


@final
class RendezvousServer:
    """Serves from construction to `close`, on a port that the system chooses. `host`: "" for all interfaces."""

    def __init__(self, host: str) -> None:
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        self._server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="horovod-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
