"""Incremental text to spoken words: cleaning, spoken forms, sentence cuts, pause tags."""

from realtime.text.markup import DEFAULT_PAUSE_MS, MAX_PAUSE_MS
from realtime.text.pipeline import Cut, Item, Pause, Span, TextPipeline, Word

__all__ = ["DEFAULT_PAUSE_MS", "MAX_PAUSE_MS", "Cut", "Item", "Pause", "Span", "TextPipeline", "Word"]
