"""The pre-tokenizer behind each `tokenizer.ggml.pre` name: how text is cut before merging.

A wrong cut gives other tokens than the model was trained on, and nothing shows it but worse
text, so an unknown name is refused rather than guessed.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from baton.store.errors import StoreError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt2": (_GPT2,),
    "digits": (r"\p{N}", _GPT2),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "llama3": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",),
    "qwen2": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",),
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
_GROUPS = {
    "gpt2": "gpt-2 gpt2 phi-2 olmo mpt jais trillion granite-docling",
    "digits": "smollm starcoder refact command-r codeshell exaone minerva-7b",
    "default": "default",
    "llama3": "llama-bpe llama3 llama-v3 falcon3 smaug-bpe dbrx megrez chatglm-bpe glm4 lfm2",
    "qwen2": "qwen2 deepseek-r1-qwen stablelm2 kormo hunyuan",
    "tekken": "tekken",
}
_BY_NAME = {name: group for group, names in _GROUPS.items() for name in names.split()}
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Here a piece that is a token itself is taken as it is, whatever the merges would give."""
BEGIN_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Here a prompt begins with the BOS token unless the file says otherwise."""
NORMALIZED = ("qwen2", "deepseek-r1-qwen")
"""Here text is brought to NFC first."""


def byte_level_pre_tokenizer(name: str, path: Path) -> "PreTokenizer":
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    group = _BY_NAME.get(name)
    if group is None:
        raise StoreError(
            f"{path} cuts text by the rules {name!r}, which are unknown here; use the model's "
            "Hugging Face directory, which brings its tokenizer.json."
        )
    splits = [Split(Regex(pattern), "isolated") for pattern in _PATTERNS[group]]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
