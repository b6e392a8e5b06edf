"""The settings of `baton up`: how many of what, and what is passed on to every child.

Settings of the children given as flags here are passed on as flags; what stands in BATON_*
variables or in the TOML file reaches the children by itself, role tables included.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from baton.cluster.settings import (
    KV_POLICY,
    BlockSize,
    Count,
    DecodePrefills,
    DType,
    KVDType,
    KVPolicyText,
    LogLevel,
    Millis,
    Name,
    Policy,
    Port,
    RedisUrl,
    Seconds,
    Share,
    Size,
    Speculate,
    Transport,
    WireCodec,
)
from baton.cluster.settings_source import Settings, choices, option


def _gpus(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("not a whole number of GPUs")
    return value


RayAddress = Annotated[str, Field(min_length=1, pattern=r"^\S+$")]
Gpus = Annotated[float, Field(ge=0, le=64), AfterValidator(_gpus)]
WorkerCount = Annotated[int, Field(ge=0, le=64)]
RouterCount = Annotated[int, Field(ge=1, le=64)]
_COUNT = "a whole number of at least 1"
_ROUTERS = "a whole number from 1 to 64"
_WORKERS = "a whole number from 0 to 64"
WORKER_FIELDS = (
    "dtype",
    "kv_dtype",
    "kv_policy",
    "kv_memory",
    "num_blocks",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "chunk_size",
    "enable_prefix_cache",
    "pin_quota",
    "transport",
)
PREFILL_FIELDS = ("wire_codec",)
DECODE_FIELDS = ("speculate",)
ROUTER_FIELDS = (
    "max_running",
    "served_model_name",
    "policy",
    "decode_prefills",
    "ttft_ms",
    "tpot_ms",
    "api_keys_file",
    "ssl_certfile",
    "ssl_keyfile",
)
SHARED_FIELDS = ("max_queue", "log_level", "log_json")


class UpSettings(Settings):
    """A whole cluster on this machine: Redis, routers, prefill and decode workers."""

    table: ClassVar[str] = "up"
    routers: RouterCount = option(1, "router processes behind the port", _ROUTERS)
    prefill: WorkerCount = option(1, "prefill workers", _WORKERS)
    decode: WorkerCount = option(1, "decode workers", _WORKERS)
    host: Name = option("127.0.0.1", "address of the HTTP port", "a host name or address")
    port: Port = option(8000, "HTTP port", "a port from 0 (any free one) to 65535")
    redis_url: RedisUrl | None = option(
        None,
        "Redis to use (default: one of its own)",
        "a URL such as redis://127.0.0.1:6379/0",
        "--redis",
    )
    model: str = option(
        "smollm2", "name in the model store, path or hub id", "a model's name, path or hub id"
    )
    threads_per_worker: Count | None = option(
        None, "compute threads of a worker (default: its share of the cores)", _COUNT
    )
    stop_timeout_s: Seconds = option(
        30.0, "longest wait for a graceful stop", "a positive number of seconds"
    )
    ready_timeout_s: Seconds = option(
        600.0, "longest wait until it can serve", "a positive number of seconds"
    )
    tls: bool = option(
        False, "mutual TLS between the processes, with a throw-away authority", "true or false"
    )
    ray: RayAddress | None = option(
        None,
        "run on Ray: a cluster's address, or `local`; without an address the cluster of "
        "RAY_ADDRESS, else a local one",
        "an address such as 10.0.0.1:6379, auto or local",
        bare="default",
    )
    tls_dir: Path | None = option(
        None,
        "with --ray: a folder, on every node, that holds a folder of certificates for each role",
        "a path",
    )
    cpus_per_worker: Annotated[float, Field(ge=0, le=1024)] = option(
        1.0, "with --ray: CPUs of the cluster that a worker takes", "a number of CPUs, 0 or more"
    )
    gpus_per_worker: Gpus = option(
        0.0, "with --ray: GPUs that a worker takes", "a part of one GPU, or a whole number of them"
    )
    max_prefill: WorkerCount | None = option(
        None, "with --ray: prefill workers under load (default: no more)", _WORKERS
    )
    max_decode: WorkerCount | None = option(
        None, "with --ray: decode workers under load (default: no more)", _WORKERS
    )
    scale_down_after_s: Seconds = option(
        60.0,
        "with --ray: a pool shrinks after so long of little load",
        "a positive number of seconds",
    )
    dtype: DType | None = option(None, "as for a worker", "bfloat16 or float32")
    kv_dtype: KVDType | None = option(None, "as for a worker", "auto, fp8, int8 or int4")
    kv_policy: KVPolicyText | None = option(None, "as for a worker", KV_POLICY)
    kv_memory: Size | None = option(None, "as for a worker, each", "a size such as 512MiB or 2GiB")
    num_blocks: Count | None = option(None, "as for a worker", _COUNT)
    block_size: BlockSize | None = option(None, "as for a worker", "a power of two from 1 to 256")
    max_model_len: Count | None = option(None, "as for a worker", _COUNT)
    max_num_seqs: Count | None = option(None, "as for a worker", _COUNT)
    chunk_size: Count | None = option(None, "as for a worker", _COUNT)
    enable_prefix_cache: bool | None = option(None, "as for a worker", "true or false")
    pin_quota: Share | None = option(None, "as for a worker", "a share from 0 to 1")
    transport: Transport | None = option(None, "as for a worker", choices(Transport))
    wire_codec: WireCodec | None = option(None, "as for a prefill worker", choices(WireCodec))
    speculate: Speculate | None = option(
        None, "as for a decode worker", "off, ngram(…) or draft(MODEL)"
    )
    max_queue: Count | None = option(None, "as for router and workers", _COUNT)
    max_running: Count | None = option(None, "as for the router", _COUNT)
    served_model_name: Name | None = option(None, "as for the router", "a name without spaces")
    policy: Policy | None = option(None, "as for the router", choices(Policy))
    decode_prefills: DecodePrefills | None = option(
        None, "as for the router", choices(DecodePrefills)
    )
    ttft_ms: Millis | None = option(None, "as for the router", "a positive number of milliseconds")
    tpot_ms: Millis | None = option(None, "as for the router", "a positive number of milliseconds")
    api_keys_file: Path | None = option(None, "as for the router", "a path")
    ssl_certfile: Path | None = option(None, "as for the router", "a path")
    ssl_keyfile: Path | None = option(None, "as for the router", "a path")
    log_level: LogLevel | None = option(
        None, "as for every process", "debug, info, warning or error"
    )
    log_json: bool | None = option(None, "as for every process", "true or false")

    @model_validator(mode="after")
    def _ray_fits_the_rest(self) -> Self:
        if self.tls and self.ray is not None:
            raise ValueError(
                "--tls makes certificates for this machine only: with --ray put them on every node "
                "and name the folder with --tls-dir."
            )
        for name in ("tls_dir", "cpus_per_worker", "gpus_per_worker", "scale_down_after_s"):
            if name in self.model_fields_set and self.ray is None:
                raise ValueError(f"--{name.replace('_', '-')} needs --ray.")
        for role in ("prefill", "decode"):
            least, most = getattr(self, role), getattr(self, f"max_{role}")
            if most is not None and self.ray is None:
                raise ValueError(f"--max-{role} needs --ray: only there workers come and go.")
            if most is not None and most < least:
                raise ValueError(f"--max-{role} must be at least --{role}, {least}.")
        return self

    def passed_on(self, names: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
        """The checked values of `names` among the flags that were given."""
        return {name: getattr(self, name) for name in names if name in given}
