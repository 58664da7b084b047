"""An S3 server of our own on a free port of this machine (moto), for as long as a test needs one."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server(bucket: str) -> Iterator[str]:
    """Its address, as `AWS_ENDPOINT_URL` wants it; `bucket` exists and is empty."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _make(bucket, address, process)
        yield address
    finally:
        process.kill()
        process.wait()


def environment(address: str) -> dict[str, str]:
    """What a client of the server at `address` needs."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _make(bucket: str, address: str, process: "subprocess.Popen[bytes]") -> None:
    request = urllib.request.Request(f"{address}/{bucket}", method="PUT")
    for _ in range(300):
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None, "moto.server ended by itself"
            time.sleep(0.1)
    raise TimeoutError("moto.server does not answer")
