"""Trained models in use: text generation with a cache of keys and values, embeddings, classes, in both modes."""

from libai.inference.generation import GenerationOptions, Generator
from libai.inference.pipeline import Pipeline
