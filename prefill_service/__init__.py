"""The prefill worker: computes prompts, draws first tokens, ships KV caches to decode."""
