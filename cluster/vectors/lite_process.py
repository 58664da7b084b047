"""The process of one Milvus Lite server: `cluster.vectors.lite` starts it, and it never outlives its owner.

It is run as a file, not as a module, so that it works wherever the package was unpacked; it imports nothing
of Flywheel. Its standard input is a lifeline: nobody writes to it, and when it closes (because the owner
closed it or died, even by SIGKILL) the server stops. The one line on standard output is JSON: `{"port": N}`
when the server listens, `{"locked": true}` when another process holds the data folder.
"""

import json
import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser

STOP_GRACE_S = 2.0
STOP_LIMIT_S = 6.0


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--owner", required=True, help="pid of the owner; read by the next owner, not here")
    arguments = parser.parse_args()

    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_lifeline, args=(stopped,), daemon=True).start()

    # milvus-lite 3.2.2: this is what its own `ServerManager` calls; unlike the command line it takes port 0
    # and says which port it got, so no port is guessed. Delete when `milvus-lite server` can do both.
    from milvus_lite.adapter.grpc.server import start_server_in_thread
    from milvus_lite.exceptions import DataDirLockedError

    try:
        # One worker: milvus-lite 3.2.2 takes no lock around a collection's sequence numbers and its log, so
        # two writers at once may corrupt it. Reads wait for writes. Delete when its engine serialises writes.
        server, database, port = start_server_in_thread(arguments.data_dir, host="127.0.0.1", port=0, max_workers=1)
    except DataDirLockedError:
        _say({"locked": True})
        return 0
    _say({"port": port})
    # What the library prints from here on belongs into the log: nobody reads our standard output any more.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    stopped.wait()
    server.stop(grace=STOP_GRACE_S).wait()
    database.close()
    return 0


def _follow_lifeline(stopped: threading.Event) -> None:
    sys.stdin.buffer.read()
    stopped.set()
    # The log recovers every acknowledged row, so a close that hangs may be cut.
    time.sleep(STOP_LIMIT_S)
    os._exit(1)


def _say(facts: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
