"""Quantize large language models to 1-4 bits with Gumbel-Softmax Quantization (arXiv 2604.18556)."""

__version__ = "0.1.0"
