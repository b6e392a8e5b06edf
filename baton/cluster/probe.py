"""`python -m baton.cluster.probe URL`: is the process at URL healthy? For health checks of
containers: exit code 0 or 1 and one line. `http://…` wants status 200, `grpc://HOST:PORT` the
answer SERVING of the standard health service. Runs beside the process it asks, in the same
environment: with BATON_TLS_DIR it shows that process' certificate, with BATON_SSL_CERTFILE `http`
is `https`.

Source: https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 4.0


def probe(url: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """What is wrong, or None."""
    if url.startswith("grpc://"):
        return _grpc(url.removeprefix("grpc://"), timeout_s)
    context = None
    if os.environ.get("BATON_SSL_CERTFILE"):
        # The process beside us, whose certificate is for another name.
        url = url.replace("http://", "https://", 1)
        context = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=context):
            return None
    except (OSError, ValueError) as error:
        return str(error)


def _grpc(address: str, timeout_s: float) -> str | None:
    # Here, so that a look at HTTP does not pay for it.
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import HealthStub

    from baton.cluster.tls.folder import channel_credentials, open_tls

    folder, name = os.environ.get("BATON_TLS_DIR"), os.environ.get("BATON_TLS_SERVER_NAME")
    tls = open_tls(Path(folder)) if folder else None
    options = (("grpc.ssl_target_name_override", name),) if name else ()
    with (
        grpc.secure_channel(address, channel_credentials(tls.latest()), options)
        if tls
        else grpc.insecure_channel(address)
    ) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    serving = answer.status == HealthCheckResponse.SERVING
    return None if serving else HealthCheckResponse.ServingStatus.Name(answer.status)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m baton.cluster.probe URL", file=sys.stderr)
        return 2
    problem = probe(arguments[0])
    print(problem or "healthy")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
