"""Text in and out of token ids: chat templates, tokenising, detokenising, stop strings.

Knows nothing of HTTP, workers or scheduling. Streamed and gathered answers use the same
code, so their text is the same. Invariant: a character is never split over two deltas.
"""

from router.text.detokenizer import Detokenizer
from router.text.model import TextModel, load_text_model
from router.text.stop import StopMatcher, StopPatterns
from router.text.template import ChatTemplate, TemplateError
from router.text.tokenizer import Tokenizer, UnsupportedTokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopMatcher",
    "StopPatterns",
    "TemplateError",
    "TextModel",
    "Tokenizer",
    "UnsupportedTokenizer",
    "load_text_model",
]
