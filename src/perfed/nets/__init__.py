"""Networks as ordered lists of named layers: `build` a known one, or `wrap` any `nn.Module`."""

from perfed.nets.attention import CrossAttention
from perfed.nets.net import Net
from perfed.nets.registry import build, min_size, names, options
from perfed.nets.wrap import wrap

__all__ = ["CrossAttention", "Net", "build", "min_size", "names", "options", "wrap"]
