"""Datasets, sample order and loaders.

Everything here is NumPy; the trainer converts batches to tensors.

A dataset is an object with `len(ds)` and `ds[i] -> dict`, or `ds.get_batch(indices) -> dict of
arrays`. The keys are the arguments of `model.forward`. `build_train_loader` and `build_eval_loader`
split the dataset across ranks.
"""

from libai.data.batches import PadCollate
from libai.data.datasets import BlendedDataset, InMemoryDataset
from libai.data.documents import Preprocessed, preprocess
from libai.data.errors import DataError, SampleError
from libai.data.loaders import EvalLoader, TrainLoader, build_eval_loader, build_train_loader
from libai.data.prepare import build_stdlib_dataset, build_text_dataset
from libai.data.samples import MaskedTokens, SentenceOrder, SpanCorruption
from libai.data.sampling import SampleRandom, SampleStream
from libai.data.tables import encode_file, encode_rows
from libai.data.tokenizers import BPETokenizer, ByteTokenizer, load_tokenizer
from libai.data.vision import CifarDataset, DigitsDataset, ImageFolderDataset, MnistDataset
from libai.data.windows import MegatronDataset, TokenDataset
