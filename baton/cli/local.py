"""Where a router answers that was started without options."""

LOCAL = "http://127.0.0.1:8000"
