"""Runs in an environment with torch, numpy, safetensors and transformers, importing neither libai nor oneflow."""
