"""Runs in an environment with torch, numpy and safetensors, where it imports neither libai nor oneflow."""
