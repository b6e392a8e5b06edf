"""The decode worker: promises room, receives KV caches, generates tokens."""
