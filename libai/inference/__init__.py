"""Inference in eager and graph mode: text generation with a key-value cache, embeddings and
classification.
"""

from libai.inference.generation import GenerationOptions, Generator
from libai.inference.pipeline import Pipeline
