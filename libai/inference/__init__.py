"""Text from trained language models: greedy, sampled or by beams, with a cache of keys and values, in both modes."""

from libai.inference.generation import GenerationOptions as GenerationOptions
from libai.inference.generation import Generator as Generator
