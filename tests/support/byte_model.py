"""A model directory whose tokens are bytes: id 65 is "A", so scripted outputs are plain bytes.

A few words are single tokens too, and two special tokens frame chat turns. The tokenizer is a
real one of the `tokenizers` library.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.text import TextModel, load_text_model
from router.text.tokenizer import BYTE_OF_CHAR

WORDS = ("hello", "world", "baton")
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
VOCAB_SIZE = 320
MAX_MODEL_LEN = 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    vocabulary = dict(BYTE_OF_CHAR)
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merge = (word[: end - 1], word[end - 1])
            if "".join(merge) not in vocabulary:
                vocabulary["".join(merge)] = len(vocabulary)
                merges.append(merge)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(IM_START, special=True), AddedToken(IM_END, special=True)]
    )
    return tokenizer


def write_byte_model(directory: Path, template: str | None = TEMPLATE) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"bos_token": IM_START, "eos_token": {"content": IM_END}}
    if template is not None:
        tokenizer_config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


def byte_model(directory: Path, template: str | None = TEMPLATE) -> TextModel:
    return load_text_model("bytes", write_byte_model(directory, template), "fingerprint-a")


def eos_id(model: TextModel) -> int:
    return model.tokenizer.encode(IM_END, False)[0]
