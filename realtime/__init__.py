"""Real-time speech: incremental text in over a WebSocket, 48 kHz PCM out."""

__version__ = "0.1.0"
