"""The router: an OpenAI-compatible gateway that conducts requests over prefill and decode."""
