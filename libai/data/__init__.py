"""Datasets, sample order and loaders; everything is NumPy, the engine makes the tensors.

A dataset is an object with `len(ds)` and `ds[i] -> dict`, or `ds.get_batch(indices) -> dict of arrays`; the keys are
arguments of `model.forward`. `build_train_loader` and `build_eval_loader` cut it over the ranks.
"""

from libai.data.loading.batches import PadCollate
from libai.data.loading.datasets import BlendedDataset, InMemoryDataset
from libai.data.loading.errors import DataError, SampleError
from libai.data.loading.loaders import EvalLoader, TrainLoader, build_eval_loader, build_train_loader
from libai.data.loading.sampling import SampleRandom, SampleStream
from libai.data.text.megatron import MegatronDataset
from libai.data.text.prepare import build_stdlib_dataset, build_text_dataset, prepare_stdlib_tokens, prepare_tokens
from libai.data.text.preprocess import Preprocessed, preprocess
from libai.data.text.samples import MaskedTokens, SentenceOrder
from libai.data.text.span_corruption import SpanCorruption
from libai.data.text.tokenizers import BPETokenizer, ByteTokenizer, load_tokenizer
from libai.data.text.windows import TokenDataset
from libai.data.vision import CifarDataset, DigitsDataset, ImageFolderDataset, MnistDataset
