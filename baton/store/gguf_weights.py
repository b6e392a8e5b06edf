"""Tensors of a GGUF file under their Hugging Face names, as a stream of bf16 bytes.

GGUF stores the q and k rows of the llama family interleaved for its own RoPE; here they go back
to the halves that `rotate_half` expects. Work is done in chunks of whole rows (whole heads where
rows move), so memory does not grow with the model. A value that is no number means damage.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from baton.store.errors import StoreError
from baton.store.gguf_file import GGUFFile, TensorInfo
from baton.store.safetensors_file import TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ROPE_FREQS = "rope_freqs.weight"
_CHUNK_ELEMENTS = 1 << 18
_PERMUTED = ("llama", "mistral")
_BF16_EXPONENT = 0x7F80


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to write. `head_dim` > 0: its rows are interleaved per head."""

    spec: TensorSpec
    info: TensorInfo
    head_dim: int


def plan_tensors(file: GGUFFile, config: dict[str, Any]) -> list[TensorPlan]:
    """Every tensor that the model needs, checked; any tensor left over is refused."""
    wanted = _wanted(file, config)
    plans = [_plan(file, *entry) for entry in wanted]
    unknown = file.tensors.keys() - {plan.info.name for plan in plans} - {ROPE_FREQS}
    if unknown:
        raise StoreError(
            f"{file.path} holds the tensor {min(unknown)!r}, unknown for its architecture, so its "
            "model is a variant that is not supported; choose a plain model of its family."
        )
    return plans


def _plan(
    file: GGUFFile, gguf_name: str, name: str, shape: tuple[int, ...], head_dim: int
) -> TensorPlan:
    info = file.tensors.get(gguf_name)
    if info is None:
        raise StoreError(f"{file.path} lacks the tensor {gguf_name!r}; download it again.")
    if info.shape != shape:
        raise StoreError(
            f"{file.path} has tensor {gguf_name!r} of shape {info.shape} instead of {shape}; "
            "it is damaged or of an unsupported variant, get another conversion."
        )
    return TensorPlan(TensorSpec(name, "BF16", shape), info, head_dim)


def _wanted(file: GGUFFile, config: dict[str, Any]) -> list[tuple[str, str, tuple[int, ...], int]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    entries: list[tuple[str, str, tuple[int, ...], int]] = [
        ("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden), 0)
    ]
    for layer in range(config["num_hidden_layers"]):
        for gguf_name, name, shape, head_dim in _layer(config):
            entries.append(
                (f"blk.{layer}.{gguf_name}", f"model.layers.{layer}.{name}", shape, head_dim)
            )
    entries.append(("output_norm.weight", "model.norm.weight", (hidden,), 0))
    if not config["tie_word_embeddings"]:
        entries.append(("output.weight", "lm_head.weight", (vocab, hidden), 0))
    return entries


def _layer(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    hidden, mlp, head_dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = (config[f"num_{k}_heads"] * head_dim for k in ("attention", "key_value"))
    moved = head_dim if config["model_type"] in _PERMUTED else 0
    yield "attn_norm.weight", "input_layernorm.weight", (hidden,), 0
    projections = (("q", q, hidden, moved), ("k", kv, hidden, moved), ("v", kv, hidden, 0))
    for letter, rows, columns, heads in (*projections, ("output", hidden, q, 0)):
        gguf_name, name = f"attn_{letter}", f"self_attn.{letter[0]}_proj"
        yield f"{gguf_name}.weight", f"{name}.weight", (rows, columns), heads
        if config.get("attention_bias") or (config["model_type"] == "qwen2" and letter != "output"):
            yield f"{gguf_name}.bias", f"{name}.bias", (rows,), heads
    if config["model_type"] == "qwen3":
        yield "attn_q_norm.weight", "self_attn.q_norm.weight", (head_dim,), 0
        yield "attn_k_norm.weight", "self_attn.k_norm.weight", (head_dim,), 0
    yield "ffn_norm.weight", "post_attention_layernorm.weight", (hidden,), 0
    yield "ffn_gate.weight", "mlp.gate_proj.weight", (mlp, hidden), 0
    yield "ffn_up.weight", "mlp.up_proj.weight", (mlp, hidden), 0
    yield "ffn_down.weight", "mlp.down_proj.weight", (hidden, mlp), 0


def read_floats(file: GGUFFile, name: str) -> list[float]:
    """A small tensor as numbers; empty if the file has none of that name."""
    info = file.tensors.get(name)
    if info is None:
        return []
    with file.path.open("rb") as stream:
        raw = _read(stream, file.path, info, 0, info.nbytes)
    return [float(value) for value in _dequantize(raw, info, file.path)]


def stream_bf16(stream: BinaryIO, path: Path, plan: TensorPlan) -> Iterator[bytes]:
    """The bytes of one tensor, chunk by chunk."""
    # A bias is a column of the matrix its projection would be: one value per row.
    rows, columns = (plan.info.shape[0], plan.info.shape[1] if len(plan.info.shape) > 1 else 1)
    rows_per_chunk = rows if len(plan.info.shape) == 1 else max(1, _CHUNK_ELEMENTS // columns)
    if plan.head_dim:
        rows_per_chunk += -rows_per_chunk % plan.head_dim
    row_bytes = plan.info.nbytes / rows
    for start in range(0, rows, rows_per_chunk):
        count = min(rows_per_chunk, rows - start)
        raw = _read(stream, path, plan.info, round(start * row_bytes), round(count * row_bytes))
        values = _dequantize(raw, plan.info, path).reshape(count, columns)
        if plan.head_dim:
            values = unpermute(values, plan.head_dim)
        yield _to_bf16(values, plan.info, path)


def unpermute(rows: "npt.NDArray[np.float32]", head_dim: int) -> "npt.NDArray[np.float32]":
    """(pair 0, pair 1, …) of each head → (first halves of the pairs, second halves)."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _read(stream: BinaryIO, path: Path, info: TensorInfo, start: int, size: int) -> bytes:
    stream.seek(info.offset + start)
    raw = stream.read(size)
    if len(raw) != size:
        raise StoreError(f"{path} became shorter while it was read; download it again.")
    return raw


def _dequantize(raw: bytes, info: TensorInfo, path: Path) -> "npt.NDArray[np.float32]":
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(info.type)
    # One long row: the package works row group by row group, which is slow for short rows.
    row = np.frombuffer(raw, dtype=np.uint8).reshape(1, -1)
    try:
        with np.errstate(all="ignore"):
            return dequantize(row, kind).reshape(-1)
    except NotImplementedError as error:
        raise StoreError(
            f"{path} has tensor {info.name!r} in the format {kind.name}, which cannot be read; "
            "get a conversion in another quantization, such as Q4_K_M or Q8_0."
        ) from error


def _to_bf16(values: "npt.NDArray[np.float32]", info: TensorInfo, path: Path) -> bytes:
    """Round to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    if ((rounded & _BF16_EXPONENT) == _BF16_EXPONENT).any():
        raise StoreError(
            f"{path} is damaged: tensor {info.name!r} has values that are no numbers; "
            "download it again."
        )
    return rounded.tobytes()
