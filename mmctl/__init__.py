"""mmctl: see, measure, place, trip and recover nodes that serve multimodal models."""

__version__ = "0.1.0"
