"""The settings of each process: one frozen, validated object, built in its `__main__`.

Fields are flags (`--max-queue 64`), environment variables (`BATON_MAX_QUEUE=64`) and TOML keys
(`max_queue = 64`), in this order of precedence. A wrong value raises SettingsError, a sentence
that names the field. Knows nothing of what the numbers are for.
"""

import re
import secrets
import socket
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from baton.cluster.redis_client import connect
from baton.cluster.settings_source import Settings, choices, fail, load_or_exit, option
from baton.cluster.values import parse_cores, parse_size, parse_targets
from baton.kv_policy import parse_policy
from baton.speculate import parse_speculation

__all__ = [
    "DType",
    "DecodeSettings",
    "KVDType",
    "PrefillSettings",
    "RouterSettings",
    "Settings",
    "WorkerSettings",
    "fail",
    "load_or_exit",
]

MAX_BLOCK_SIZE = 256
CHUNK_SIZE = 128
"""On a CPU longer chunks gain nothing (ADR 0043)."""
DType = Literal["bfloat16", "float32"]
KVDType = Literal["auto", "fp8", "int8", "int4"]
WireCodec = Literal["raw", "fp8", "int8", "int4", "auto"]
LogLevel = Literal["debug", "info", "warning", "error"]
Transport = Literal["auto", "shm", "torch", "grpc"]
DecodePrefills = Literal["never", "fallback", "auto"]
Policy = Literal["slo", "least_loaded", "round_robin", "prefix", "power_of_two"]
SloPolicy = Literal["best_effort", "reject"]


def _redis_url(value: str) -> str:
    connect(value)  # opens no connection yet
    return value


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("not a power of two")
    return value


def _named_targets(value: str) -> str:
    parse_targets(value)
    return value


def _speculate(value: str) -> str:
    parse_speculation(value)
    return value


def _kv_policy(value: str) -> str:
    return str(parse_policy(value))


def _cores(value: object) -> tuple[int, ...] | None:
    return parse_cores(value)  # type: ignore[arg-type]


def _origins(value: str) -> str:
    for origin in filter(None, value.split(",")):
        if not re.fullmatch(r"https?://[^/\s*,]+", origin):
            raise ValueError("not an origin")
    return value


Origins = Annotated[str, AfterValidator(_origins)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
SecondsOrNone = Annotated[float, Field(ge=0, le=86_400)]
Millis = Annotated[float, Field(gt=0, le=86_400_000)]
KVPolicyText = Annotated[str, AfterValidator(_kv_policy)]
NamedTargets = Annotated[str, AfterValidator(_named_targets)]
Port = Annotated[int, Field(ge=0, le=65_535)]
RedisUrl = Annotated[str, AfterValidator(_redis_url)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Cores = Annotated[tuple[int, ...] | None, NoDecode, BeforeValidator(_cores)]
BlockSize = Annotated[int, Field(ge=1, le=MAX_BLOCK_SIZE), AfterValidator(_power_of_two)]
Share = Annotated[float, Field(ge=0, le=1)]
Speculate = Annotated[str, AfterValidator(_speculate)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$")]

_SHARE = "a share from 0 to 1"
_SPECULATE = "off, ngram, ngram(match=3, tokens=8) or draft(MODEL, tokens=4)"
KV_POLICY = (
    "full, streaming(sinks=4,window=1024), snapkv(budget=0.25) or h2o(budget=512), with any window "
    "of at least 1 and a budget in tokens or up to 100 % of the prompt"
)
_COUNT = "a whole number of at least 1"
_SECONDS = "a positive number of seconds, at most 86400"
_MILLIS = "a positive number of milliseconds, at most 86400000"
_TARGETS = "a list such as gold=500/50,free=5000/200/reject (NAME=TTFT/TPOT in ms, - for none)"
_PORT = "a port from 0 (any free one) to 65535"
_REDIS = "a URL such as redis://127.0.0.1:6379/0"
_NAME = "a name without spaces"
_SWITCH = "true or false"
_PATH = "a path"
_ORIGINS = "a list such as https://app.example.com,http://localhost:3000"
_SIZE = "a size such as 512MiB or 2GiB"


class CommonSettings(Settings):
    """What every process has."""

    host: Name = option("127.0.0.1", "address to listen on", "a host name or address")
    redis_url: RedisUrl = option(
        "redis://127.0.0.1:6379/0", "Redis of the cluster", _REDIS, "--redis"
    )
    model: str = option(
        "smollm2",
        "name in the model store, path or hub id",
        "a model's name, path or hub id",
        min_length=1,
    )
    peer_timeout_s: Seconds = option(
        3.0, "a stopped or cut-off process counts as lost after this silence", _SECONDS
    )
    tls_dir: Path | None = option(
        None,
        "folder with ca.crt, tls.crt and tls.key: gRPC between processes is mutual TLS",
        "a path to a folder",
    )
    tls_server_name: Name | None = option(
        None, "name that certificates of workers must have (default: the host called)", _NAME
    )
    log_level: LogLevel = option("info", "least level to log", choices(LogLevel))
    log_json: bool = option(False, "log JSON lines", _SWITCH)


class RouterSettings(CommonSettings):
    """The router: HTTP in front, workers behind."""

    table: ClassVar[str] = "router"
    port: Port = option(8000, "HTTP port", _PORT)
    reuse_port: bool = option(
        False, "share the port with other routers of this cluster on this machine", _SWITCH
    )
    max_queue: Count = option(256, "requests that may wait for admission", _COUNT)
    max_running: Count = option(1024, "requests in flight at once", _COUNT)
    queue_timeout_s: Seconds = option(30.0, "longest wait for admission", _SECONDS)
    request_timeout_s: Seconds = option(600.0, "longest life of a request", _SECONDS)
    default_request_timeout_s: Seconds | None = option(
        None, "life of a request that names none (default: the longest)", _SECONDS
    )
    reserve_timeout_s: Seconds = option(5.0, "longest wait for decode's promise", _SECONDS)
    prefill_timeout_s: Seconds = option(120.0, "longest silence of a prefill worker", _SECONDS)
    decode_timeout_s: Seconds = option(120.0, "longest silence of a decode worker", _SECONDS)
    served_model_name: Name | None = option(None, "public name of the model", _NAME)
    ledger_recent: Count = option(512, "ended requests kept for GET /v1/requests", _COUNT)
    otlp_endpoint: str | None = option(
        None,
        "OTLP/HTTP address that traces are sent to; none are without it",
        "a URL such as http://localhost:4318/v1/traces",
        pattern=r"^https?://\S+$",
    )
    ledger_log: Path | None = option(
        None, "file for the ledger of every request: JSON lines, or FILE.parquet", "a path"
    )
    ledger_log_bytes: Size = option(
        64 << 20, "size at which the ledger log starts over; one old file is kept", _SIZE
    )
    policy: Policy = option("slo", "how workers are chosen", choices(Policy))
    decode_prefills: DecodePrefills = option(
        "auto",
        "prompts computed by decode itself: never, without a prefill worker, or where that is "
        "predicted better too",
        choices(DecodePrefills),
    )
    prefill_backlog_s: Seconds = option(
        0.25, "predicted work given to a prefill worker ahead of its turn", _SECONDS
    )
    slow_start_s: SecondsOrNone = option(
        10.0,
        "time until a worker that joins others is given as much as they are; 0: at once",
        "a number of seconds from 0 to 86400",
    )
    ttft_ms: Millis | None = option(None, "target for the time to first token", _MILLIS)
    tpot_ms: Millis | None = option(None, "target for the time per further token", _MILLIS)
    slo_policy: SloPolicy = option(
        "best_effort", "a request whose targets cannot be met: serve or refuse", choices(SloPolicy)
    )
    model_targets: NamedTargets = option("", "targets by served model name", _TARGETS)
    tenant_targets: NamedTargets = option("", "targets by tenant", _TARGETS)
    api_keys_file: Path | None = option(
        None, "file of API keys, read again when it changes; without keys all are let in", _PATH
    )
    api_keys: str = option("", "API keys, as lines of such a file", "lines of `baton keys new`")
    cors_origins: Origins = option(
        "", "origins whose pages may call the API from a browser", _ORIGINS
    )
    ssl_certfile: Path | None = option(
        None, "certificate of the HTTP port, which is HTTPS then; with its chain, PEM", _PATH
    )
    ssl_keyfile: Path | None = option(None, "key of that certificate, if it is elsewhere", _PATH)

    @model_validator(mode="after")
    def _a_key_has_a_certificate(self) -> Self:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile.")
        return self


class WorkerSettings(CommonSettings):
    """What prefill and decode workers have in common."""

    worker_id: Name = Field(
        default_factory=lambda: f"worker-{secrets.token_hex(3)}",
        description="name of this worker in the cluster (default: role and a random suffix)",
        json_schema_extra={"accepts": _NAME},
    )
    port: Port = option(0, "gRPC port; 0 picks a free one", _PORT)
    advertise: Name | None = option(
        None, "host:port that others reach this worker at (default: host and port)", "host:port"
    )
    metrics_port: Port | None = option(
        None, "HTTP port of its Prometheus metrics; none are served without it", _PORT
    )
    dtype: DType = option("bfloat16", "element type of weights and cache", choices(DType))
    kv_dtype: KVDType = option(
        "auto", "how the KV cache is kept: as the model computes, or quantized", choices(KVDType)
    )
    kv_policy: KVPolicyText = option(
        "full", "what a sequence keeps in its KV cache, of requests that name nothing", KV_POLICY
    )
    block_size: BlockSize = option(
        16, "tokens per KV block", f"a power of two from 1 to {MAX_BLOCK_SIZE}"
    )
    num_blocks: Count | None = option(None, "KV blocks (default: from --kv-memory)", _COUNT)
    kv_memory: Size = option(512 << 20, "memory for the KV pool, e.g. 512MiB", _SIZE)
    max_model_len: Count | None = option(
        None, "longest prompt plus output (default: the model's)", _COUNT
    )
    max_num_seqs: Count = option(64, "sequences in one batch", _COUNT)
    max_queue: Count = option(256, "requests that may wait", _COUNT)
    chunk_size: Count | None = option(
        None, f"tokens per step (default: {CHUNK_SIZE}, at least 2 * --max-num-seqs)", _COUNT
    )
    threads: Count | None = option(None, "compute threads (default: one per core)", _COUNT)
    cores: Cores = option(None, "cores to run on, e.g. 0-1", "a list of cores such as 0-1,3")
    enable_prefix_cache: bool = option(True, "reuse blocks of shared prefixes", _SWITCH)
    pin_quota: Share = option(
        0.25,
        "share of the KV blocks that one tenant may pin; all together may pin twice that",
        _SHARE,
    )
    self_profile: bool = option(
        True, "measure this worker's speed at its first start, for 2 s at most", _SWITCH
    )
    lease_s: Seconds = option(30.0, "life of a reservation without a hand-off", _SECONDS)
    drain_timeout_s: Seconds = option(30.0, "longest wait for running work at exit", _SECONDS)
    transport: Transport = option(
        "auto", "how KV travels; gRPC is what every way falls back to", choices(Transport)
    )
    transport_timeout_s: Seconds = option(
        3.0, "longest wait for one payload on a transport", _SECONDS
    )

    @model_validator(mode="after")
    def _a_block_fits_the_context(self) -> Self:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError("--max-model-len must leave room for a prompt and one output token.")
        return self

    @property
    def tokens_per_step(self) -> int:
        """At most. In a full batch, half of them are left for prompts."""
        return self.chunk_size or max(CHUNK_SIZE, 2 * self.max_num_seqs)

    @property
    def transports(self) -> tuple[str, ...]:
        """Those that are tried. What torch.distributed sends is in clear, so where TLS is wanted
        it must be asked for by name."""
        if self.transport != "auto":
            return (self.transport,)
        return ("shm", "grpc") if self.tls_dir else ("shm", "torch", "grpc")

    def advertised(self, port: int) -> str:
        """The address that others reach this worker at, once its port is known."""
        if self.advertise is not None:
            return self.advertise
        host = socket.gethostname() if self.host in ("0.0.0.0", "::", "[::]") else self.host
        return f"{host}:{port}"


class PrefillSettings(WorkerSettings):
    """A prefill worker: builds KV caches and hands them to decode workers."""

    table: ClassVar[str] = "prefill"
    handoff_timeout_s: Seconds = option(
        10.0, "longest wait for decode to take a frame of a hand-off", _SECONDS
    )
    transport_retry_s: Seconds = option(
        10.0, "pause before a transport that failed is tried again", _SECONDS
    )
    wire_codec: WireCodec = option(
        "raw",
        "how KV is encoded on its way by gRPC or torch; auto: where the link is the bottleneck",
        choices(WireCodec),
    )
    kv_checksum: bool = option(True, "put a checksum on every frame of KV", _SWITCH)
    worker_id: Name = Field(
        default_factory=lambda: f"prefill-{secrets.token_hex(3)}",
        description="name of this worker in the cluster (default: role and a random suffix)",
        json_schema_extra={"accepts": _NAME},
    )


class DecodeSettings(WorkerSettings):
    """A decode worker: receives KV caches and generates tokens."""

    table: ClassVar[str] = "decode"
    speculate: Speculate = option(
        "off", "draft tokens and check them together (speculative decoding)", _SPECULATE
    )
    max_torch_groups: Count = option(16, "torch.distributed groups, one per prefill worker", _COUNT)
    worker_id: Name = Field(
        default_factory=lambda: f"decode-{secrets.token_hex(3)}",
        description="name of this worker in the cluster (default: role and a random suffix)",
        json_schema_extra={"accepts": _NAME},
    )
