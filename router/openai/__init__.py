"""The OpenAI HTTP API: what requests may say, and how answers look."""
